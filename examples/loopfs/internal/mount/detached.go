package mount

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// NoUUID is the option without which xfs refuses a copy of a file system beside its original.
const NoUUID = "nouuid"

// Detached mounts the file system on a device where nobody sees it, for as long as do works in its root directory. It
// is in no mount table and in no namespace, and a kill takes it away. If the file system is mounted already, this is
// that one; unix.EBUSY if that is read-only.
func Detached(device, fstype string, do func(root *os.File) error) error {
	tree, err := detach(device, fstype)
	if err != nil {
		return fmt.Errorf("mount %s of %s aside: %w", fstype, device, err)
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

func detach(device, fstype string) (int, error) {
	config, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(config)
	if err := unix.FsconfigSetString(config, "source", device); err != nil {
		return -1, err
	}
	if fstype == "xfs" {
		if err := unix.FsconfigSetFlag(config, NoUUID); err != nil {
			return -1, err
		}
	}
	if err := unix.FsconfigCreate(config); err != nil {
		return -1, err
	}
	return unix.Fsmount(config, unix.FSMOUNT_CLOEXEC, 0)
}
