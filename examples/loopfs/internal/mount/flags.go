package mount

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Flags holds mount flags, which every file system has, and options of ext4.
type Flags struct {
	bits uintptr  // MS_ bits for mount(2)
	fs   []string // options of the file system
}

// bits maps a mount flag to the bit of mount(2), and to that of mount_setattr(2).
var bits = map[string]struct{ mount, attr uint64 }{
	"ro":          {unix.MS_RDONLY, unix.MOUNT_ATTR_RDONLY},
	"nosuid":      {unix.MS_NOSUID, unix.MOUNT_ATTR_NOSUID},
	"nodev":       {unix.MS_NODEV, unix.MOUNT_ATTR_NODEV},
	"noexec":      {unix.MS_NOEXEC, unix.MOUNT_ATTR_NOEXEC},
	"noatime":     {unix.MS_NOATIME, unix.MOUNT_ATTR_NOATIME},
	"nodiratime":  {unix.MS_NODIRATIME, unix.MOUNT_ATTR_NODIRATIME},
	"strictatime": {unix.MS_STRICTATIME, unix.MOUNT_ATTR_STRICTATIME},
	"relatime":    {}, "defaults": {}, "rw": {}, "": {},
}

// fsFlags are the options of ext4 that are supported, without their value. Options that name another device or path
// (journal_path) or stop the machine (errors=panic) are not.
var fsFlags = strings.Fields(`acl noacl user_xattr nouser_xattr barrier nobarrier discard nodiscard delalloc
	nodelalloc commit data stripe auto_da_alloc noauto_da_alloc init_itable noinit_itable journal_checksum
	errors=remount-ro errors=continue`)

// ParseFlags parses the mount flags of a volume capability. One string may hold several, joined by commas. The error
// has the position of a flag, not its value: flags may hold secrets.
func ParseFlags(list []string) (f Flags, err error) {
	for i, word := range strings.Split(strings.Join(list, ","), ",") {
		key, _, _ := strings.Cut(word, "=")
		bit, known := bits[word]
		switch {
		case known:
			f.bits |= uintptr(bit.mount)
		case strings.ContainsRune(word, 0), !slices.Contains(fsFlags, key) && !slices.Contains(fsFlags, word):
			return Flags{}, status.Errorf(codes.InvalidArgument, "mount flag number %d is not supported", i+1)
		default:
			f.fs = append(f.fs, word)
		}
	}
	return f, nil
}

// ReadOnly returns the flags with the flag ro.
func (f Flags) ReadOnly() Flags {
	f.bits |= unix.MS_RDONLY
	return f
}

// ForFileSystem reports whether some of the flags are options of a file system, which a bind mount cannot have.
func (f Flags) ForFileSystem() bool { return len(f.fs) > 0 }

// attributes returns the flags for mount_setattr(2).
func (f Flags) attributes() (attr unix.MountAttr) {
	for _, bit := range bits {
		if f.bits&uintptr(bit.mount) != 0 {
			attr.Attr_set |= bit.attr
		}
	}
	if attr.Attr_set&(unix.MOUNT_ATTR_NOATIME|unix.MOUNT_ATTR_STRICTATIME) != 0 {
		attr.Attr_clr = unix.MOUNT_ATTR__ATIME // one field, which must be cleared to be changed
	}
	return attr
}
