// Package nextrelease builds the release after this one, for the tests of two releases that follow each other.
//
// The later release differs from this tree in the files below e2e/testdata/next, which lie there under the paths that
// they replace or add. A go build overlay ("go help build", -overlay) puts them in place, so production code has no
// seam for them. A copy has to follow the file that it replaces: Outdated compares the originals with the digests in
// e2e/testdata/next/originals.sha256, which `go run ./internal/nextrelease/overlay -update` rewrites.
package nextrelease

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

const (
	copies    = "e2e/testdata/next"
	originals = copies + "/originals.sha256" // in the format of sha256sum(1)
	removed   = copies + "/removed.txt"      // files that the later release does not have, one per line
)

// root is the directory of the module.
func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

// files returns the paths of the copies below root/copies, sorted, as paths of the module.
func files() (paths []string, err error) {
	dir := filepath.Join(root(), copies)
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && filepath.Ext(path) == ".go" {
			rel, _ := filepath.Rel(dir, path)
			paths = append(paths, rel)
		}
		return err
	})
	return paths, err
}

// Overlay returns the overlay file that builds the later release. Its paths are absolute.
func Overlay() ([]byte, error) {
	replace := map[string]string{}
	paths, err := files()
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		replace[filepath.Join(root(), path)] = filepath.Join(root(), copies, path)
	}
	gone, err := os.ReadFile(filepath.Join(root(), removed))
	if err != nil {
		return nil, err
	}
	for path := range strings.Lines(string(gone)) {
		replace[filepath.Join(root(), strings.TrimSpace(path))] = ""
	}
	return json.MarshalIndent(map[string]any{"Replace": replace}, "", "\t")
}

// Flag writes the overlay into dir and returns the flag of the go command that uses it.
func Flag(dir string) (string, error) {
	text, err := Overlay()
	if err != nil {
		return "", fmt.Errorf("overlay of the next release: %w", err)
	}
	path := filepath.Join(dir, "next.overlay.json")
	whole := fmt.Sprintf("%s.%d", path, os.Getpid()) // another process may read path
	if err := os.WriteFile(whole, text, 0o600); err != nil {
		return "", err
	}
	return "-overlay=" + path, os.Rename(whole, path)
}

// digests returns the correct content of originals.sha256: a line for each file that a copy replaces.
func digests() ([]byte, error) {
	paths, err := files()
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	for _, path := range paths {
		text, err := os.ReadFile(filepath.Join(root(), path))
		if errors.Is(err, fs.ErrNotExist) {
			continue // the later release adds this file
		}
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&out, "%x  %s\n", sha256.Sum256(text), path)
	}
	return out.Bytes(), nil
}

// Update records the current originals as the ones that the copies follow.
func Update() error {
	text, err := digests()
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root(), originals), text, 0o644)
}

// Outdated lists the files that have changed since their copies were made.
func Outdated() ([]string, error) {
	is, err := digests()
	if err != nil {
		return nil, err
	}
	was, err := os.ReadFile(filepath.Join(root(), originals))
	if err != nil {
		return nil, err
	}
	return changed(string(was), string(is)), nil
}

// changed lists the paths whose lines differ between two lists of digests.
func changed(was, is string) (paths []string) {
	lines := map[string]int{}
	for line := range strings.Lines(was) {
		lines[line]++
	}
	for line := range strings.Lines(is) {
		lines[line]--
	}
	for line, n := range lines {
		if _, path, ok := strings.Cut(strings.TrimSpace(line), "  "); n != 0 && ok {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}
