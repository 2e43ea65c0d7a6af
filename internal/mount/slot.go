package mount

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// slot is the mount point of a part, in a directory of its own. Who has it open holds a lock of that directory: nobody else mounts or
// unmounts there meanwhile. The lock is the process's, so it also keeps out the next one while an earlier one hangs, whoever has started
// that.
type slot struct {
	root int    // the directory of ours
	up   string // the path of the directory's parent, below root
	own  string // the directory's name
	dir  int    // the directory
	name string // of the mount point, in it
}

// A slot that is held is waited for that long: who was told to end needs a moment.
const (
	slotPatience = time.Second
	slotPoll     = 5 * time.Millisecond
)

// openSlot opens the slot of a mount point below root, and makes its directories if asked to.
func openSlot(root, at string, create bool) (_ *slot, err error) {
	names, err := elements(at)
	if err == nil && len(names) < 2 {
		err = fmt.Errorf("%q has no directory of its own", at)
	}
	if err != nil {
		return nil, err
	}
	at = filepath.Clean(at)
	dir := filepath.Dir(at)
	s := &slot{root: -1, dir: -1, up: filepath.Dir(dir), own: filepath.Base(dir), name: filepath.Base(at)}
	s.root, err = openRoot(root)
	for end := time.Now().Add(slotPatience); err == nil; time.Sleep(slotPoll) {
		if err = s.hold(dir, create); !errors.Is(err, ErrHeld) || time.Now().After(end) {
			break
		}
		err = nil
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// hold opens the slot's directory and locks it. One that was removed before it was locked is as good as held: the next try finds another
// one, or none.
func (s *slot) hold(dir string, create bool) error {
	fd, err := -1, error(nil)
	if create {
		err = makeAll(s.root, dir)
	}
	if err == nil {
		fd, err = openBelow(s.root, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	}
	if create && errors.Is(err, unix.ENOENT) {
		return ErrHeld
	}
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err == nil {
		err = unix.Fstat(fd, &st)
	}
	if errors.Is(err, unix.EWOULDBLOCK) || err == nil && st.Nlink == 0 {
		err = ErrHeld
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	s.dir = fd
	return nil
}

func makeAll(root int, rel string) error {
	fd, err := mkdirAll(root, rel, 0o700)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func (s *slot) close() {
	for _, fd := range []int{s.dir, s.root} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// mounted says whether something is mounted at the mount point. It does not touch that.
func (s *slot) mounted() (bool, error) {
	fd, err := openBelow(s.dir, s.name, unix.O_PATH)
	switch {
	case err == nil:
		return false, unix.Close(fd)
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case errors.Is(err, ErrMounted):
		return true, nil
	}
	return false, err
}

// fit makes the mount point one for a directory or a file. Nothing is mounted at it.
func (s *slot) fit(kind Kind) error {
	fd, err := openBelow(s.dir, s.name, unix.O_PATH)
	if err == nil {
		is, err := kindOpen(fd)
		unix.Close(fd)
		if err != nil || is == kind {
			return err
		}
		if err := s.clear(); err != nil {
			return err
		}
	} else if !errors.Is(err, unix.ENOENT) {
		return err
	}
	if kind == Directory {
		return wrap(unix.Mkdirat(s.dir, s.name, 0o700), "make the mount point")
	}
	fd, err = unix.Openat(s.dir, s.name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("make the mount point: %w", err)
	}
	return unix.Close(fd)
}

// clear removes the mount point, if it is an empty directory or file.
func (s *slot) clear() error {
	err := unmounted(unix.Unlinkat(s.dir, s.name, unix.AT_REMOVEDIR))
	if errors.Is(err, unix.ENOTDIR) {
		var st unix.Stat_t
		err = unix.Fstatat(s.dir, s.name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > 0) {
			err = errors.New("is no empty file")
		}
		if err == nil {
			err = unmounted(unix.Unlinkat(s.dir, s.name, 0))
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return wrap(err, "remove the mount point")
}

// empty takes off all that is mounted, and removes the mount point and the directory. What somebody has put into one of these stays.
func (s *slot) empty() error {
	for {
		mounted, err := s.mounted()
		if err != nil {
			return err
		}
		if !mounted {
			break
		}
		err = unix.Unmount(procFD(s.dir)+"/"+s.name, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("%w (%w)", ErrBusy, err)
		}
		if err != nil {
			return err
		}
	}
	if s.clear() == nil {
		_ = s.remove() // a directory that stays is no mount
	}
	return nil
}

func (s *slot) remove() error {
	up, err := openBelow(s.root, s.up, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(up)
	return unmounted(unix.Unlinkat(up, s.own, unix.AT_REMOVEDIR))
}
