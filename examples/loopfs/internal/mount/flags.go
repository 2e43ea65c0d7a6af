package mount

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrFlag: a mount flag is not one that is passed on. The text names its position, never its value: flags may hold
// secrets.
var ErrFlag = errors.New("mount flag refused")

// Flags is how something is mounted: what every file system knows, and options for the file system itself.
type Flags struct {
	legacy uintptr  // MS_ bits for mount(2)
	set    uint64   // MOUNT_ATTR_ bits for mount_setattr(2)
	fs     []string // options of the file system
}

type general struct {
	legacy uintptr
	set    uint64
	off    bool // the word takes the bits away again
}

var generalFlags = map[string]general{
	"defaults":    {},
	"ro":          {legacy: unix.MS_RDONLY, set: unix.MOUNT_ATTR_RDONLY},
	"rw":          {legacy: unix.MS_RDONLY, set: unix.MOUNT_ATTR_RDONLY, off: true},
	"nosuid":      {legacy: unix.MS_NOSUID, set: unix.MOUNT_ATTR_NOSUID},
	"suid":        {legacy: unix.MS_NOSUID, set: unix.MOUNT_ATTR_NOSUID, off: true},
	"nodev":       {legacy: unix.MS_NODEV, set: unix.MOUNT_ATTR_NODEV},
	"dev":         {legacy: unix.MS_NODEV, set: unix.MOUNT_ATTR_NODEV, off: true},
	"noexec":      {legacy: unix.MS_NOEXEC, set: unix.MOUNT_ATTR_NOEXEC},
	"exec":        {legacy: unix.MS_NOEXEC, set: unix.MOUNT_ATTR_NOEXEC, off: true},
	"noatime":     {legacy: unix.MS_NOATIME, set: unix.MOUNT_ATTR_NOATIME},
	"nodiratime":  {legacy: unix.MS_NODIRATIME, set: unix.MOUNT_ATTR_NODIRATIME},
	"relatime":    {legacy: unix.MS_RELATIME},
	"strictatime": {legacy: unix.MS_STRICTATIME, set: unix.MOUNT_ATTR_STRICTATIME},
}

// fsFlags are the words of ext4 and xfs that are passed on, without their value. What names another device or path
// (journal_path, journal_dev, logdev, rtdev) or stops the machine (errors=panic) is not among them.
var fsFlags = []string{
	"acl", "noacl", "user_xattr", "nouser_xattr", "barrier", "nobarrier", "discard", "nodiscard", "delalloc",
	"nodelalloc",
	"commit", "data", "stripe", "auto_da_alloc", "noauto_da_alloc", "init_itable", "noinit_itable", "journal_checksum",
	"errors=remount-ro", "errors=continue",
	"allocsize", "attr2", "filestreams", "ikeep", "noikeep", "inode32", "inode64", "largeio", "nolargeio", "logbsize",
	"logbufs", "noalign",
	"nouuid", "swalloc", "wsync",
}

// ParseFlags reads mount flags as a volume capability carries them; one string may hold several, joined by commas.
func ParseFlags(list []string) (Flags, error) {
	var f Flags
	for i, word := range strings.Split(strings.Join(list, ","), ",") {
		if word == "" {
			continue
		}
		if err := f.add(word); err != nil {
			return Flags{}, fmt.Errorf("%w: number %d is not a flag that loopfs passes on", err, i+1)
		}
	}
	return f, nil
}

func (f *Flags) add(word string) error {
	if g, ok := generalFlags[word]; ok {
		if g.off {
			f.legacy, f.set = f.legacy&^g.legacy, f.set&^g.set
		} else {
			f.legacy, f.set = f.legacy|g.legacy, f.set|g.set
		}
		return nil
	}
	key, _, _ := strings.Cut(word, "=")
	if strings.ContainsRune(word, 0) || !slices.Contains(fsFlags, key) && !slices.Contains(fsFlags, word) {
		return ErrFlag
	}
	f.fs = append(f.fs, word)
	return nil
}

// ReadOnly is the same, but nothing can be written.
func (f Flags) ReadOnly() Flags {
	f.legacy |= unix.MS_RDONLY
	f.set |= unix.MOUNT_ATTR_RDONLY
	return f
}

// With is the same and one more option of the file system.
func (f Flags) With(option string) Flags {
	f.fs = append(slices.Clone(f.fs), option)
	return f
}

// ForFileSystem says whether some of the flags are options of a file system of its own, which a bind mount cannot take.
func (f Flags) ForFileSystem() bool { return len(f.fs) > 0 }

func (f Flags) mountFlags() uintptr { return f.legacy }

// attributes are the bits to set and to clear. The access-time modes are one field, which must be cleared to be
// changed.
func (f Flags) attributes() (set, clear uint64) {
	if f.set&(unix.MOUNT_ATTR_NOATIME|unix.MOUNT_ATTR_STRICTATIME) != 0 {
		clear = unix.MOUNT_ATTR__ATIME
	}
	return f.set, clear
}
