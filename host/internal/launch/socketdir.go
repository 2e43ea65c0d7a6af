package launch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

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
	ownerFile       = ".holdfast-launch" // exists only in a directory that was locked before
)

// socketDir is the private directory of one shim process. While it is in use it is locked; the lock ends with the host.
type socketDir struct {
	path string
	lock *os.File // the directory itself, flocked
}

// newSocketDir creates <runDir>/shim-<generation>-<random>.
func newSocketDir(runDir string, generation uint64) (*socketDir, error) {
	if err := os.MkdirAll(runDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the run directory: %w", err)
	}
	prefix := fmt.Sprintf("%s%d-", socketDirPrefix, generation)
	if err := checkLength(runDir, prefix); err != nil {
		return nil, err
	}
	path, err := os.MkdirTemp(runDir, prefix)
	if err != nil {
		return nil, fmt.Errorf("make a socket directory: %w", err)
	}
	lock, err := lockDir(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock the socket directory: %w", err), os.Remove(path))
	}
	d := &socketDir{path: path, lock: lock}
	if err := os.WriteFile(filepath.Join(path, ownerFile), ownerText(), 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("mark the socket directory: %w", err), d.remove())
	}
	return d, nil
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

func ownerText() []byte { return fmt.Appendf(nil, "host pid %d\n", os.Getpid()) }

// lockDir locks a directory, or returns EWOULDBLOCK.
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

// remove removes the directory and its content. After an error, a later start tries again.
func (d *socketDir) remove() error { return errors.Join(d.clear(), unlock(d.lock)) }

// unlock unlocks and closes the file. Closing alone is not enough: a process that is being forked has the file open
// until it executes its program.
func unlock(lock *os.File) error {
	return errors.Join(unix.Flock(int(lock.Fd()), unix.LOCK_UN), lock.Close())
}

// clear removes the locked directory, even if a shim has moved it and another has its name. It removes neither mounts
// nor their content, and follows no link. The owner file is removed last.
func (d *socketDir) clear() error {
	var stat unix.Stat_t
	if err := unix.Fstat(int(d.lock.Fd()), &stat); err == nil && stat.Nlink == 0 {
		return nil // it is removed already, and another directory may have its name
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", d.lock.Fd())) // as the mount table names it
	if err != nil {
		return err
	}
	mounts, err := mount.Below(path)
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return registry.Errorf(registry.ErrConflict,
			"%s is mounted in the socket directory of a shim: unmount it, and the next start "+
				"of a shim removes the directory", mounts[0].Point)
	}
	_ = d.lock.Chmod(0o700) // a shim may have changed it
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
		return errors.Join(err, root.WriteFile(ownerFile, ownerText(), 0o600))
	}
	return unlessGone(os.Remove(d.path))
}

// open opens the locked directory, which is at path, as a root that no link can leave.
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

// empty removes all but the owner file.
func empty(root *os.Root) error {
	entries, err := fs.ReadDir(root.FS(), ".")
	for _, e := range entries {
		if e.Name() != ownerFile {
			err = errors.Join(err, removeAll(root, e.Name()))
		}
	}
	return err
}

// removeAll removes a tree. Without root, the modes of closed directories have to be changed first.
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

// removeOrphans removes the socket directories in runDir whose host is dead. It touches no directory without owner
// file: another host may have created it, and not locked it yet.
func removeOrphans(runDir string) error {
	owned, err := fs.Glob(os.DirFS(runDir), socketDirPrefix+"*/"+ownerFile)
	for _, file := range owned {
		path := filepath.Join(runDir, filepath.Dir(file))
		lock, lockErr := lockDir(path)
		if lockErr != nil {
			continue // in use, not ours to read, or just gone
		}
		d := &socketDir{path: path, lock: lock}
		if removeErr := d.remove(); removeErr != nil {
			err = errors.Join(err, fmt.Errorf("remove an old socket directory: %w", removeErr))
		}
	}
	return err
}
