package mount

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Detached mounts the file system of a device where no path leads to it, and calls do with its root directory. The
// mount is in no mount table and no namespace, and ends with the process. If the file system is mounted already, this
// is another mount of it; the error is unix.EBUSY if that one is read-only.
func Detached(device, fstype string, do func(root *os.File) error) error {
	tree, err := newMount(device, fstype, Flags{})
	if err != nil {
		return fmt.Errorf("mount %s of %s: %w", fstype, device, err)
	}
	defer unix.Close(tree)
	fd, err := unix.Openat(tree, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the root of %s: %w", device, err)
	}
	root := os.NewFile(uintptr(fd), device)
	defer root.Close()
	return do(root)
}

// newMount returns a detached mount of the file system of a device. Its attributes are still to be set.
func newMount(device, fstype string, f Flags) (int, error) {
	config, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(config)
	options := append([]string{"source=" + device}, f.fs...)
	if f.attr&unix.MOUNT_ATTR_RDONLY != 0 {
		options = append(options, "ro")
	}
	if fstype == "xfs" {
		options = append(options, "nouuid") // else xfs refuses a copy of a file system beside its original
	}
	for _, option := range options {
		if key, value, found := strings.Cut(option, "="); found {
			err = unix.FsconfigSetString(config, key, value)
		} else {
			err = unix.FsconfigSetFlag(config, key)
		}
		if err != nil {
			return -1, err
		}
	}
	if err := unix.FsconfigCreate(config); err != nil {
		return -1, err
	}
	return unix.Fsmount(config, unix.FSMOUNT_CLOEXEC, 0)
}
