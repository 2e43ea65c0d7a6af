// Package mount mounts devices, directories and device nodes. Its errors are system errors, or gRPC statuses for what a
// caller requested.
//
// A mount appears in one step with its final flags: a read-only publish is never writable. No unmount is lazy, and only
// empty directories and files are removed.
package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Resolve returns an absolute path whose parents are free of symbolic links, so that it compares with the mount table.
// If its parent is missing, the error is fs.ErrNotExist and the path is as given.
func Resolve(path string) (string, error) {
	if !filepath.IsAbs(path) || len(path) >= unix.PathMax || strings.ContainsRune(path, 0) ||
		filepath.Clean(path) != strings.TrimSuffix(path, "/") {
		return "", status.Errorf(codes.InvalidArgument, "%.128q is not an absolute path without '.', '..' and '//'", path)
	}
	parent, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return path, fmt.Errorf("parent of %s: %w", path, err)
	}
	if err != nil {
		return path, status.Errorf(codes.InvalidArgument, "parent of %.128q: %v", path, err)
	}
	return filepath.Join(parent, filepath.Base(path)), nil
}

// Inside reports whether path is dir or lies below it. Both are absolute and clean.
func Inside(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

// Make makes a directory, or an empty file. It may exist, its parent must.
func Make(path string, file bool) error {
	var err error
	if file {
		err = unix.Mknod(path, unix.S_IFREG|0o600, 0)
	} else {
		err = unix.Mkdir(path, 0o750)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make %s: %w", path, err)
	}
	return nil
}

// Remove removes an empty directory, or an empty file. That it is missing is no error.
func Remove(path string, file bool) error {
	var err error
	if file {
		var st unix.Stat_t
		if err = unix.Lstat(path, &st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > 0) {
			err = unix.ENOTEMPTY
		}
		if err == nil {
			err = unix.Unlink(path)
		}
	} else {
		err = unix.Rmdir(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// Unmount unmounts the topmost mount at a path. The error is unix.EBUSY if it is in use.
func Unmount(path string) error {
	if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	return nil
}

// Device mounts the ext4 of a device at a directory. If it is mounted already, this is another mount of it.
func Device(device, path string, f Flags) error {
	dir, err := open(path, unix.S_IFDIR)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	at := fmt.Sprintf("/proc/self/fd/%d", dir)
	if err := unix.Mount(device, at, "ext4", f.bits, strings.Join(f.fs, ",")); err != nil {
		return fmt.Errorf("mount %s at %s: %w", device, path, err)
	}
	return nil
}

// Bind makes what is at a path, a directory or a device node, appear at another path. The last parts of both paths are
// not followed. Where a directory is mounted there has to be one, and for a device node an empty file.
func Bind(from, path string, f Flags) error {
	tree, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("clone the mount of %s: %w", from, err)
	}
	defer unix.Close(tree)
	var st unix.Stat_t
	if err := unix.Fstat(tree, &st); err != nil {
		return fmt.Errorf("stat %s: %w", from, err)
	}
	kind := uint32(unix.S_IFREG)
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		kind = unix.S_IFDIR
	}
	target, err := open(path, kind)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	if attr := f.attributes(); attr.Attr_set != 0 {
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
			return fmt.Errorf("set the flags of the mount: %w", err)
		}
	}
	how := unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	if err := unix.MoveMount(tree, "", target, "", how); err != nil {
		return fmt.Errorf("mount at %s: %w", path, err)
	}
	return nil
}

// open opens a directory or file to mount something there. A symbolic link is refused.
func open(path string, kind uint32) (int, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", path, err)
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != kind {
		err = unix.ENOTDIR
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("%s is not the directory or file that this mount needs: %w", path, err)
	}
	return fd, nil
}
