// Package mount mounts devices, directories and device nodes with the mount API of Linux 5.12. Its errors are system
// errors, or gRPC statuses for what a caller requested.
//
// A mount is prepared where no path leads to it, and then appears in one step with its final flags: a read-only publish
// is never writable. No unmount is lazy, and only empty directories and files are removed.
package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
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

// Tree is a detached mount: it is in no mount table, and ends with Close or with the process unless it was attached.
type Tree struct{ fd int }

// Close ends a detached mount. An attached one stays.
func (t Tree) Close() { unix.Close(t.fd) }

// Device mounts the file system of a device. If it is mounted already, this is another mount of it.
func Device(device, fstype string, f Flags) (Tree, error) {
	fd, err := newMount(device, fstype, f)
	if err != nil {
		return Tree{}, fmt.Errorf("mount %s of %s: %w", fstype, device, err)
	}
	return Tree{fd}, nil
}

func newMount(device, fstype string, f Flags) (int, error) {
	config, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(config)
	options := append([]string{"source=" + device}, f.fs...)
	if f.attr&unix.MOUNT_ATTR_RDONLY != 0 {
		options = append(options, "ro")
	}
	if fstype == "xfs" {
		options = append(options, "nouuid") // else xfs refuses a copy of a file system beside its original
	}
	for _, option := range options {
		if key, value, found := strings.Cut(option, "="); found {
			err = unix.FsconfigSetString(config, key, value)
		} else {
			err = unix.FsconfigSetFlag(config, key)
		}
		if err != nil {
			return -1, err
		}
	}
	if err := unix.FsconfigCreate(config); err != nil {
		return -1, err
	}
	return unix.Fsmount(config, unix.FSMOUNT_CLOEXEC, 0)
}

// Bind clones what is at a path, a mount or a file. The last part of the path is not followed.
func Bind(path string) (Tree, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return Tree{}, fmt.Errorf("clone the mount of %s: %w", path, err)
	}
	return Tree{fd}, nil
}

// Root opens the root directory.
func (t Tree) Root() (*os.File, error) {
	fd, err := unix.Openat(t.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the root of a mount: %w", err)
	}
	return os.NewFile(uintptr(fd), "root"), nil
}

// Attach makes the mount appear at a directory, or at a file if it is one of a file. A symbolic link is refused.
func (t Tree) Attach(path string, f Flags) error {
	target, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(target)
	var here, there unix.Stat_t
	if err := errors.Join(unix.Fstat(t.fd, &here), unix.Fstat(target, &there)); err != nil {
		return fmt.Errorf("stat %s: %w", path, err)
	}
	kind := uint32(unix.S_IFREG)
	if here.Mode&unix.S_IFMT == unix.S_IFDIR {
		kind = unix.S_IFDIR
	}
	if there.Mode&unix.S_IFMT != kind {
		return fmt.Errorf("%s is not the directory or file that this mount needs: %w", path, unix.ENOTDIR)
	}
	if f.attr != 0 {
		attr := unix.MountAttr{Attr_set: f.attr}
		if f.attr&(unix.MOUNT_ATTR_NOATIME|unix.MOUNT_ATTR_STRICTATIME) != 0 {
			attr.Attr_clr = unix.MOUNT_ATTR__ATIME // one field, which must be cleared to be changed
		}
		if err := unix.MountSetattr(t.fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
			return fmt.Errorf("set the flags of the mount: %w", err)
		}
	}
	how := unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	if err := unix.MoveMount(t.fd, "", target, "", how); err != nil {
		return fmt.Errorf("mount at %s: %w", path, err)
	}
	return nil
}
