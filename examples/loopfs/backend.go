package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/mount"
)

// backend is the bytes of one volume or snapshot, and how they are mounted. The caller holds the lock of the volume.
type backend interface {
	// make makes empty bytes in a new directory.
	make(ctx context.Context) error
	// copyFrom makes bytes that begin as a copy of those of the same backend.
	copyFrom(ctx context.Context, source backend) error
	// grow enlarges the bytes to the size of the volume, if they are fewer.
	grow() error
	// mount mounts the volume at its staging path, where nothing is mounted, with the size of the volume.
	mount(ctx context.Context, s store) error
	// shows reports whether a mount is one of this volume: its staging mount, or a bind mount of that or of its device.
	shows(m mount.Mount) (bool, error)
	// expand enlarges the file system that is mounted at a path, or the devices of a block volume, to the size of the
	// bytes.
	expand(at string) error
	// stats returns the usage of the volume, which is mounted at a path.
	stats(at string) ([]*csi.VolumeUsage, error)
	// heldBy returns the path of a device of the volume, or an empty string if the kernel has none.
	heldBy() (string, error)
	// check looks for damage to the bytes.
	check() ([]*problem, error)
}

// The names of the backends, as records keep them.
const (
	loopBackend = "loop" // sparse images on loop devices; real sizes; root in the initial user namespace
	dirBackend  = "dir"  // plain directories; sizes are only counted; works in a user namespace
)

// supported returns INVALID_ARGUMENT for a volume that its backend cannot have.
func (r record) supported() error {
	if r.Backend == dirBackend && (r.Usage.Block || r.ReadAhead != 0) {
		return status.Error(codes.InvalidArgument, "the dir backend has no block devices and no mutable parameters")
	}
	return nil
}

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
	if err := unix.Stat("/proc/self/ns/user", &ns); err != nil || ns.Ino != initialUserNamespace {
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

// tree keeps a volume as a directory and bind mounts it. It does not enforce sizes.
type tree struct {
	record
	dir string
}

func (t tree) files() string { return filepath.Join(t.dir, "files") }

func (t tree) make(context.Context) error {
	if err := os.Mkdir(t.files(), 0o755); err != nil {
		return err
	}
	// whatever the umask is, because tasks without root use the directory
	return errors.Join(os.Chmod(t.files(), 0o755), syncDir(t.files()))
}

// copyFrom copies everything in the directory, but no other file systems.
func (t tree) copyFrom(ctx context.Context, source backend) error {
	if err := cp(ctx, source.(tree).files(), t.files()); err != nil {
		return err
	}
	return onFile(t.files(), func(root *os.File) error { return unix.Syncfs(int(root.Fd())) })
}

func (t tree) grow() error { return nil }

func (t tree) mount(context.Context, store) error {
	return bindMount(t.files(), t.Stage.Path, false, t.Stage.flags())
}

func (t tree) shows(m mount.Mount) (bool, error) {
	here, err := os.Stat(t.files())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	there, err := os.Lstat(m.Point)
	return err == nil && os.SameFile(here, there), err
}

func (t tree) expand(string) error { return nil }

// stats counts the files of the volume: statfs would count those of all volumes.
func (t tree) stats(at string) ([]*csi.VolumeUsage, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		return nil, fmt.Errorf("statfs %s: %w", at, err)
	}
	var size, files int64
	err := filepath.WalkDir(t.files(), func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			return nil
		}
		files++
		size += st.Blocks * 512
		return err
	})
	free := min(max(t.Bytes-size, 0), int64(st.Bavail)*st.Bsize)
	return []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: t.Bytes, Used: size, Available: free},
		{Unit: csi.VolumeUsage_INODES, Total: int64(st.Ffree) + files, Used: files, Available: int64(st.Ffree)},
	}, err
}

func (t tree) heldBy() (string, error) { return "", nil }
