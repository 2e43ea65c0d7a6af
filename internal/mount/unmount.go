package mount

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrBusy: what is mounted there is in use, so it stays. Users says by whom, unless it is the kernel itself: a loop device, a swap file or
// an export.
var ErrBusy = errors.New("it is in use")

// Unmount takes the uppermost mount at rel below root off; that there is none is no error. It follows no symbolic link, goes into no mount
// (ErrMounted), and is neither lazy nor forced: what is used stays (ErrBusy). The last mount of a file system is written back before it
// returns, which may take for ever: Lookout.Unmount does it in a process that can be given up.
func Unmount(root, rel string) error {
	names, err := elements(rel)
	if err == nil && len(names) == 0 {
		err = errors.New("is the root itself")
	}
	if err == nil {
		err = unmount(root, filepath.Dir(filepath.Clean(rel)), names[len(names)-1])
	}
	return wrap(err, "unmount %q below %s", rel, root)
}

func unmount(root, parent, name string) error {
	top, err := openRoot(root)
	if err != nil {
		return err
	}
	defer unix.Close(top)
	dir, err := openBelow(top, parent, unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	fd, err := openBelow(dir, name, unix.O_PATH) // refused at a mount, which it does not touch
	if err == nil {
		unix.Close(fd)
	}
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return nil
	case !errors.Is(err, ErrMounted):
		return err
	}
	err = unix.Unmount(procFD(dir)+"/"+name, unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%w (%w)", ErrBusy, err)
	}
	return err
}
