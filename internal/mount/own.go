package mount

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ErrNotEmpty means that a volume has files.
var ErrNotEmpty = errors.New("the volume has files")

// Ownership says what SetOwnership changes in a mounted volume.
type Ownership struct {
	Root      string // an absolute directory of ours
	Volume    string // mount point of the volume, below Root
	UID, GID  int    // -1: unchanged
	Mode      int    // permission bits of the root directory; -1: unchanged
	Recursive bool   // also change owner and group of all files; else a volume with files is ErrNotEmpty
}

// SetOwnership changes the root directory of a volume that is empty apart from lost+found. With Recursive it changes
// all of a volume. It changes symbolic links and does not follow them, and enters no other mounts inside the volume. It
// returns EROFS if the volume is mounted read-only. It hangs if the volume's server does not answer;
// Helper.SetOwnership has a deadline.
func SetOwnership(o Ownership) error {
	err := o.set()
	return wrap(err, "set the owner of %s, below %s", o.Volume, o.Root)
}

func (o Ownership) set() error {
	root, err := openRoot(o.Root)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	volume, err := openVolume(root, o.Volume)
	if err != nil {
		return err
	}
	defer unix.Close(volume)
	dir, err := openBelow(volume, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	top := os.NewFile(uintptr(dir), o.Volume)
	defer top.Close()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(dir, &fs); err != nil {
		return err
	}
	if fs.Flags&unix.ST_RDONLY != 0 {
		return unix.EROFS
	}
	if o.Recursive {
		err = o.setBelow(top)
	} else {
		err = checkEmpty(top)
	}
	if err != nil {
		return err
	}
	err = unix.Fchown(dir, o.UID, o.GID)
	if errors.Is(err, unix.EINVAL) {
		return errors.New("there is no such user or group in the user namespace of this process")
	}
	if err != nil {
		return fmt.Errorf("chown: %w", err)
	}
	if o.Mode >= 0 {
		err = wrap(unix.Fchmod(dir, uint32(o.Mode)), "chmod")
	}
	return err
}

// checkEmpty returns ErrNotEmpty if the directory has entries that mkfs does not make.
func checkEmpty(dir *os.File) error {
	names, err := dir.Readdirnames(2)
	if errors.Is(err, io.EOF) || err == nil && len(names) == 1 && names[0] == "lost+found" {
		return nil
	}
	if err == nil {
		err = ErrNotEmpty
	}
	return err
}

// setBelow changes owner and group of everything below a directory, where they differ.
func (o Ownership) setBelow(dir *os.File) error {
	fd := int(dir.Fd())
	for {
		names, err := dir.Readdirnames(1024)
		for _, name := range names {
			if err := o.setAt(fd, name); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("%q: %w", name, err)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// setAt changes owner and group of an entry of a directory, and of everything below it. It opens the entry only once,
// so that a rename meanwhile cannot redirect it.
func (o Ownership) setAt(dir int, name string) error {
	fd, err := openBelow(dir, name, unix.O_PATH)
	if errors.Is(err, ErrMounted) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		inner, err := openBelow(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		entries := os.NewFile(uintptr(inner), name)
		err = o.setBelow(entries)
		entries.Close()
		if err != nil {
			return err
		}
	}
	if (o.UID < 0 || int(st.Uid) == o.UID) && (o.GID < 0 || int(st.Gid) == o.GID) {
		return nil // already changed by an earlier try; another change would clear its set-user-ID bit
	}
	return unix.Fchownat(fd, "", o.UID, o.GID, unix.AT_EMPTY_PATH)
}
