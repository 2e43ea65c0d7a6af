package mount

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Errors of parts.
var (
	// ErrNoPart means that the directory or file does not exist in the volume, and may not or cannot be made.
	ErrNoPart = errors.New("there is no such directory or file in the volume")
	// ErrOutside means that a symbolic link leads out of the volume, or to another mount inside it.
	ErrOutside = errors.New("it leads out of the volume")
	// ErrHeld means that another process currently mounts or unmounts this part. If that process hangs in the kernel,
	// it holds the part until it exits.
	ErrHeld = errors.New("another process mounts or unmounts it now")
)

// A Part is a directory or file of a mounted volume, and a second place at which it is mounted. The second place lies
// below Root, and no path inside the volume leads to it.
type Part struct {
	Root   string // an absolute directory of ours
	Volume string // mount point of the volume, below Root
	Path   string // in the volume
	Make   bool   // make missing directories of Path, with the mode of their parent
	At     string // mount point below Root, in a directory of its own; both are made if they are missing
}

// MountPart mounts a part: only that directory or file, with the flags of the volume's mount, in no peer group. It
// follows symbolic links that stay in the volume. A link that changes meanwhile cannot misdirect it: the kernel opens
// the file below the volume's root, and MountPart mounts the opened file. It does not enter or include other mounts
// inside the volume. The volume's server may not answer; Helper.MountPart has a deadline.
func MountPart(p Part) error {
	s, err := openSlot(p.Root, p.At, true)
	if err == nil {
		err = p.mount(s)
		s.close()
	}
	return wrap(err, "mount %q of %s at %s, below %s", p.Path, p.Volume, p.At, p.Root)
}

func (p Part) mount(s *slot) error {
	mounted, err := isMountPoint(s.dir, s.name)
	if mounted {
		err = ErrMounted
	}
	if err != nil {
		return err
	}
	volume, err := openVolume(s.root, p.Volume)
	if err != nil {
		return err
	}
	defer unix.Close(volume)
	part, err := p.open(volume)
	if err != nil {
		return err
	}
	defer unix.Close(part)
	kind, err := fileType(part)
	if err == nil && kind != unix.S_IFDIR && kind != unix.S_IFREG {
		err = errors.New("it is neither a directory nor a file")
	}
	if err != nil {
		return err
	}
	tree, err := unix.OpenTree(part, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return fmt.Errorf("clone it: %w", err)
	}
	defer unix.Close(tree)
	if err := setAttr(tree, false, unix.MountAttr{Propagation: unix.MS_PRIVATE}); err != nil {
		return err
	}
	if err := s.makePoint(kind); err != nil {
		return fmt.Errorf("make the mount point: %w", err)
	}
	return attach(tree, s.dir, s.name)
}

// UnmountPart unmounts a part, and removes the mount point and its directory if they are empty. A missing part is no
// error. UnmountPart is neither lazy nor forced: a part in use stays (ErrBusy). Like Unmount it may take forever.
func UnmountPart(root, at string) error {
	s, err := openSlot(root, at, false)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil {
		err = s.unmountAll()
		s.close()
	}
	return wrap(err, "unmount the part at %s below %s", at, root)
}

// openVolume opens the root of the mount at a path below an open directory.
func openVolume(root int, rel string) (int, error) {
	parent, name, err := openParentBelow(root, rel)
	if err != nil {
		return -1, fmt.Errorf("open the volume's directory: %w", err)
	}
	defer unix.Close(parent)
	fd, err := unix.Openat2(parent, name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return -1, fmt.Errorf("open the volume: %w", err)
	}
	var st unix.Statx_t
	err = unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	if err == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		err = errors.New("nothing is mounted there")
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("open the volume: %w", err)
	}
	return fd, nil
}

// open opens the part, and makes it if p.Make is set.
func (p Part) open(volume int) (int, error) {
	names, err := elements(p.Path)
	if err == nil && len(names) == 0 {
		err = fmt.Errorf("%q is the whole volume", p.Path)
	}
	if err != nil {
		return -1, err
	}
	fd, err := openInside(volume, p.Path)
	if p.Make && errors.Is(err, ErrNoPart) {
		return makeInside(volume, names)
	}
	return fd, err
}

// maxRenames bounds how often a path is resolved again because a directory in it was renamed.
const maxRenames = 1000

