package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// IsPoint says whether something is mounted at a path below root, which is a directory of ours. It asks the kernel for this one path, so that it
// takes no longer where there are thousands of mounts, and looks at nothing that is mounted: a dead mount freezes nobody. At what it cannot tell
// (a mount on the way, a path outside of root) it reads the mount table.
func IsPoint(root, path string) (bool, error) {
	is, err := isPoint(root, path)
	if err == nil {
		return is, nil
	}
	_, is, err = At(path)
	return is, err
}

// isPoint fails where it cannot tell.
func isPoint(root, path string) (bool, error) {
	rel, err := filepath.Rel(root, path)
	if err != nil || !filepath.IsLocal(rel) || rel == "." {
		return false, fmt.Errorf("%s is not below %s", path, root)
	}
	top, err := openRoot(root)
	if err != nil {
		return false, err
	}
	defer unix.Close(top)
	dir, err := openBelow(top, filepath.Dir(rel), unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(dir)
	return pointIn(dir, filepath.Base(path))
}

// pointIn says whether a name of an open directory is a mount point.
func pointIn(dir int, name string) (bool, error) {
	fd, err := openBelow(dir, name, unix.O_PATH)
	switch {
	case err == nil:
		return false, unix.Close(fd)
	case errors.Is(err, ErrMounted):
		return true, nil
	case errors.Is(err, unix.ENOENT):
		return false, nil
	}
	return false, err
}

// holds says whether a name of an open directory, or anything below it, is a mount point.
func holds(dir int, name string) (bool, error) {
	if is, err := pointIn(dir, name); is || err != nil {
		return is, err
	}
	fd, err := openBelow(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
	switch {
	case errors.Is(err, ErrMounted):
		return true, nil
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOENT): // a file; a link; gone meanwhile
		return false, nil
	case err != nil:
		return false, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return false, err
	}
	for _, n := range names {
		if is, err := holds(fd, n); is || err != nil {
			return is, err
		}
	}
	return false, nil
}
