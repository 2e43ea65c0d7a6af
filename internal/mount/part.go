package mount

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Errors of parts.
var (
	// ErrNoPart: there is no such directory or file in the volume, and it was not to be made or cannot be.
	ErrNoPart = errors.New("there is no such directory or file in the volume")
	// ErrOutside: on the way there a symbolic link leads out of the volume, or something else is mounted in it.
	ErrOutside = errors.New("it leads out of the volume")
	// ErrHeld: somebody else mounts or unmounts this very part now. A process that hangs at it does until the kernel lets go of it.
	ErrHeld = errors.New("another process is at it")
)

// Part is a directory or a file of something that is mounted, a volume, and the place where it is mounted once more. Nobody looks at that
// place while he follows a path of the volume, so who makes the volume's links has no say in where it is.
type Part struct {
	Root   string // an absolute directory of ours
	Volume string // below Root: a mount point
	Path   string // in the volume
	Make   bool   // what is missing of Path is made, as directories with the modes of those that they are made in
	At     string // below Root: a mount point in a directory of its own, both made if they are missing
}

// MountPart mounts a part: it alone, with the flags of the volume's mount, and a peer of no other mount. Symbolic links in the volume are
// followed for as long as they stay in it, whoever changes them meanwhile: what is mounted is the very file that the kernel has found
// beneath the volume's root. Other mounts in the volume are neither entered nor mounted with it. The server of the volume is asked, and
// may not answer: Lookout.MountPart has that in a process that can be given up.
func MountPart(p Part) error {
	s, err := openSlot(p.Root, p.At, true)
	if err != nil {
		return fmt.Errorf("make room for it at %s below %s: %w", p.At, p.Root, err)
	}
	defer s.close()
	if err := p.mount(s); err != nil {
		return fmt.Errorf("mount %q of %s at %s, below %s: %w", p.Path, p.Volume, p.At, p.Root, err)
	}
	return nil
}

func (p Part) mount(s *slot) error {
	mounted, err := s.mounted()
	if err == nil && mounted {
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
	part, kind, err := p.find(volume)
	if err != nil {
		return err
	}
	defer unix.Close(part)
	tree, err := unix.OpenTree(part, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return fmt.Errorf("clone it: %w", err)
	}
	defer unix.Close(tree)
	if err := setAttr(tree, false, unix.MountAttr{Propagation: unix.MS_PRIVATE}); err != nil {
		return err
	}
	if err := s.fit(kind); err != nil {
		return err
	}
	return attach(tree, s.dir, s.name)
}

// openVolume opens the root of what is mounted at a path below a directory. Its server is asked nothing yet but the kind of that.
func openVolume(root int, rel string) (int, error) {
	names, err := elements(rel)
	if err == nil && len(names) == 0 {
		err = fmt.Errorf("%q is the root itself", rel)
	}
	parent := -1
	if err == nil {
		rel = filepath.Clean(rel)
		parent, err = openBelow(root, filepath.Dir(rel), unix.O_PATH|unix.O_DIRECTORY)
	}
	if err != nil {
		return -1, fmt.Errorf("open the volume's directory: %w", err)
	}
	defer unix.Close(parent)
	fd, err := unix.Openat2(parent, filepath.Base(rel), &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return -1, fmt.Errorf("open the volume: %w", err)
	}
	var st unix.Statx_t
	err = unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	if err == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		err = fmt.Errorf("nothing is mounted there")
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("the volume: %w", err)
	}
	return fd, nil
}

// find opens the part, and makes it if it is to be.
func (p Part) find(volume int) (fd int, kind Kind, err error) {
	names, err := elements(p.Path)
	if err == nil && len(names) == 0 {
		err = fmt.Errorf("%q is all of the volume", p.Path)
	}
	if err != nil {
		return -1, "", err
	}
	fd, err = openInside(volume, p.Path)
	if p.Make && errors.Is(err, ErrNoPart) {
		fd, err = makeInside(volume, names)
	}
	if err != nil {
		return -1, "", err
	}
	kind, err = kindOpen(fd)
	if err == nil && kind != Directory && kind != File {
		err = fmt.Errorf("it is neither a directory nor a file: %s", kind)
	}
	if err != nil {
		unix.Close(fd)
		return -1, "", err
	}
	return fd, kind, nil
}

// restless is how often a path is followed anew because something was renamed meanwhile.
const restless = 1000

// openInside opens a path in a volume, its symbolic links followed, without ever leaving it or entering another mount (openat2(2)).
func openInside(volume int, path string) (fd int, err error) {
	how := &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	for range restless {
		if fd, err = unix.Openat2(volume, path, how); !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	switch {
	case errors.Is(err, unix.EXDEV):
		return -1, fmt.Errorf("%w, or into something else that is mounted in it", ErrOutside)
	case errors.Is(err, unix.ENOENT):
		return -1, ErrNoPart
	case errors.Is(err, unix.ENOTDIR):
		return -1, fmt.Errorf("%w: a file is in the way", ErrNoPart)
	case errors.Is(err, unix.ELOOP):
		return -1, fmt.Errorf("%w: its symbolic links go round in circles", ErrNoPart)
	case errors.Is(err, unix.EAGAIN):
		return -1, fmt.Errorf("directories on the way there are renamed all the time: %w", err)
	}
	return fd, err
}

// makeInside makes what is missing of a path in a volume, and opens it. Each step begins at the volume's root again, so that it goes
// through the links that are there then, and stays inside.
func makeInside(volume int, names []string) (int, error) {
	at, err := openInside(volume, ".")
	for i, name := range names {
		if err != nil {
			return -1, err
		}
		var next int
		path := strings.Join(names[:i+1], "/")
		if next, err = openInside(volume, path); errors.Is(err, ErrNoPart) {
			if err = makeIn(at, name); err == nil {
				next, err = openInside(volume, path)
			}
		}
		unix.Close(at)
		at = next
	}
	return at, err
}

// makeIn makes a directory like the one that it is made in: with its mode and, if that is what the mode says, of its group.
func makeIn(dir int, name string) error {
	var st unix.Statx_t
	if err := unix.Statx(dir, "", unix.AT_EMPTY_PATH, unix.STATX_MODE, &st); err != nil {
		return err
	}
	err := unix.Mkdirat(dir, name, uint32(st.Mode)&0o1777)
	switch {
	case errors.Is(err, unix.EEXIST): // by now; or a link that leads nowhere
		return nil
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w, and it cannot be made: the volume is read-only", ErrNoPart)
	case errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("%w: a file is in the way", ErrNoPart)
	}
	return wrap(err, "make %s", name)
}

// UnmountPart takes off what MountPart has mounted, and removes the mount point with its directory, unless somebody has put something
// there. That nothing of it is there is no error. It is neither lazy nor forced: what is used stays (ErrBusy). Like Unmount it may take
// for ever.
func UnmountPart(root, at string) error {
	s, err := openSlot(root, at, false)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil {
		err = s.empty()
		s.close()
	}
	return wrap(err, "unmount the part at %s below %s", at, root)
}

// kindOpen is the kind of an open file, as the kernel knows it.
func kindOpen(fd int) (Kind, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	return kindOf(st.Mode), err
}
