package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"
)

// backend is the bytes of one volume or snapshot, and how they are mounted. The caller holds the lock of the volume.
type backend interface {
	// supports returns INVALID_ARGUMENT for a volume that this backend cannot have.
	supports() error
	// make makes empty bytes in a new directory.
	make(ctx context.Context) error
	// copyFrom makes bytes that begin as a copy of those of the same backend.
	copyFrom(ctx context.Context, source backend) error
	// grow enlarges the bytes to the size of the volume, if they are fewer.
	grow() error
	// mount mounts the volume at a directory where nothing is mounted, with the size of the volume.
	mount(ctx context.Context, s store, at string, flags mount.Flags) error
	// shows reports whether a mount is one of this volume: its staging mount, or a bind mount of that or of its device.
	shows(m mounttable.Mount) (bool, error)
	// expand enlarges what is in use, the file system that is mounted at a path or the devices, to the size of the bytes.
	expand(at string) error
	// stats returns how full the volume is that is mounted at a path.
	stats(at string) ([]*csi.VolumeUsage, error)
	// heldBy returns a device that the kernel has of the volume, or an empty string.
	heldBy() (string, error)
	// check looks for what is wrong with the bytes.
	check() ([]*problem, error)
}

// The names of the backends, as records keep them.
const (
	loopBackend = "loop" // sparse images on loop devices; real sizes; root in the initial user namespace
	dirBackend  = "dir"  // plain directories; sizes are only counted; works in a user namespace
)

// bytesIn returns the bytes of a volume that are in a directory.
func bytesIn(dir string, r record) backend {
	if r.Backend == dirBackend {
		return tree{record: r, dir: dir}
	}
	return loop{record: r, dir: dir}
}

func (d *driver) bytesOf(r record) backend { return bytesIn(d.dirOf(r.ID), r) }

// chooseBackend returns the backend of new volumes for loop, dir or auto, and the reason.
func chooseBackend(word string) (backend, why string, err error) {
	lacking := loopPossible()
	switch {
	case word == loopBackend && lacking != nil:
		return "", "", fmt.Errorf("the loop backend does not work here: %w; use --backend dir", lacking)
	case word == loopBackend, word == dirBackend:
		return word, "requested", nil
	case word != "auto":
		return "", "", fmt.Errorf("backend %q is not one of loop, dir, auto", word)
	case lacking != nil:
		return dirBackend, "loop does not work here: " + lacking.Error(), nil
	}
	return loopBackend, "loop devices and mkfs.ext4 are available", nil
}

// initialUserNamespace is the inode number of the initial user namespace.
const initialUserNamespace = 0xEFFFFFFD

// loopPossible returns why this process cannot use loop devices, or nil.
func loopPossible() error {
	var ns unix.Stat_t
	if err := unix.Stat("/proc/self/ns/user", &ns); err != nil {
		return fmt.Errorf("stat the user namespace: %w", err)
	}
	if ns.Ino != initialUserNamespace {
		return errors.New("a user namespace has no loop devices (unshare -U, rootless containers)")
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("only root may set up loop devices: %w", err)
	}
	control.Close()
	_, err = exec.LookPath("mkfs.ext4")
	return err
}

// mountPossible returns why this process cannot mount, or nil.
func mountPossible() error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return fmt.Errorf("mounting needs CAP_SYS_ADMIN: run as root, or without root under `unshare -Urm` (%w)", err)
	}
	return unix.Close(fd)
}
