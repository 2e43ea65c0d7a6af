package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrPath means that nothing can be mounted at a path. The text has the reason.
var ErrPath = errors.New("not a usable path")

// maxPath is PATH_MAX without its NUL byte.
const maxPath = 4095

// Place is the path of a directory or file where a volume is mounted or will be. Its parents are free of symbolic
// links, so it compares with the mount table. The place itself was not opened.
type Place struct{ path string }

// Resolve returns the place of an absolute path. If its parent is missing, the error is fs.ErrNotExist and the place
// has the path as given.
func Resolve(path string) (Place, error) {
	if err := checkPath(path); err != nil {
		return Place{}, err
	}
	parent, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Place{path}, fmt.Errorf("parent of %s: %w", path, err)
	}
	defer unix.Close(parent)
	dir, err := pathOf(parent)
	if err != nil {
		return Place{path}, err
	}
	return Place{filepath.Join(dir, filepath.Base(path))}, nil
}

func checkPath(path string) error {
	switch {
	case path == "":
		return fmt.Errorf("%w: it is empty", ErrPath)
	case len(path) > maxPath:
		return fmt.Errorf("%w: it has %d bytes, at most %d are possible", ErrPath, len(path), maxPath)
	case strings.ContainsRune(path, 0):
		return fmt.Errorf("%w: it holds a NUL byte", ErrPath)
	case !filepath.IsAbs(path):
		return fmt.Errorf("%w: %q is not absolute", ErrPath, path)
	case filepath.Clean(path) != strings.TrimSuffix(path, "/"):
		return fmt.Errorf("%w: %q holds '.', '..' or doubled slashes", ErrPath, path)
	}
	return nil
}

// String returns the path as the mount table has it.
func (p Place) String() string { return p.path }

// Make makes a directory. It may exist, its parent must.
func (p Place) Make() error {
	err := unix.Mkdir(p.path, 0o750)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make %s: %w", p, err)
	}
	return nil
}

// MakeFile makes an empty file. It may exist, its parent must.
func (p Place) MakeFile() error {
	err := unix.Mknod(p.path, unix.S_IFREG|0o600, 0)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make %s: %w", p, err)
	}
	return nil
}

// RemoveFile removes an empty file. A missing file is no error, anything else is.
func (p Place) RemoveFile() error {
	var st unix.Stat_t
	err := unix.Lstat(p.path, &st)
	if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > 0) {
		err = unix.ENOTEMPTY
	}
	if err == nil {
		err = unix.Unlink(p.path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", p, err)
	}
	return nil
}

// Remove removes an empty directory. A missing directory is no error.
func (p Place) Remove() error {
	err := unix.Rmdir(p.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", p, err)
	}
	return nil
}

// MountDevice mounts the file system of a device.
func (p Place) MountDevice(device, fstype string, f Flags) error {
	return p.with(unix.S_IFDIR, func(target int) error {
		tree, err := newMount(device, fstype, f)
		if err != nil {
			return err
		}
		defer unix.Close(tree)
		return attach(tree, target, f)
	})
}

// Bind mounts an open directory with its final flags.
func (p Place) Bind(source *os.File, f Flags) error {
	return p.with(unix.S_IFDIR, func(target int) error {
		return bind(int(source.Fd()), "", unix.AT_EMPTY_PATH, target, f)
	})
}

// BindFrom mounts what is mounted at another place.
func (p Place) BindFrom(source Place, f Flags) error {
	return p.with(unix.S_IFDIR, func(target int) error {
		return bind(unix.AT_FDCWD, source.path, unix.AT_SYMLINK_NOFOLLOW, target, f)
	})
}

// BindFile mounts a file, such as a device node, at this file.
func (p Place) BindFile(source string, f Flags) error {
	return p.with(unix.S_IFREG, func(target int) error {
		return bind(unix.AT_FDCWD, source, unix.AT_SYMLINK_NOFOLLOW, target, f)
	})
}

func bind(dir int, path string, how uint, target int, f Flags) error {
	tree, err := unix.OpenTree(dir, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|how)
	if err != nil {
		return fmt.Errorf("clone the mount of %q: %w", path, err)
	}
	defer unix.Close(tree)
	return attach(tree, target, f)
}

func attach(tree, target int, f Flags) error {
	if f.attr != 0 {
		attr := unix.MountAttr{Attr_set: f.attr}
		if f.attr&(unix.MOUNT_ATTR_NOATIME|unix.MOUNT_ATTR_STRICTATIME) != 0 {
			attr.Attr_clr = unix.MOUNT_ATTR__ATIME // one field, which must be cleared to be changed
		}
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
			return fmt.Errorf("set the flags of the mount: %w", err)
		}
	}
	return unix.MoveMount(tree, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// with opens the directory or file, but no symbolic link, and calls do. The error for another type is unix.ENOTDIR.
func (p Place) with(kind uint32, do func(fd int) error) error {
	fd, err := unix.Open(p.path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", p, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat %s: %w", p, err)
	}
	if st.Mode&unix.S_IFMT != kind {
		return fmt.Errorf("%s is not the directory or file that this mount needs: %w", p, unix.ENOTDIR)
	}
	if err := do(fd); err != nil {
		return fmt.Errorf("mount at %s: %w", p, err)
	}
	return nil
}

// Unmount unmounts the topmost mount. The error is unix.EBUSY if it is in use.
func (p Place) Unmount() error {
	if err := unix.Unmount(p.path, unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", p, err)
	}
	return nil
}
