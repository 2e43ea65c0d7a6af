package disk

import (
	"errors"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

// initialUserNamespace is the inode number of the initial user namespace.
const initialUserNamespace = 0xEFFFFFFD

// LoopPossible returns why this process cannot use loop devices, or nil.
func LoopPossible() error {
	var ns unix.Stat_t
	if err := unix.Stat("/proc/self/ns/user", &ns); err != nil {
		return fmt.Errorf("stat the user namespace: %w", err)
	}
	if ns.Ino != initialUserNamespace {
		return errors.New("a user namespace has no loop devices (unshare -U, rootless containers)")
	}
	if os.Geteuid() != 0 {
		return errors.New("only root may set up loop devices")
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("loop devices are missing: %w", err)
	}
	return control.Close()
}

// Choose returns the backend of new volumes for loop, dir or auto, and the reason.
func Choose(word string) (backend, why string, err error) {
	switch word {
	case DirBackend:
		return DirBackend, "requested", nil
	case LoopBackend:
		if err := loopReady(); err != nil {
			return "", "", fmt.Errorf("the loop backend does not work here: %w; use --backend dir", err)
		}
		return LoopBackend, "requested", nil
	case "auto":
		if err := loopReady(); err != nil {
			return DirBackend, "loop does not work here: " + err.Error(), nil
		}
		return LoopBackend, "loop devices and mkfs.ext4 are available", nil
	}
	return "", "", fmt.Errorf("backend %q is not one of loop, dir, auto", word)
}

func loopReady() error {
	if err := LoopPossible(); err != nil {
		return err
	}
	if _, err := exec.LookPath("mkfs.ext4"); err != nil {
		return fmt.Errorf("no mkfs.ext4: %w", err)
	}
	return nil
}

// MountPossible returns why this process cannot mount, or nil.
func MountPossible() error {
	if capable(unix.CAP_SYS_ADMIN) {
		return nil
	}
	return errors.New("mounting needs CAP_SYS_ADMIN: run as root, or without root under `unshare -Urm`")
}

// capable reports whether this process has a capability.
func capable(capability uint) bool {
	var sets [2]unix.CapUserData
	err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &sets[0])
	return err == nil && sets[capability/32].Effective&(1<<(capability%32)) != 0
}
