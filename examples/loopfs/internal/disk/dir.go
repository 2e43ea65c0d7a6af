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

	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"
)

// dir stores a volume as a directory and bind mounts it. It does not enforce sizes.
type dir struct{ store *Store }

func dirName(id ID) string { return "dirs/" + string(id) }

func (d *dir) Supports(u Usage) error {
	switch {
	case u.Access != Mounted:
		return Errorf(ErrInvalid, "the dir backend has no block devices: ask for access type mount")
	case u.FileSystem != "" && u.FileSystem != "ext4":
		return Errorf(ErrInvalid, "the dir backend has no file system %s", u.FileSystem)
	}
	return nil
}

func (d *dir) Make(ctx context.Context, id ID, _ int64) error {
	return d.replace(ctx, id, func(string) error { return nil })
}

// Copy copies everything in the directory, but no other file systems.
func (d *dir) Copy(ctx context.Context, from, to ID, _ int64, live bool) error {
	if live {
		return Errorf(ErrInUse, "volume %s is published for writing, and a directory cannot be frozen, "+
			"so a copy would not be of one moment; unpublish it first", from)
	}
	source, err := d.store.root.Open(dirName(from))
	if err != nil {
		return fmt.Errorf("open the volume's directory: %w", err)
	}
	defer source.Close()
	return d.replace(ctx, to, func(part string) error {
		return errors.Join(copyTree(ctx, source, filepath.Join(d.store.path, part)), d.sync(part))
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

// replace makes a new directory, which gets its name when it is complete.
func (d *dir) replace(ctx context.Context, id ID, fill func(part string) error) error {
	part := dirName(id) + ".part"
	if err := d.Remove(id); err != nil {
		return err
	}
	if err := d.store.root.Mkdir(part, 0o755); err != nil {
		return fmt.Errorf("make the volume's directory: %w", err)
	}
	if err := d.store.root.Chmod(part, 0o755); err != nil { // whatever the umask is: tasks without root use it
		return fmt.Errorf("make the volume's directory: %w", err)
	}
	if err := errors.Join(fill(part), context.Cause(ctx)); err != nil {
		return errors.Join(err, d.Remove(id))
	}
	if err := d.store.root.Rename(part, dirName(id)); err != nil {
		return fmt.Errorf("name the volume's directory: %w", err)
	}
	return d.store.syncDir("dirs")
}

// sync makes the copied files durable.
func (d *dir) sync(name string) error {
	f, err := d.store.root.Open(name)
	if err != nil {
		return fmt.Errorf("sync %s: %w", name, err)
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return fmt.Errorf("sync %s: %w", name, err)
	}
	return nil
}

func (d *dir) Grow(ID, int64) error { return nil }

// Remove removes the directory, unless anything is mounted below it.
func (d *dir) Remove(id ID) error {
	for _, name := range []string{dirName(id) + ".part", dirName(id)} {
		at, err := mounttable.Below(filepath.Join(d.store.path, name))
		if err != nil {
			return err
		}
		if len(at) > 0 {
			return Errorf(ErrInUse, "something is mounted inside the volume, at %s", at[0].Point)
		}
		if err := d.store.root.RemoveAll(name); err != nil {
			return fmt.Errorf("remove the volume's directory: %w", err)
		}
	}
	return d.store.syncDir("dirs")
}

func (d *dir) HeldBy(id ID) (string, error) {
	table, err := mounttable.Table(0)
	if err != nil {
		return "", err
	}
	for _, m := range table {
		if filepath.Base(m.Root) != string(id) {
			continue
		}
		if shown, err := d.Shows(table, m, id); shown || err != nil {
			return "the mount at " + m.Point, err
		}
	}
	return "", nil
}

func (d *dir) FileSystem(ID, string) (string, error) { return "", nil }

func (d *dir) Mount(_ context.Context, id ID, at mount.Place, how MountOptions) error {
	if how.Flags.ForFileSystem() {
		return Errorf(ErrInvalid, "the dir backend does not support mount flags of ext4 or xfs")
	}
	source, err := d.store.root.Open(dirName(id))
	if err != nil {
		return fmt.Errorf("open the volume's directory: %w", err)
	}
	defer source.Close()
	if how.Group != "" {
		if err := giveTo(source, how.Group); err != nil {
			return err
		}
	}
	return at.Bind(source, how.Flags)
}

func (d *dir) Shows(table mounttable.Mounts, m mounttable.Mount, id ID) (bool, error) {
	source, err := d.store.root.Open(dirName(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open the volume's directory: %w", err)
	}
	defer source.Close()
	o, err := mount.Origin(table, source)
	return err == nil && mount.SameOrigin(o, m), err
}

func (d *dir) Expand(ID, bool) error { return nil }

// Stats counts the files of the volume: statfs would count those of all volumes.
func (d *dir) Stats(id ID, bytes int64, _ string) (Stats, error) {
	root, err := d.store.root.OpenRoot(dirName(id))
	if err != nil {
		return Stats{}, fmt.Errorf("open the volume's directory: %w", err)
	}
	defer root.Close()
	s := Stats{}
	err = fs.WalkDir(root.FS(), ".", func(_ string, e fs.DirEntry, err error) error {
		if err == nil {
			err = s.add(e)
		}
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			return nil
		}
		return err
	})
	if err != nil {
		return Stats{}, fmt.Errorf("count the volume's files: %w", err)
	}
	return s, s.bound(root, bytes)
}

func (s *Stats) add(e fs.DirEntry) error {
	info, err := e.Info()
	if err != nil {
		return err
	}
	s.Inodes.Used++
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		s.Bytes.Used += sys.Blocks * 512
	}
	return nil
}

// bound sets what is free: the rest of the volume's size, at most what is free in its file system.
func (s *Stats) bound(root *os.Root, bytes int64) error {
	f, err := root.Open(".")
	if err != nil {
		return fmt.Errorf("open the volume's directory: %w", err)
	}
	defer f.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	s.Bytes.Total, s.Bytes.Free = bytes, min(max(bytes-s.Bytes.Used, 0), int64(st.Bavail)*st.Bsize)
	s.Inodes.Free, s.Inodes.Total = int64(st.Ffree), int64(st.Ffree)+s.Inodes.Used
	return nil
}
