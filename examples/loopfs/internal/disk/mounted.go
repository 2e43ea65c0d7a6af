package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"
)

func (l *loop) Mount(ctx context.Context, id ID, at mount.Place, how MountOptions) error {
	if err := LoopPossible(); err != nil {
		return Errorf(ErrUnavailable, "volume %s needs a loop device: %w", id, err)
	}
	if err := l.Grow(id, how.Bytes); err != nil {
		return err
	}
	if err := l.format(ctx, id, how.FileSystem); err != nil {
		return err
	}
	if err := l.growUnmounted(ctx, id, how.FileSystem); err != nil {
		return fmt.Errorf("enlarge the file system: %w", err)
	}
	if how.Group != "" {
		err := l.unmountedRoot(id, how.FileSystem, func(root *os.File) error { return giveTo(root, how.Group) })
		if err != nil {
			return err
		}
	}
	dev, err := l.attach(id, unix.LO_FLAGS_AUTOCLEAR)
	if err != nil {
		return err
	}
	defer dev.Close() // the mount keeps the device; without one this frees it
	err = at.MountDevice(dev.Name(), how.FileSystem, how.Flags)
	switch {
	case errors.Is(err, unix.EINVAL):
		return Errorf(ErrInvalid, "%s refuses the volume or its mount flags: %w", how.FileSystem, err)
	case errors.Is(err, unix.ENODEV):
		return Errorf(ErrUnavailable, "this kernel has no %s: %w", how.FileSystem, err)
	}
	return err
}

// giveTo gives a directory to a group: members may write, and new files belong to the group.
func giveTo(root *os.File, group string) error {
	gid, err := strconv.Atoi(group)
	if err != nil {
		return fmt.Errorf("group: %w", err)
	}
	st, err := root.Stat()
	if err != nil {
		return fmt.Errorf("stat the volume's root directory: %w", err)
	}
	if err := errors.Join(root.Chown(-1, gid), root.Chmod(st.Mode()|os.ModeSetgid|0o070)); err != nil {
		return fmt.Errorf("give the volume to group %s: %w", group, err)
	}
	return nil
}

func (l *loop) Shows(_ mounttable.Mounts, m mounttable.Mount, id ID) (bool, error) {
	number := mounttable.Number{Block: true, Major: uint32(m.Major), Minor: uint32(m.Minor)}
	if m.Major != loopMajor {
		var err error
		if number, err = mounttable.NumberOf(m.Point); errors.Is(err, mounttable.ErrNoDevice) {
			return false, nil
		} else if err != nil {
			return false, fmt.Errorf("read the device number of %s: %w", m.Point, err)
		}
	}
	path, err := loopPath(number)
	if path == "" || err != nil {
		return false, err
	}
	shows := false
	err = l.visit(path, id, func(*os.File, *unix.LoopInfo64) error {
		shows = true
		return nil
	})
	return shows, err
}

// loopPath returns the path of a loop device, or an empty string for another device.
func loopPath(n mounttable.Number) (string, error) {
	if !n.Block || n.Major != loopMajor {
		return "", nil
	}
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", n.Major, n.Minor))
	if err != nil {
		return "", fmt.Errorf("find loop device %d:%d: %w", n.Major, n.Minor, err)
	}
	return "/dev/" + link[strings.LastIndexByte(link, '/')+1:], nil
}

func (l *loop) Expand(id ID, raw bool) error {
	if err := l.resize(id); err != nil || raw {
		return err
	}
	return l.mountedRoot(id, func(root *os.File, s super) error {
		size, err := l.Size(id)
		if err != nil {
			return err
		}
		if s.fs == "ext4" && !capable(unix.CAP_SYS_RESOURCE) {
			if nearlyFull(size, s.bytes) {
				return nil
			}
			return Errorf(ErrUnavailable, "the kernel enlarges a mounted ext4 only with CAP_SYS_RESOURCE, which loopfs lacks; "+
				"unstage volume %s and stage it again, which enlarges it", id)
		}
		return growFS(root, s, size)
	})
}

// mountedRoot calls do with the root directory of a mounted volume.
func (l *loop) mountedRoot(id ID, do func(root *os.File, s super) error) error {
	dev, err := l.Device(id, false)
	if err != nil {
		return err
	}
	if dev == "" {
		return Errorf(ErrInUse, "volume %s is not mounted", id)
	}
	file, err := os.Open(dev)
	if err != nil {
		return fmt.Errorf("open %s: %w", dev, err)
	}
	defer file.Close()
	s, err := readSuper(file)
	if err != nil {
		return err
	}
	return mount.Detached(dev, s.fs, func(root *os.File) error { return do(root, s) })
}

func (l *loop) Freeze(id ID) error {
	return l.mountedRoot(id, func(root *os.File, _ super) error {
		if err := unix.IoctlSetInt(int(root.Fd()), fiFreeze, 0); err != nil {
			return fmt.Errorf("freeze volume %s: %w", id, err)
		}
		return nil
	})
}

func (l *loop) Thaw(id ID) error {
	if err := LoopPossible(); err != nil {
		return Errorf(ErrUnavailable, "volume %s is frozen and cannot be thawed: %w", id, err)
	}
	if user, err := l.HeldBy(id); user == "" || err != nil {
		return err
	}
	return l.mountedRoot(id, func(root *os.File, _ super) error {
		if err := unix.IoctlSetInt(int(root.Fd()), fiThaw, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("thaw volume %s: %w", id, err)
		}
		return nil
	})
}

func (l *loop) Stats(_ ID, _ int64, at string) (Stats, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		return Stats{}, fmt.Errorf("statfs %s: %w", at, err)
	}
	size := func(blocks uint64) int64 { return int64(blocks) * st.Bsize }
	return Stats{
		Bytes:  Count{Total: size(st.Blocks), Used: size(st.Blocks - st.Bfree), Free: size(st.Bavail)},
		Inodes: Count{Total: int64(st.Files), Used: int64(st.Files - st.Ffree), Free: int64(st.Ffree)},
	}, nil
}
