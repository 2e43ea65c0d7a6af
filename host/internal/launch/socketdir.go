package launch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
	"holdfast/registry"
)

const (
	// maxSocketPath is the longest path of a unix socket that the kernel takes.
	maxSocketPath = 107
	// longestSocketName is what go-plugin may add to the directory: a slash, "plugin" and a number of up to 10 digits.
	longestSocketName = len("/plugin") + 10

	socketDirPrefix = "shim-"
	ownerFile       = ".holdfast-launch"
	// orphanAge is when an empty directory without an owner is one whose maker died while making it.
	orphanAge = time.Minute
)

// socketDir is the private directory of one shim process. A lock on it, which ends with the host, says that it is in use.
type socketDir struct {
	path string
	lock *os.File // the directory itself, flocked
}

// newSocketDir makes <runDir>/shim-<generation>-<random>.
func newSocketDir(runDir string, generation uint64) (*socketDir, error) {
	if err := os.MkdirAll(runDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the run directory: %w", err)
	}
	prefix := fmt.Sprintf("%s%d-", socketDirPrefix, generation)
	if err := checkLength(runDir, prefix); err != nil {
		return nil, err
	}
	for range 10 { // another host that removes orphans may take ours for one before we have locked it
		d, err := makeLocked(runDir, prefix)
		if d != nil || err != nil {
			return d, err
		}
	}
	return nil, registry.Errorf(registry.ErrUnavailable, "make a socket directory in %s: something keeps removing it", runDir)
}

func checkLength(runDir, prefix string) error {
	const random = 10
	length := len(filepath.Join(runDir, prefix)) + random + longestSocketName
	if length <= maxSocketPath {
		return nil
	}
	return registry.Invalid("a socket in %s would have a path of up to %d bytes, the kernel takes %d: "+
		"choose a run directory that is %d bytes shorter", runDir, length, maxSocketPath, length-maxSocketPath)
}

func makeLocked(runDir, prefix string) (*socketDir, error) {
	path, err := os.MkdirTemp(runDir, prefix)
	if err != nil {
		return nil, fmt.Errorf("make a socket directory: %w", err)
	}
	lock, err := lockDir(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("lock the socket directory: %w", err)
	}
	d := &socketDir{path: path, lock: lock}
	err = os.WriteFile(filepath.Join(path, ownerFile), ownerMark(), 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, unlock(lock)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("mark the socket directory: %w", err), d.remove())
	}
	return d, nil
}

func ownerMark() []byte { return fmt.Appendf(nil, "host pid %d\n", os.Getpid()) }

// lockDir takes the lock of a directory, or says EWOULDBLOCK.
func lockDir(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// remove removes the directory with all that is in it, if nothing hinders that; a later start tries again.
func (d *socketDir) remove() error { return errors.Join(d.clear(), unlock(d.lock)) }

// unlock gives the lock back and closes its file. To close it is not enough: a process that is forked in this moment has the same file open until
// it executes its program, and the next start would leave the directory alone.
func unlock(lock *os.File) error {
	return errors.Join(unix.Flock(int(lock.Fd()), unix.LOCK_UN), lock.Close())
}

// clear removes the very directory that is locked, wherever a shim has moved it and whatever has its name by now. What is mounted there is not ours
// to remove, nor is what lies in it, nor where a link leads. Our mark goes last.
func (d *socketDir) clear() error {
	var stat unix.Stat_t
	if err := unix.Fstat(int(d.lock.Fd()), &stat); err == nil && stat.Nlink == 0 {
		return nil // somebody has removed it: what was in it is gone, and another directory may have its name
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", d.lock.Fd())) // as the table of mounts names it
	if err != nil {
		return err
	}
	mounts, err := mount.Below(path)
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return registry.Errorf(registry.ErrConflict, "%s is mounted in the socket directory of a shim: unmount it, and the next start "+
			"of a shim removes the directory", mounts[0].Point)
	}
	_ = d.lock.Chmod(0o700) // a shim may have changed it; what that hinders says so itself
	root, err := d.open(path)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := empty(root); err != nil {
		return err
	}
	if err := unlessGone(root.Remove(ownerFile)); err != nil {
		return err
	}
	if err := unlessGone(os.Remove(path)); err != nil {
		return errors.Join(err, root.WriteFile(ownerFile, ownerMark(), 0o600))
	}
	return unlessGone(os.Remove(d.path))
}

// open opens the locked directory at a path, from where nothing leads out of it.
func (d *socketDir) open(path string) (*os.Root, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	is, err := root.Stat(".")
	ours, known := d.lock.Stat()
	if err = errors.Join(err, known); err == nil && !os.SameFile(is, ours) {
		err = registry.Errorf(registry.ErrConflict, "%s is not the socket directory of a shim any more", path)
	}
	if err != nil {
		root.Close()
		return nil, err
	}
	return root, nil
}

// empty removes all but our mark.
func empty(root *os.Root) error {
	entries, err := fs.ReadDir(root.FS(), ".")
	for _, e := range entries {
		if e.Name() != ownerFile {
			err = errors.Join(err, removeAll(root, e.Name()))
		}
	}
	return err
}

// removeAll removes a tree. Without root, a directory's mode hinders its owner, too, until it is changed.
func removeAll(root *os.Root, name string) error {
	err := root.RemoveAll(name)
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	_ = fs.WalkDir(root.FS(), name, func(path string, e fs.DirEntry, _ error) error {
		if e != nil && e.IsDir() {
			_ = root.Chmod(path, 0o700)
		}
		return nil
	})
	return root.RemoveAll(name)
}

func unlessGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// removeOrphans removes the socket directories in runDir whose host is dead. It touches nothing without our mark.
func removeOrphans(runDir string) error {
	entries, err := os.ReadDir(runDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look for old socket directories: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if e.IsDir() && strings.HasPrefix(e.Name(), socketDirPrefix) {
			errs = append(errs, removeOrphan(filepath.Join(runDir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

func removeOrphan(path string) error {
	lock, err := lockDir(path)
	if err != nil {
		return nil // in use, not ours to read, or just gone
	}
	d := &socketDir{path: path, lock: lock}
	switch marked, age := d.inspect(); {
	case marked:
		if err := d.remove(); err != nil {
			return fmt.Errorf("remove an old socket directory: %w", err)
		}
		return nil
	case age > orphanAge:
		_ = os.Remove(path) // only if it is empty
	}
	return unlock(lock)
}

// inspect says whether the locked directory has our mark, and how old it is.
func (d *socketDir) inspect() (marked bool, age time.Duration) {
	info, err := d.lock.Stat()
	if err != nil {
		return false, 0
	}
	mark, err := os.Lstat(filepath.Join(d.path, ownerFile))
	return err == nil && mark.Mode().IsRegular(), time.Since(info.ModTime())
}