// openInside opens a path in a volume. It follows symbolic links, but never leaves the volume or enters another mount
// (openat2(2)).
func openInside(volume int, path string) (fd int, err error) {
	how := &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	for range maxRenames {
		if fd, err = unix.Openat2(volume, path, how); !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	switch {
	case errors.Is(err, unix.EXDEV):
		return -1, fmt.Errorf("%w, or to another mount inside it", ErrOutside)
	case errors.Is(err, unix.ENOENT):
		return -1, ErrNoPart
	case errors.Is(err, unix.ENOTDIR):
		return -1, fmt.Errorf("%w: a file is in the way", ErrNoPart)
	case errors.Is(err, unix.ELOOP):
		return -1, fmt.Errorf("%w: its symbolic links form a loop", ErrNoPart)
	case errors.Is(err, unix.EAGAIN):
		return -1, fmt.Errorf("directories on the way are renamed all the time: %w", err)
	}
	return fd, err
}

// makeInside makes the missing directories of a path in a volume, and opens the path. Each step starts again at the
// volume's root, so it follows the current links and stays inside.
func makeInside(volume int, names []string) (int, error) {
	at, err := openInside(volume, ".")
	for i, name := range names {
		if err != nil {
			return -1, err
		}
		var next int
		path := strings.Join(names[:i+1], "/")
		if next, err = openInside(volume, path); errors.Is(err, ErrNoPart) {
			if err = mkdirLike(at, name); err == nil {
				next, err = openInside(volume, path)
			}
		}
		unix.Close(at)
		at = next
	}
	return at, err
}

// mkdirLike makes a directory with the mode of its parent.
func mkdirLike(dir int, name string) error {
	var st unix.Statx_t
	if err := unix.Statx(dir, "", unix.AT_EMPTY_PATH, unix.STATX_MODE, &st); err != nil {
		return err
	}
	err := unix.Mkdirat(dir, name, uint32(st.Mode)&0o1777)
	switch {
	case errors.Is(err, unix.EEXIST): // made meanwhile, or a dangling link
		return nil
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w, and it cannot be made: the volume is read-only", ErrNoPart)
	case errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("%w: a file is in the way", ErrNoPart)
	}
	return wrap(err, "make %s", name)
}

// fileType returns the type bits of an open path. It asks no server.
func fileType(fd int) (uint16, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	return st.Mode & unix.S_IFMT, wrap(err, "statx")
}

// A slot is the mount point of a part in its own directory. While the slot is open, its directory is locked, so that no
// other process mounts or unmounts there. The process holds the lock, so a process that hangs keeps it.
type slot struct {
	root   int    // Part.Root
	parent string // parent of the directory, below root
	own    string // name of the directory
	dir    int    // the directory
	name   string // of the mount point in it
}

const (
	slotWait = time.Second // for a process that was killed to release the lock
	slotPoll = 5 * time.Millisecond
)

// openSlot opens the slot of a mount point below root. If create is set, it makes missing directories.
func openSlot(root, at string, create bool) (_ *slot, err error) {
	names, err := elements(at)
	if err == nil && len(names) < 2 {
		err = fmt.Errorf("%q is not in a directory of its own", at)
	}
	if err != nil {
		return nil, err
	}
	at = filepath.Clean(at)
	dir := filepath.Dir(at)
	s := &slot{root: -1, dir: -1, parent: filepath.Dir(dir), own: filepath.Base(dir), name: filepath.Base(at)}
	s.root, err = openRoot(root)
	for end := time.Now().Add(slotWait); err == nil; time.Sleep(slotPoll) {
		if err = s.lock(dir, create); !errors.Is(err, ErrHeld) || time.Now().After(end) {
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

// lock opens the slot's directory and locks it. If the directory is removed between the two steps, lock returns
// ErrHeld. The next attempt then finds another directory or none.
func (s *slot) lock(dir string, create bool) error {
	fd, err := -1, error(nil)
	if create {
		if fd, err = mkdirAll(s.root, dir, 0o700); err == nil {
			err = unix.Close(fd)
		}
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

func (s *slot) close() {
	for _, fd := range []int{s.dir, s.root} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// makePoint makes the mount point, as a directory or as an empty file. Nothing may be mounted there.
func (s *slot) makePoint(kind uint16) error {
	fd, err := openBelow(s.dir, s.name, unix.O_PATH)
	if err == nil {
		is, err := fileType(fd)
		unix.Close(fd)
		if err != nil || is == kind {
			return err
		}
		if err := s.removePoint(); err != nil {
			return err
		}
	} else if !errors.Is(err, unix.ENOENT) {
		return err
	}
	if kind == unix.S_IFDIR {
		return unix.Mkdirat(s.dir, s.name, 0o700)
	}
	flags := unix.O_CREAT | unix.O_EXCL | unix.O_WRONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	if fd, err = unix.Openat(s.dir, s.name, flags, 0o600); err != nil {
		return err
	}
	return unix.Close(fd)
}

// removePoint removes the mount point if it is an empty directory or file.
func (s *slot) removePoint() error {
	err := rmdirAt(s.dir, s.name)
	if errors.Is(err, unix.ENOTDIR) {
		var st unix.Stat_t
		err = unix.Fstatat(s.dir, s.name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > 0) {
			err = errors.New("is no empty file")
		}
		if err == nil {
			err = mountedIfBusy(unix.Unlinkat(s.dir, s.name, 0))
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// unmountAll unmounts all mounts at the mount point. It removes the mount point and its directory if they are empty.
func (s *slot) unmountAll() error {
	for {
		mounted, err := isMountPoint(s.dir, s.name)
		if err == nil && mounted {
			err = unmountAt(s.dir, s.name)
		}
		if err != nil {
			return err
		}
		if !mounted {
			break
		}
	}
	if s.removePoint() != nil {
		return nil // the mount point is not empty, but nothing is mounted there
	}
	if parent, err := openBelow(s.root, s.parent, unix.O_PATH|unix.O_DIRECTORY); err == nil {
		_ = rmdirAt(parent, s.own)
		unix.Close(parent)
	}
	return nil
}
