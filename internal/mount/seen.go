package mount

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// Kind is what lies at a path.
type Kind string

// Kinds of files.
const (
	Directory   Kind = "directory"
	File        Kind = "file"
	BlockDevice Kind = "block device"
	CharDevice  Kind = "character device"
	Link        Kind = "symbolic link"
	Other       Kind = "other" // a socket, a pipe
)

// Seen is what a Lookout has seen at a path.
type Seen struct {
	Kind   Kind       `json:"kind,omitempty"`
	Major  uint32     `json:"major,omitempty"`  // of a device: its own number
	Minor  uint32     `json:"minor,omitempty"`  //
	FSType string     `json:"fstype,omitempty"` // of the mount that it lies on, as the mount table has it
	Magic  int64      `json:"magic,omitempty"`  // of the file system (statfs(2))
	Bytes  Room       `json:"bytes,omitzero"`   //
	Inodes Room       `json:"inodes,omitzero"`  //
	Errno  unix.Errno `json:"errno,omitempty"`  // why not all of this is known
	Hung   bool       `json:"hung,omitempty"`   // it did not answer in time
}

// Room is how much of something a file system has.
type Room struct {
	Total     uint64 `json:"total"`
	Free      uint64 `json:"free"`
	Available uint64 `json:"available"` // to who is not root
}

// dead are the errors by which a file system says that what serves it is gone: FUSE, network file systems, disks.
var dead = []unix.Errno{unix.ENOTCONN, unix.ECONNABORTED, unix.ESTALE, unix.ESHUTDOWN, unix.EHOSTDOWN, unix.EIO, unix.ENODEV, unix.ENXIO}

// Dead says whether what lies there is still mounted and will not answer any more.
func (s Seen) Dead() bool { return slices.Contains(dead, s.Errno) }

// Trouble says in words what is wrong; empty if nothing is.
func (s Seen) Trouble() string {
	switch {
	case s.Hung:
		return "it does not answer: it hangs"
	case s.Dead():
		return fmt.Sprintf("what serves it is gone: %s", s.Err())
	case s.Errno != 0:
		return fmt.Sprintf("it cannot be looked at: %s", s.Err())
	}
	return ""
}

// Err is the error with its name; nil if there was none.
func (s Seen) Err() error {
	if s.Errno == 0 {
		return nil
	}
	return fmt.Errorf("%s (%w)", unix.ErrnoName(s.Errno), s.Errno)
}

// see looks at a path, which may take for ever. It follows no link and opens no device.
func see(path string, table map[int]string) (s Seen) {
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, how)
	s.fail(err)
	if err != nil {
		return s
	}
	defer unix.Close(fd)
	s.attributes(fd, table, unix.AT_STATX_DONT_SYNC) // what the kernel has of it, which is something even if its server is gone
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		s.fail(err)
		return s
	}
	size := uint64(max(fs.Frsize, 1))
	s.Magic = fs.Type
	s.Bytes = Room{fs.Blocks * size, fs.Bfree * size, fs.Bavail * size}
	s.Inodes = Room{fs.Files, fs.Ffree, fs.Ffree}
	s.attributes(fd, table, unix.AT_STATX_FORCE_SYNC)
	return s
}

// attributes is fstat with the mount's id.
func (s *Seen) attributes(fd int, table map[int]string, sync int) {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|sync, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st); err != nil {
		s.fail(err)
		return
	}
	s.Kind, s.FSType = kindOf(st.Mode), table[int(st.Mnt_id)]
	if s.Kind == BlockDevice || s.Kind == CharDevice {
		s.Major, s.Minor = st.Rdev_major, st.Rdev_minor
	}
}

// fail keeps the last error: the one of the question that is asked of the server itself.
func (s *Seen) fail(err error) {
	if errno, is := errors.AsType[unix.Errno](err); is {
		s.Errno = errno
	}
}

func kindOf(mode uint16) Kind {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return Directory
	case unix.S_IFREG:
		return File
	case unix.S_IFBLK:
		return BlockDevice
	case unix.S_IFCHR:
		return CharDevice
	case unix.S_IFLNK:
		return Link
	}
	return Other
}
