package mount

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Flags holds mount attributes, which every file system has, and options of the file system.
type Flags struct {
	attr uint64   // MOUNT_ATTR_ bits for mount_setattr(2)
	fs   []string // options of the file system
}

// attributes maps a mount flag to the attribute that it sets or clears.
var attributes = map[string]struct{ set, clear uint64 }{
	"ro": {set: unix.MOUNT_ATTR_RDONLY}, "rw": {clear: unix.MOUNT_ATTR_RDONLY},
	"nosuid": {set: unix.MOUNT_ATTR_NOSUID}, "suid": {clear: unix.MOUNT_ATTR_NOSUID},
	"nodev": {set: unix.MOUNT_ATTR_NODEV}, "dev": {clear: unix.MOUNT_ATTR_NODEV},
	"noexec": {set: unix.MOUNT_ATTR_NOEXEC}, "exec": {clear: unix.MOUNT_ATTR_NOEXEC},
	"noatime": {set: unix.MOUNT_ATTR_NOATIME}, "nodiratime": {set: unix.MOUNT_ATTR_NODIRATIME},
	"strictatime": {set: unix.MOUNT_ATTR_STRICTATIME}, "relatime": {}, "defaults": {},
}

// fsFlags are the options of ext4 and xfs that are supported, without their value. Options that name another device or
// path (journal_path, logdev) or stop the machine (errors=panic) are not.
var fsFlags = strings.Fields(`acl noacl user_xattr nouser_xattr barrier nobarrier discard nodiscard delalloc
	nodelalloc commit data stripe auto_da_alloc noauto_da_alloc init_itable noinit_itable journal_checksum
	errors=remount-ro errors=continue allocsize attr2 filestreams ikeep noikeep inode32 inode64 largeio nolargeio
	logbsize logbufs noalign nouuid swalloc wsync`)

// ParseFlags parses the mount flags of a volume capability. One string may hold several, joined by commas. The error
// has the position of a flag, not its value: flags may hold secrets.
func ParseFlags(list []string) (f Flags, err error) {
	for i, word := range strings.Split(strings.Join(list, ","), ",") {
		key, _, _ := strings.Cut(word, "=")
		attribute, known := attributes[word]
		switch {
		case known:
			f.attr = f.attr&^attribute.clear | attribute.set
		case strings.ContainsRune(word, 0), !slices.Contains(fsFlags, key) && !slices.Contains(fsFlags, word) && word != "":
			return Flags{}, status.Errorf(codes.InvalidArgument, "mount flag number %d is not supported", i+1)
		case word != "":
			f.fs = append(f.fs, word)
		}
	}
	return f, nil
}

// ReadOnly returns the flags with the attribute read-only.
func (f Flags) ReadOnly() Flags {
	f.attr |= unix.MOUNT_ATTR_RDONLY
	return f
}

// IsReadOnly reports whether the attribute read-only is set.
func (f Flags) IsReadOnly() bool { return f.attr&unix.MOUNT_ATTR_RDONLY != 0 }

// ForFileSystem reports whether some of the flags are options of a file system, which a bind mount cannot have.
func (f Flags) ForFileSystem() bool { return len(f.fs) > 0 }
