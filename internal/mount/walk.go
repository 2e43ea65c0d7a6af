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

// ErrMounted means that a mount is at a path at which a directory would have to be made, entered or removed. The mount
// was not touched.
var ErrMounted = errors.New("something is mounted there")

// ErrBusy means that a mount is in use and stays. Users names the users, except for uses by the kernel: a loop device,
// a swap file or an export.
var ErrBusy = errors.New("it is in use")

// beneath makes openat2(2) resolve strictly below a directory, without following links or entering mounts.
const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV

// openRoot opens a root directory. Its parents may be links and mounts. It may itself be a mount, but not a link.
func openRoot(root string) (int, error) {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	return fd, wrap(err, "open %s", root)
}

// openBelow opens a path below an open directory. It returns ErrMounted if the path is a mount point or leads through
// one.
func openBelow(dir int, rel string, flags int) (int, error) {
	fd, err := unix.Openat2(dir, rel, &unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC | unix.O_NOFOLLOW),
		Resolve: beneath})
	if errors.Is(err, unix.EXDEV) {
		err = ErrMounted
	}
	return fd, err
}

// openParent opens the parent directory of rel below root, and returns the last element of rel.
func openParent(root, rel string) (dir int, name string, err error) {
	top, err := openRoot(root)
	if err != nil {
		return -1, "", err
	}
	defer unix.Close(top)
	return openParentBelow(top, rel)
}

// openParentBelow is openParent below an open directory.
func openParentBelow(top int, rel string) (dir int, name string, err error) {
	names, err := elements(rel)
	if err == nil && len(names) == 0 {
		err = fmt.Errorf("%q is the root itself", rel)
	}
	if err != nil {
		return -1, "", err
	}
	rel = filepath.Clean(rel)
	dir, err = openBelow(top, filepath.Dir(rel), unix.O_PATH|unix.O_DIRECTORY)
	return dir, filepath.Base(rel), err
}

// isMountPoint reports whether an entry of an open directory is a mount point. It does not touch the mount.
func isMountPoint(dir int, name string) (bool, error) {
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

// IsPoint reports whether a path below root is a mount point. It asks the kernel only about this path, so its time does
// not depend on the number of mounts, and it touches no mount. If the path leads through a mount or lies outside of
// root, it reads the mount table instead.
func IsPoint(root, path string) (bool, error) {
	if rel, err := filepath.Rel(root, path); err == nil {
		dir, name, err := openParent(root, rel)
		if errors.Is(err, unix.ENOENT) {
			return false, nil
		}
		if err == nil {
			defer unix.Close(dir)
			if is, err := isMountPoint(dir, name); err == nil {
				return is, nil
			}
		}
	}
	_, is, err := At(path)
	return is, err
}

// elements splits a relative path. "." has no elements.
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

// MkdirAll makes the directory rel below root with its parents, each with mode 0700. Existing directories stay as they
// are. It follows no symbolic link and makes nothing inside a mount below root (ErrMounted). root must exist.
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

// mkdirAll is MkdirAll below an open directory. It returns the last directory, opened as a path.
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

// Rmdir removes the empty directory rel below root. A missing directory is no error. It follows no symbolic link and
// refuses a mount point (ErrMounted).
func Rmdir(root, rel string) error {
	dir, name, err := openParent(root, rel)
	if err == nil {
		err = rmdirAt(dir, name)
		unix.Close(dir)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return wrap(err, "remove directory %q below %s", rel, root)
}

func rmdirAt(dir int, name string) error {
	return mountedIfBusy(unix.Unlinkat(dir, name, unix.AT_REMOVEDIR))
}

// mountedIfBusy converts the kernel's error for a mount point to ErrMounted.
func mountedIfBusy(err error) error {
	if errors.Is(err, unix.EBUSY) {
		return ErrMounted
	}
	return err
}

// Unmount unmounts the uppermost mount at rel below root. If nothing is mounted there, that is no error. It follows no
// symbolic link and enters no mount (ErrMounted). It is neither lazy nor forced: a mount in use stays (ErrBusy). The
// last unmount of a file system writes it back, which may take forever; Helper.Unmount has a deadline.
func Unmount(root, rel string) error {
	dir, name, err := openParent(root, rel)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil {
		var mounted bool
		if mounted, err = isMountPoint(dir, name); mounted {
			err = unmountAt(dir, name)
		}
		unix.Close(dir)
	}
	return wrap(err, "unmount %q below %s", rel, root)
}

func unmountAt(dir int, name string) error {
	err := unix.Unmount(procFD(dir)+"/"+name, unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%w (%w)", ErrBusy, err)
	}
	return err
}

// RemoveTree removes root and everything in it. A missing root is no error. It follows no symbolic link and crosses no
// mount: if a mount is at root or below, it removes nothing and returns ErrMounted. If a mount is made meanwhile, it
// stops there. It resolves links in root's parents.
func RemoveTree(root string) error {
	parent, err := resolveDir(filepath.Dir(filepath.Clean(root)))
	if err == nil {
		err = removeTree(parent, filepath.Base(root))
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return wrap(err, "remove %s", root)
}

func removeTree(parent, name string) error {
	mounts, err := Below(filepath.Join(parent, name))
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return fmt.Errorf("%s: %w", mounts[0], ErrMounted)
	}
	dir, err := openRoot(parent)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	return removeAt(dir, name)
}

// eachBelow calls do for each entry of the directory name, which lies in an open directory. For a file, a link or a
// removed directory it calls nothing.
func eachBelow(dir int, name string, do func(dir int, name string) error) error {
	fd, err := openBelow(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
	switch {
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return fmt.Errorf("%s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	names, err := f.Readdirnames(-1) // read names only: a stat could ask the server of a dead mount
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	for _, n := range names {
		if err := do(fd, n); err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(name, n), err)
		}
	}
	return nil
}

// removeAt removes an entry of an open directory and everything below it.
func removeAt(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if errors.Is(err, unix.EISDIR) {
		if err = eachBelow(dir, name, removeAt); err == nil {
			err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return mountedIfBusy(err)
}

// DirInfo is a directory and the number of its entries of any kind.
type DirInfo struct {
	Path    string
	Entries int
}

// Dirs lists the directories strictly below root, children before their parents. It enters no mount: neither a mount
// point nor a path below it is listed. A missing root has no directories.
func Dirs(root string) (dirs []DirInfo, err error) {
	fd, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", root, err)
	}
	dirs, _, err = appendDirs(nil, os.NewFile(uintptr(fd), root))
	return dirs, err
}

// appendDirs appends the directories below an open directory, counts its entries, and closes it.
func appendDirs(dirs []DirInfo, at *os.File) (_ []DirInfo, entries int, err error) {
	defer at.Close()
	names, err := at.Readdirnames(-1)
	if errors.Is(err, unix.ENOENT) { // removed since it was opened
		return dirs, 0, nil
	}
	if err != nil {
		return dirs, 0, err
	}
	for _, name := range names {
		d := DirInfo{Path: filepath.Join(at.Name(), name)}
		fd, err := openBelow(int(at.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY)
		switch {
		case errors.Is(err, ErrMounted), errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err,
			unix.ELOOP):
			continue // a mount, a file, a link, or a directory that was removed meanwhile
		case err != nil:
			return dirs, 0, fmt.Errorf("open %s: %w", d.Path, err)
		}
		if dirs, d.Entries, err = appendDirs(dirs, os.NewFile(uintptr(fd), d.Path)); err != nil {
			return dirs, 0, err
		}
		dirs = append(dirs, d)
	}
	return dirs, len(names), nil
}

// procFD returns a path that leads to the file that fd has open.
func procFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }
