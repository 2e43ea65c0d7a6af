package mount

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
)

// Info is the result of the inspection of a path.
type Info struct {
	Block  bool               // a block device
	Device hooks.DeviceNumber // of a device
	Errno  unix.Errno         // why the path could not be inspected
	Hung   bool               // the path did not answer in time
}

// dead are the errors of file systems that have lost their server: FUSE, network file systems, disks.
var dead = []unix.Errno{
	unix.ENOTCONN, unix.ECONNABORTED, unix.ESTALE, unix.ESHUTDOWN, unix.EHOSTDOWN, unix.EIO, unix.ENODEV, unix.ENXIO,
}

// Dead reports whether the file system of the path has lost its server.
func (i Info) Dead() bool { return slices.Contains(dead, i.Errno) }

// Known reports whether the inspection has a result. It has none if this process lacked a permission.
func (i Info) Known() bool { return i.Hung || i.Dead() || i.Errno == 0 || i.Errno == unix.ENOENT }

// Trouble returns why a mount cannot be used, for display. It is empty if no reason is known.
func (i Info) Trouble() string {
	switch {
	case i.Hung:
		return "it does not answer: it hangs"
	case i.Dead():
		return fmt.Sprintf("its server is gone: %s (%v)", unix.ErrnoName(i.Errno), i.Errno)
	}
	return ""
}

// inspect asks the server of the path's file system for its state, which may take forever. It follows no link and opens
// no device.
func inspect(path string) (i Info) {
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, how)
	if err != nil {
		return Info{Errno: errnoOf(err)}
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	var fs unix.Statfs_t
	// The kernel answers the first call, even if the server is gone. The server answers the others.
	i.Errno = errnoOf(unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS, &st))
	if err := unix.Fstatfs(fd, &fs); err != nil {
		i.Errno = errnoOf(err)
	} else if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS,
		&st); err != nil {
		i.Errno = errnoOf(err)
	}
	if i.Block = st.Mode&unix.S_IFMT == unix.S_IFBLK; i.Block {
		i.Device = hooks.DeviceNumber{Major: int64(st.Rdev_major), Minor: int64(st.Rdev_minor)}
	}
	return i
}

func errnoOf(err error) unix.Errno {
	errno, _ := errors.AsType[unix.Errno](err)
	return errno
}
