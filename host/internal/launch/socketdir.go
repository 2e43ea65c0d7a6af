package launch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
	"holdfast/registry"
)

const (
	// maxSocketPath is the longest path of a unix socket that the kernel takes.
	maxSocketPath = 107
	// longestSocketName is what go-plugin may add to the directory: a slash, "plugin" and a number of up to 10 digits.
	longestSocketName = len("/plugin") + 10
)

// socketDir is the private directory of one shim process. While it is in use it is locked; the lock ends with the host.
type socketDir struct {
	path string
	lock *os.File // the directory itself, flocked
}

// newSocketDir creates <runDir>/shim-<generation>-<random>. The directory gets that name once it is locked, so a
// directory of that name without a lock was left by a dead host.
func newSocketDir(runDir string, generation uint64) (*socketDir, error) {
	if err := os.MkdirAll(runDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the run directory: %w", err)
	}
	prefix := fmt.Sprintf("shim-%d-", generation)
	if err := checkLength(runDir, prefix); err != nil {
		return nil, err
	}
	created, err := os.MkdirTemp(runDir, "new-")
	if err != nil {
		return nil, fmt.Errorf("make a socket directory: %w", err)
	}
	lock, err := lockDir(created)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock the socket directory: %w", err), os.Remove(created))
	}
	d := &socketDir{path: filepath.Join(runDir, prefix+strings.TrimPrefix(filepath.Base(created), "new-")), lock: lock}
	if err := os.Rename(created, d.path); err != nil {
		return nil, errors.Join(fmt.Errorf("name the socket directory: %w", err), os.Remove(created), unlock(lock))
	}
	return d, nil
}

// checkLength returns an error if the kernel could refuse the path of a socket in a new socket directory.
func checkLength(runDir, prefix string) error {
	const random = 10 // digits that os.MkdirTemp adds, at most
	length := len(filepath.Join(runDir, prefix)) + random + longestSocketName
	if length <= maxSocketPath {
		return nil
	}
	return registry.Invalid("a socket in %s would have a path of up to %d bytes, the kernel takes %d: "+
		"choose a run directory that is %d bytes shorter", runDir, length, maxSocketPath, length-maxSocketPath)
}

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

// remove removes the directory and unlocks it. It removes no mount and nothing in a mount, and follows no link. A later
// start tries again after an error.
func (d *socketDir) remove() error {
	return errors.Join(d.removeContent(), unlock(d.lock))
}

func (d *socketDir) removeContent() error {
	path, err := filepath.EvalSymlinks(d.path) // as the mount table names it
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
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
	return os.RemoveAll(d.path)
}

// unlock unlocks and closes the file. Closing alone is not enough: a process that is being forked has the file open
// until it executes its program.
func unlock(lock *os.File) error {
	return errors.Join(unix.Flock(int(lock.Fd()), unix.LOCK_UN), lock.Close())
}

// removeOrphans removes the socket directories in runDir whose host is dead.
func removeOrphans(runDir string) error {
	dirs, err := fs.Glob(os.DirFS(runDir), "shim-[0-9]*") // runDir itself is no pattern
	for _, dir := range dirs {
		path := filepath.Join(runDir, dir)
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
