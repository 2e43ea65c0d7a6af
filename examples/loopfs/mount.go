package main

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

// A mount appears in one step with its final flags: a read-only publish is never writable. No unmount is lazy, and only
// empty targets are removed. Errors are system errors, or gRPC statuses for what the caller requested.

// mountFlags holds MOUNT_ATTR_ bits of mount_setattr(2).
type mountFlags uint64

// ms returns the flags as mount(2) has them: all but noatime have the same values.
func (f mountFlags) ms() uintptr {
	if f&noAccessTimes != 0 {
		f = f&^noAccessTimes | unix.MS_NOATIME
	}
	return uintptr(f)
}

// attr returns the flags as mount_setattr(2) has them.
func (f mountFlags) attr() *unix.MountAttr {
	attr := &unix.MountAttr{Attr_set: uint64(f)}
	if f&noAccessTimes != 0 {
		attr.Attr_clr = unix.MOUNT_ATTR__ATIME
	}
	return attr
}

const (
	readOnlyFlag  mountFlags = unix.MOUNT_ATTR_RDONLY
	noAccessTimes mountFlags = unix.MOUNT_ATTR_NOATIME
)

// knownFlags are the supported mount flags, which every file system has.
var knownFlags = map[string]mountFlags{
	"rw": 0, "ro": readOnlyFlag, "nosuid": unix.MOUNT_ATTR_NOSUID, "nodev": unix.MOUNT_ATTR_NODEV,
	"noexec": unix.MOUNT_ATTR_NOEXEC, "noatime": noAccessTimes,
}

// parseFlags parses the mount flags of a volume capability. One string may hold several, joined by commas. The error
// has the position of a flag, not its value: flags may hold secrets.
func parseFlags(list []string) (sum mountFlags, err error) {
	if len(list) == 0 {
		return 0, nil
	}
	for i, word := range strings.Split(strings.Join(list, ","), ",") {
		flag, known := knownFlags[word]
		if !known {
			return 0, status.Errorf(codes.InvalidArgument, "mount flag number %d is not supported, only ro, rw, "+
				"nosuid, nodev, noexec and noatime", i+1)
		}
		sum |= flag
	}
	return sum, nil
}

// resolvePath returns an absolute path whose parents are free of symbolic links, so that it compares with the mount
// table. If its parent is missing, the error is fs.ErrNotExist and the path is as given.
func resolvePath(path string) (string, error) {
	if !filepath.IsAbs(path) || len(path) >= unix.PathMax || strings.ContainsRune(path, 0) ||
		filepath.Clean(path) != strings.TrimSuffix(path, "/") {
		return "", status.Errorf(codes.InvalidArgument, "%.128q is not an absolute path without '.', '..' and '//'",
			path)
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

// inside reports whether path is dir or lies below it. Both are absolute and clean.
func inside(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

// makeTarget makes a directory, or an empty file for a device node. It may exist, its parent must.
func makeTarget(path string, file bool) error {
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

// removeTarget removes an empty directory, or an empty file. One with contents is not of loopfs, and stays.
func removeTarget(path string, file bool) error {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	switch {
	case err != nil:
	case !file:
		err = unix.Rmdir(path)
	case st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size == 0:
		err = unix.Unlink(path)
	}
	if err == nil || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENOTEMPTY) {
		return nil
	}
	return fmt.Errorf("remove %s: %w", path, err)
}

// mountExt4 mounts the ext4 of a device at a directory. If it is mounted already, this is another mount of it.
func mountExt4(device, path string, flags mountFlags) error {
	dir, err := openTarget(path, false)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	if err := unix.Mount(device, fmt.Sprintf("/proc/self/fd/%d", dir), "ext4", flags.ms(), ""); err != nil {
		return fmt.Errorf("mount %s at %s: %w", device, path, err)
	}
	return nil
}

// bindMount makes what is at a path, a directory or a device node, appear at another path: a directory, or an empty
// file for a device node. The last parts of both paths are not followed.
func bindMount(from, path string, file bool, flags mountFlags) error {
	tree, err := unix.OpenTree(unix.AT_FDCWD, from,
		unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("clone the mount of %s: %w", from, err)
	}
	defer unix.Close(tree)
	target, err := openTarget(path, file)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, flags.attr()); err != nil {
		return fmt.Errorf("set the flags of the mount: %w", err)
	}
	how := unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	if err := unix.MoveMount(tree, "", target, "", how); err != nil {
		return fmt.Errorf("mount at %s: %w", path, err)
	}
	return nil
}

// openTarget opens a directory or file to mount something there. A symbolic link is refused.
func openTarget(path string, file bool) (int, error) {
	kind := uint32(unix.S_IFDIR)
	if file {
		kind = unix.S_IFREG
	}
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
