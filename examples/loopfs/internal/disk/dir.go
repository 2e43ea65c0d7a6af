package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"
)

// dir stores a volume as a directory and bind mounts it. It does not enforce sizes.
type dir struct{ *Store }

func dirName(id ID) string { return "dirs/" + string(id) }

func (d dir) Supports(u Usage) error {
	if u.Access != Mounted || u.FileSystem != "" && u.FileSystem != "ext4" {
		return status.Errorf(codes.InvalidArgument, "the dir backend has no block devices and no file system %s",
			u.FileSystem)
	}
	return nil
}

func (d dir) Make(ctx context.Context, id ID, _ int64) error {
	return d.replaceDir(ctx, id, func(string) error { return nil })
}

// Copy copies everything in the directory, but no other file systems.
func (d dir) Copy(ctx context.Context, from, to ID, _ int64, live bool) error {
	if live {
		return status.Errorf(codes.FailedPrecondition, "volume %s is published for writing, and a directory cannot be "+
			"frozen, so a copy would not be of one moment; unpublish it first", from)
	}
	source, err := d.root.Open(dirName(from))
	if err != nil {
		return fmt.Errorf("open the volume's directory: %w", err)
	}
	defer source.Close()
	return d.replaceDir(ctx, to, func(part string) error {
		return errors.Join(copyTree(ctx, source, filepath.Join(d.path, part)), unix.Syncfs(int(source.Fd())))
	})
}

// copyTree runs cp, which ends with this process.
func copyTree(ctx context.Context, source *os.File, to string) error {
	runtime.LockOSThread() // the death signal is of the thread that started it
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "cp", "-a", "-x", "--sparse=always", "-T", "/proc/self/fd/3/.", to)
	cmd.ExtraFiles = []*os.File{source}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("cp: %w", context.Cause(ctx))
	}
	if err != nil {
		return fmt.Errorf("cp: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// replaceDir makes a new directory, which gets its name when it is complete.
func (d dir) replaceDir(ctx context.Context, id ID, fill func(part string) error) error {
	part := dirName(id) + ".part"
	if err := d.Remove(id); err != nil {
		return err
	}
	err := d.root.Mkdir(part, 0o755)
	if err == nil {
		err = d.root.Chmod(part, 0o755) // whatever the umask is: tasks without root use it
	}
	if err == nil {
		err = errors.Join(fill(part), context.Cause(ctx))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("make the volume's directory: %w", err), d.Remove(id))
	}
	return d.rename(part, dirName(id))
}

func (d dir) Grow(ID, int64) error { return nil }

// Remove removes the directory, unless anything is mounted below it.
func (d dir) Remove(id ID) error {
	for _, name := range []string{dirName(id) + ".part", dirName(id)} {
		at, err := mounttable.Below(filepath.Join(d.path, name))
		if err != nil {
			return err
		}
		if len(at) > 0 {
			return status.Errorf(codes.FailedPrecondition, "something is mounted inside the volume, at %s", at[0].Point)
		}
		if err := d.root.RemoveAll(name); err != nil {
			return fmt.Errorf("remove the volume's directory: %w", err)
		}
	}
	return d.syncDir("dirs")
}

func (d dir) FileSystem(ID, string) (string, error) { return "", nil }

func (d dir) Mount(_ context.Context, r Record, at string, how MountOptions) error {
	if how.Flags.ForFileSystem() {
		return status.Error(codes.InvalidArgument, "the dir backend does not support mount flags of ext4 or xfs")
	}
	source, err := d.root.Open(dirName(r.ID))
	if err != nil {
		return fmt.Errorf("open the volume's directory: %w", err)
	}
	defer source.Close()
	if err := giveTo(source, how.Group); err != nil {
		return fmt.Errorf("give the volume to group %d: %w", how.Group, err)
	}
	tree, err := mount.Bind(filepath.Join(d.path, dirName(r.ID)))
	if err != nil {
		return err
	}
	defer tree.Close()
	return tree.Attach(at, how.Flags)
}

func (d dir) Shows(m mounttable.Mount, id ID) (bool, error) {
	here, err := d.root.Stat(dirName(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("stat the volume's directory: %w", err)
	}
	there, err := os.Lstat(m.Point)
	return err == nil && os.SameFile(here, there), err
}

func (d dir) Expand(ID, bool) error { return nil }

// Stats counts the files of the volume: statfs would count those of all volumes.
func (d dir) Stats(r Record, at string) (bytes, inodes *csi.VolumeUsage, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		return nil, nil, fmt.Errorf("statfs %s: %w", at, err)
	}
	root, err := d.root.OpenRoot(dirName(r.ID))
	if err != nil {
		return nil, nil, fmt.Errorf("open the volume's directory: %w", err)
	}
	defer root.Close()
	var size, files int64
	err = fs.WalkDir(root.FS(), ".", func(_ string, e fs.DirEntry, err error) error {
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
	free := min(max(r.Bytes-size, 0), int64(st.Bavail)*st.Bsize)
	return &csi.VolumeUsage{Unit: csi.VolumeUsage_BYTES, Total: r.Bytes, Used: size, Available: free},
		&csi.VolumeUsage{Unit: csi.VolumeUsage_INODES, Total: int64(st.Ffree) + files, Used: files,
			Available: int64(st.Ffree)}, err
}
