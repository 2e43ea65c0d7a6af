// Package testbin builds the programs that tests execute, once for all test processes of a source tree.
//
// The programs lie in .cache/testbin of the module. A test process that finds them up to date starts within a quarter
// of a second; go build takes seconds to link one with the race detector.
package testbin

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gofrs/flock"
)

// Program is a main package to build.
type Program struct {
	Name    string // of the file
	Package string // import path
	Flags   []string
}

// Shim returns the shim that the tests run. flags are further flags of go build.
func Shim(name string, flags ...string) Program { return Program{name, "holdfast/shim", flags} }

// FaultyShim returns the program to which fault.Binary adds faults.
func FaultyShim(name string) Program { return Program{name, "holdfast/shim/internal/faulty", nil} }

const (
	kept     = 3 // sets of programs that stay, beside those in use
	lockPoll = 20 * time.Millisecond
)

// inUse keeps the locks of this process, because a set whose lock is free may be removed.
var inUse []*flock.Flock

// Build returns a directory that holds the programs, without debugging information. If the caller was built with the
// race detector, they are too. The directory and its files must not be changed. They stay until this process has ended.
func Build(programs ...Program) (dir string, err error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Join(cache, "sets"), 0o755); err != nil {
		return "", err
	}
	lock := flock.New(filepath.Join(cache, "lock"))
	if _, err := lock.TryLockContext(context.Background(), lockPoll); err != nil {
		return "", fmt.Errorf("lock the cache of test programs: %w", err)
	}
	defer func() { err = errors.Join(err, lock.Unlock()) }()
	built := make(map[string]string, len(programs)) // file by name
	for _, p := range programs {
		if built[p.Name], err = p.build(cache); err != nil {
			return "", err
		}
	}
	return publish(cache, built)
}

// cacheDir returns .cache/testbin of the module.
func cacheDir() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	root := filepath.Dir(strings.TrimSpace(string(out)))
	if err != nil || root == "." {
		return "", fmt.Errorf("find the module (go env GOMOD printed %q): %w", out, err)
	}
	return filepath.Join(root, ".cache", "testbin"), nil
}

// build runs go build to bring the program up to date, in a file that only builds change.
func (p Program) build(cache string) (string, error) {
	flags := slices.Concat([]string{"build", "-ldflags=-s -w"}, raceFlag, p.Flags)
	file := filepath.Join(cache, "build", hashOf(flags...), p.Name)
	cmd := exec.Command("go", append(flags, "-o", file, p.Package)...)
	cmd.Dir = cache
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", p.Package, err, out)
	}
	return file, nil
}

// publish copies the files to a directory that is named after their contents, unless it exists.
func publish(cache string, built map[string]string) (string, error) {
	var key []string
	for name, file := range built {
		id, err := buildID(file)
		if err != nil {
			return "", err
		}
		key = append(key, name+" "+id)
	}
	slices.Sort(key)
	dir := filepath.Join(cache, "sets", hashOf(key...))
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		if err := copyAll(dir, built); err != nil {
			return "", err
		}
	}
	now := time.Now()
	if err := os.Chtimes(dir, now, now); err != nil {
		return "", err
	}
	lock := flock.New(dir + ".lock")
	if _, err := lock.TryRLock(); err != nil {
		return "", err
	}
	inUse = append(inUse, lock)
	return dir, prune(filepath.Dir(dir))
}

func copyAll(dir string, files map[string]string) error {
	temp, err := os.MkdirTemp(filepath.Dir(dir), "new-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp) // gone after the rename
	for name, file := range files {
		if err := copyFile(filepath.Join(temp, name), file); err != nil {
			return err
		}
	}
	return os.Rename(temp, dir)
}

func copyFile(to, from string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
}

// prune removes the least recently used sets that no process uses.
func prune(sets string) error {
	entries, err := os.ReadDir(sets)
	if err != nil {
		return err
	}
	used := map[string]time.Time{}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && e.IsDir() {
			used[e.Name()] = info.ModTime()
		}
	}
	names := make([]string, 0, len(used))
	for name := range used {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int { return used[b].Compare(used[a]) })
	for _, name := range names[min(len(names), kept):] {
		lock := flock.New(filepath.Join(sets, name+".lock"))
		if free, err := lock.TryLock(); err != nil || !free {
			continue
		}
		err = errors.Join(err, os.RemoveAll(filepath.Join(sets, name)), os.Remove(lock.Path()), lock.Unlock())
	}
	return err
}

// buildID returns an ID of the content of a Go program.
func buildID(file string) (string, error) {
	f, err := elf.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	note := f.Section(".note.go.buildid")
	if note == nil {
		return "", fmt.Errorf("%s has no build ID", file)
	}
	id, err := note.Data()
	return string(id), err
}

func hashOf(parts ...string) string {
	h := fnv.New64a()
	for _, p := range parts {
		_, _ = io.WriteString(h, p+"\x00")
	}
	return fmt.Sprintf("%016x", h.Sum64())
}
