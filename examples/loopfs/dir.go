package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"
)

// tree keeps a volume as a directory and bind mounts it. It does not enforce sizes.
type tree struct {
	record
	dir string
}

func (t tree) files() string { return filepath.Join(t.dir, "files") }

func (t tree) supports() error {
	if t.Usage.Block || t.ReadAhead != 0 {
		return status.Error(codes.InvalidArgument, "the dir backend has no block devices and no mutable parameters")
	}
	return nil
}

func (t tree) make(context.Context) error {
	err := os.Mkdir(t.files(), 0o755)
	if err == nil {
		err = os.Chmod(t.files(), 0o755) // whatever the umask is: tasks without root use it
	}
	if err == nil {
		err = syncDir(t.files())
	}
	return err
}

// copyFrom copies everything in the directory, but no other file systems.
func (t tree) copyFrom(ctx context.Context, source backend) error {
	if err := cp(ctx, source.(tree).files(), t.files()); err != nil {
		return err
	}
	return onFile(t.files(), func(root *os.File) error { return unix.Syncfs(int(root.Fd())) })
}

func (t tree) grow() error { return nil }

func (t tree) mount(_ context.Context, _ store, at string, flags mount.Flags) error {
	if flags.ForFileSystem() {
		return status.Error(codes.InvalidArgument, "the dir backend does not support mount flags of ext4")
	}
	return mount.Bind(t.files(), at, flags)
}

func (t tree) shows(m mounttable.Mount) (bool, error) {
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
	err := filepath.WalkDir(t.files(), func(_ string, e fs.DirEntry, err error) error {
		var info fs.FileInfo
		if err == nil {
			info, err = e.Info()
		}
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			return nil
		}
		if err != nil {
			return err
		}
		files++
		size += info.Sys().(*syscall.Stat_t).Blocks * 512
		return nil
	})
	free := min(max(t.Bytes-size, 0), int64(st.Bavail)*st.Bsize)
	return []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: t.Bytes, Used: size, Available: free},
		{Unit: csi.VolumeUsage_INODES, Total: int64(st.Ffree) + files, Used: files, Available: int64(st.Ffree)},
	}, err
}

func (t tree) heldBy() (string, error) { return "", nil }
