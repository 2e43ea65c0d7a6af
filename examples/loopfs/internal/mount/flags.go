package mount

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrFlag means that a mount flag is not supported. The text has its position, never its value: flags may hold secrets.
var ErrFlag = errors.New("mount flag refused")

// Flags holds mount attributes, which every file system has, and options of the file system.
type Flags struct {
	attr uint64   // MOUNT_ATTR_ bits for mount_setattr(2)
	fs   []string // options of the file system
}

// attributes maps a mount flag to the attributes that it sets.
var attributes = map[string]uint64{
	"ro": unix.MOUNT_ATTR_RDONLY, "nosuid": unix.MOUNT_ATTR_NOSUID, "nodev": unix.MOUNT_ATTR_NODEV,
	"noexec": unix.MOUNT_ATTR_NOEXEC, "noatime": unix.MOUNT_ATTR_NOATIME, "nodiratime": unix.MOUNT_ATTR_NODIRATIME,
	"strictatime": unix.MOUNT_ATTR_STRICTATIME, "relatime": 0, "defaults": 0,
}

// opposites maps a mount flag to the attributes that it clears.
var opposites = map[string]uint64{
	"rw": unix.MOUNT_ATTR_RDONLY, "suid": unix.MOUNT_ATTR_NOSUID, "dev": unix.MOUNT_ATTR_NODEV,
	"exec": unix.MOUNT_ATTR_NOEXEC,
}

// fsFlags are the options of ext4 and xfs that are supported, without their value. Options that name another device or
// path (journal_path, journal_dev, logdev, rtdev) or stop the machine (errors=panic) are not.
var fsFlags = []string{
	"acl", "noacl", "user_xattr", "nouser_xattr", "barrier", "nobarrier", "discard", "nodiscard", "delalloc",
	"nodelalloc",
	"commit", "data", "stripe", "auto_da_alloc", "noauto_da_alloc", "init_itable", "noinit_itable", "journal_checksum",
	"errors=remount-ro", "errors=continue",
	"allocsize", "attr2", "filestreams", "ikeep", "noikeep", "inode32", "inode64", "largeio", "nolargeio", "logbsize",
	"logbufs", "noalign",
	"nouuid", "swalloc", "wsync",
}

// ParseFlags parses the mount flags of a volume capability. One string may hold several, joined by commas.
func ParseFlags(list []string) (Flags, error) {
	var f Flags
	for i, word := range strings.Split(strings.Join(list, ","), ",") {
		if word == "" {
			continue
		}
		if err := f.add(word); err != nil {
			return Flags{}, fmt.Errorf("%w: loopfs does not support number %d", err, i+1)
		}
	}
	return f, nil
}

func (f *Flags) add(word string) error {
	key, _, _ := strings.Cut(word, "=")
	set, known := attributes[word]
	if clear, opposite := opposites[word]; known || opposite {
		f.attr = f.attr&^clear | set
		return nil
	}
	if strings.ContainsRune(word, 0) || !slices.Contains(fsFlags, key) && !slices.Contains(fsFlags, word) {
		return ErrFlag
	}
	f.fs = append(f.fs, word)
	return nil
}

// ReadOnly returns the flags with the attribute read-only.
func (f Flags) ReadOnly() Flags {
	f.attr |= unix.MOUNT_ATTR_RDONLY
	return f
}

// ForFileSystem reports whether some of the flags are options of a file system, which a bind mount cannot have.
func (f Flags) ForFileSystem() bool { return len(f.fs) > 0 }
