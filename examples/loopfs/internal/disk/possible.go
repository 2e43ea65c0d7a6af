package disk

import (
	"errors"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// initialUserNamespace is the inode number of the initial user namespace.
const initialUserNamespace = 0xEFFFFFFD

// possible returns FAILED_PRECONDITION if this process cannot use the loop devices of a volume.
func possible(id ID) error {
	if err := loopPossible(); err != nil {
		return status.Errorf(codes.FailedPrecondition, "volume %s needs a loop device: %v", id, err)
	}
	return nil
}

// loopPossible returns why this process cannot use loop devices, or nil.
func loopPossible() error {
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
	possible := loopReady()
	switch {
	case word == LoopBackend && possible != nil:
		return "", "", fmt.Errorf("the loop backend does not work here: %w; use --backend dir", possible)
	case word == LoopBackend, word == DirBackend:
		return word, "requested", nil
	case word != "auto":
		return "", "", fmt.Errorf("backend %q is not one of loop, dir, auto", word)
	case possible != nil:
		return DirBackend, "loop does not work here: " + possible.Error(), nil
	}
	return LoopBackend, "loop devices and mkfs.ext4 are available", nil
}

func loopReady() error {
	if err := loopPossible(); err != nil {
		return err
	}
	_, err := exec.LookPath("mkfs.ext4")
	return err
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
