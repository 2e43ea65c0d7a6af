package mount

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
)

// Info is what an inspection found at a path.
type Info struct {
	Block  bool               // a block device
	Device hooks.DeviceNumber // of a device
	Errno  unix.Errno         // why the path could not be inspected
	Hung   bool               // it did not answer in time
}

// dead are the errors by which a file system says that its server is gone: FUSE, network file systems, disks.
var dead = []unix.Errno{
	unix.ENOTCONN, unix.ECONNABORTED, unix.ESTALE, unix.ESHUTDOWN, unix.EHOSTDOWN, unix.EIO, unix.ENODEV, unix.ENXIO,
}

// Dead reports whether what is mounted there has lost its server.
func (i Info) Dead() bool { return slices.Contains(dead, i.Errno) }

// Known reports whether the inspection says anything about the path. It does not if this process lacks a right.
func (i Info) Known() bool { return i.Hung || i.Dead() || i.Errno == 0 || i.Errno == unix.ENOENT }

// Trouble says why a mount cannot be used, for people. It is empty if nothing is known to be wrong.
func (i Info) Trouble() string {
	switch {
	case i.Hung:
		return "it does not answer: it hangs"
	case i.Dead():
		return fmt.Sprintf("its server is gone: %s (%v)", unix.ErrnoName(i.Errno), i.Errno)
	}
	return ""
}

// inspect asks the server of what is at path for its state, which may take forever. It follows no link and opens no
// device.
func inspect(path string) (i Info) {
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, how)
	if err != nil {
		return Info{Errno: errnoOf(err)}
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	var fs unix.Statfs_t
	// The kernel answers the first, even if the server is gone; the server answers the others.
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
