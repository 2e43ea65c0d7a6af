package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrMounted: something is mounted where the call would have to make, enter or remove a directory. It was not touched.
var ErrMounted = errors.New("something is mounted there")

// beneath opens strictly below a directory: no link is followed and no mount is entered, not even looked at.
const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV

// openRoot opens a root directory of ours. Its parents may hold links and mounts, it may be a mount itself, but no link.
func openRoot(root string) (int, error) {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	return fd, wrap(err, "open %s", root)
}

// openBelow opens one name, or a path, below dir.
func openBelow(dir int, rel string, flags int) (int, error) {
	fd, err := unix.Openat2(dir, rel, &unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC | unix.O_NOFOLLOW), Resolve: beneath})
	if errors.Is(err, unix.EXDEV) {
		err = ErrMounted
	}
	return fd, err
}

// elements splits a relative path; "." has none.
func elements(rel string) ([]string, error) {
	rel = filepath.Clean(rel)
	if !filepath.IsLocal(rel) {
		return nil, fmt.Errorf("%q leaves its directory", rel)
	}
	if rel == "." {
		return nil, nil
	}
	return strings.Split(rel, "/"), nil
}

// MkdirAll makes the directory rel below root, with its parents, each 0700. What exists stays as it is. It follows no symbolic
// link and makes nothing inside a mount below root (ErrMounted); root has to exist.
func MkdirAll(root, rel string) error {
	dir, err := openRoot(root)
	if err != nil {
		return err
	}
	fd, err := mkdirAll(dir, rel, 0o700)
	unix.Close(dir)
	if err != nil {
		return fmt.Errorf("make directory %s below %s: %w", rel, root, err)
	}
	return unix.Close(fd)
}

// mkdirAll is MkdirAll below an open directory. It gives the last directory, opened as a path.
func mkdirAll(root int, rel string, mode uint32) (int, error) {
	names, err := elements(rel)
	if err != nil {
		return -1, err
	}
	fd, err := unix.FcntlInt(uintptr(root), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	for _, name := range names {
		err := unix.Mkdirat(fd, name, mode)
		if err != nil && !errors.Is(err, unix.EEXIST) {
			unix.Close(fd)
			return -1, fmt.Errorf("%s: %w", name, err)
		}
		next, err := openBelow(fd, name, unix.O_PATH|unix.O_DIRECTORY)
		unix.Close(fd)
		if err != nil {
			return -1, fmt.Errorf("%s: %w", name, err)
		}
		fd = next
	}
	return fd, nil
}

// Rmdir removes the empty directory rel below root; that there is none is no error. It follows no symbolic link, refuses a mount
// point (ErrMounted), and never removes what is in the directory.
func Rmdir(root, rel string) error {
	names, err := elements(rel)
	if err == nil && len(names) == 0 {
		err = errors.New("is the root itself")
	}
	if err != nil {
		return fmt.Errorf("remove directory %q below %s: %w", rel, root, err)
	}
	if err := rmdir(root, filepath.Dir(rel), filepath.Base(rel)); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove directory %s below %s: %w", rel, root, err)
	}
	return nil
}

func rmdir(root, parent, name string) error {
	fd, err := openRoot(root)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	dir, err := openBelow(fd, parent, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	return unmounted(unix.Unlinkat(dir, name, unix.AT_REMOVEDIR))
}

// unmounted turns the kernel's refusal to remove a mount point into ErrMounted.
func unmounted(err error) error {
	if errors.Is(err, unix.EBUSY) {
		return ErrMounted
	}
	return err
}

// RemoveTree removes root with all that is in it; that there is none is no error. It follows no symbolic link and crosses no
// mount: if anything is mounted at root or below, it removes nothing and returns ErrMounted; what is mounted while it works
// stops it there. Links in root's parents are resolved.
func RemoveTree(root string) error {
	parent, err := filepath.EvalSymlinks(filepath.Dir(filepath.Clean(root)))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", root, err)
	}
	dir, err := openRoot(parent)
	if err == nil {
		err = removeUnmounted(dir, filepath.Base(root))
		unix.Close(dir)
	}
	switch {
	case errors.Is(err, ErrMounted):
		if ms, _ := Below(filepath.Join(parent, filepath.Base(root))); len(ms) > 0 { // to say what it is
			err = fmt.Errorf("%s: %w", ms[0], ErrMounted)
		}
		return fmt.Errorf("remove %s: %w", root, err)
	case err != nil && !errors.Is(err, unix.ENOENT):
		return fmt.Errorf("remove %s: %w", root, err)
	}
	return nil
}

// removeUnmounted removes one name of a directory, and what is below it, unless something is mounted there. The mount table is not read for
// that: it may be long.
func removeUnmounted(dir int, name string) error {
	mounted, err := holds(dir, name)
	if err != nil {
		return err
	}
	if mounted {
		return ErrMounted
	}
	return removeAt(dir, name)
}

// removeAt removes one name of a directory, and what is below it. Whether it is a directory the kernel says, not a stat.
func removeAt(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if !errors.Is(err, unix.EISDIR) {
		return unmounted(err)
	}
	fd, err := openBelow(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := removeAt(fd, n); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("%s: %w", filepath.Join(name, n), err)
		}
	}
	return unmounted(unix.Unlinkat(dir, name, unix.AT_REMOVEDIR))
}

// procFD is a path that leads to the very file that fd is open on.
func procFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }
