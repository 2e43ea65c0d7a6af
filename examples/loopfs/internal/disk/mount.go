package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"
)

func (l loop) Mount(ctx context.Context, r Record, at string, how MountOptions) error {
	if err := possible(r.ID); err != nil {
		return err
	}
	if err := l.Grow(r.ID, r.Bytes); err != nil {
		return err
	}
	if err := l.format(ctx, r, how.FileSystem); err != nil {
		return err
	}
	if how.FileSystem == "ext4" {
		if err := l.growExt4(ctx, r); err != nil {
			return fmt.Errorf("enlarge the file system: %w", err)
		}
	}
	dev, err := l.attach(r.ID, unix.LO_FLAGS_AUTOCLEAR)
	if err != nil {
		return err
	}
	defer dev.Close() // the mount keeps the device; without one this frees it
	tree, err := mount.Device(dev.Name(), how.FileSystem, how.Flags)
	switch {
	case errors.Is(err, unix.EINVAL):
		return status.Errorf(codes.InvalidArgument, "%s refuses the volume or its mount flags: %v", how.FileSystem, err)
	case errors.Is(err, unix.ENODEV):
		return status.Errorf(codes.FailedPrecondition, "this kernel has no %s: %v", how.FileSystem, err)
	case err != nil:
		return err
	}
	defer tree.Close()
	if !how.Flags.IsReadOnly() {
		if err := prepare(tree, dev, r, how); err != nil {
			return err
		}
	}
	return errors.Join(tree.Attach(at, how.Flags), l.SetReadAhead(r.ID, r.ReadAhead))
}

// prepare changes a file system before it is seen.
func prepare(tree mount.Tree, dev *os.File, r Record, how MountOptions) error {
	root, err := tree.Root()
	if err != nil {
		return err
	}
	defer root.Close()
	if err := giveTo(root, how.Group); err != nil {
		return fmt.Errorf("give the volume to group %d: %w", how.Group, err)
	}
	if how.FileSystem == "xfs" {
		return growFS(root, dev, r.Bytes)
	}
	return nil
}

// Requests to ioctl(2), for an open directory of a mounted file system.
const (
	fiFreeze = 0xC0045877 // FIFREEZE
	fiThaw   = 0xC0045878 // FITHAW
	extGrow  = 0x40086610 // EXT4_IOC_RESIZE_FS: the number of blocks
	xfsGrow  = 0x4010586E // XFS_IOC_FSGROWFSDATA: xfsGrowth
)

type xfsGrowth struct {
	blocks uint64
	imaxpc uint32 // as it was
	_      uint32
}

// growFS enlarges a mounted file system. The kernel does it in transactions, so a kill does no harm.
func growFS(root, dev *os.File, bytes int64) error {
	s, err := readSuper(dev)
	if err != nil || s.bytes >= bytes || s.fs == "ext4" && nearlyFull(bytes, s.bytes) {
		return err
	}
	if s.fs == "ext4" && !capable(unix.CAP_SYS_RESOURCE) {
		return status.Error(codes.FailedPrecondition, "the kernel enlarges a mounted ext4 only with CAP_SYS_RESOURCE, which "+
			"loopfs lacks; unstage the volume and stage it again, which enlarges it")
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &st); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	count := uint64(bytes / st.Bsize)
	request, argument := uintptr(extGrow), unsafe.Pointer(&count)
	if s.fs == "xfs" {
		request, argument = xfsGrow, unsafe.Pointer(&xfsGrowth{blocks: count, imaxpc: uint32(s.imaxpc)})
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, root.Fd(), request, uintptr(argument)); errno != 0 {
		return fmt.Errorf("enlarge %s to %d blocks: %w", s.fs, count, errno)
	}
	return nil
}

func (l loop) Expand(id ID, raw bool) error {
	err := l.each(id, func(dev *os.File, _ *unix.LoopInfo64) error {
		if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
			return fmt.Errorf("resize %s: %w", dev.Name(), err)
		}
		return nil
	})
	if err != nil || raw {
		return err
	}
	return l.mountedRoot(id, func(root, dev *os.File) error {
		size, err := l.Size(id)
		if err != nil {
			return err
		}
		return growFS(root, dev, size)
	})
}

// mountedRoot calls do with the root directory and the device of a mounted volume. It uses another mount, as the paths
// of the first may be those of another namespace.
func (l loop) mountedRoot(id ID, do func(root, dev *os.File) error) error {
	path, err := l.Device(id, false)
	if err != nil {
		return err
	}
	if path == "" {
		return status.Errorf(codes.FailedPrecondition, "volume %s is not mounted", id)
	}
	dev, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open the device: %w", err)
	}
	defer dev.Close()
	s, err := readSuper(dev)
	if err != nil {
		return err
	}
	tree, err := mount.Device(path, s.fs, mount.Flags{})
	if err != nil {
		return err
	}
	defer tree.Close()
	root, err := tree.Root()
	if err != nil {
		return err
	}
	defer root.Close()
	return do(root, dev)
}

func (l loop) Freeze(id ID) error {
	return l.mountedRoot(id, func(root, _ *os.File) error {
		if err := unix.IoctlSetInt(int(root.Fd()), fiFreeze, 0); err != nil {
			return fmt.Errorf("freeze volume %s: %w", id, err)
		}
		return nil
	})
}

func (l loop) Thaw(id ID) error {
	if err := possible(id); err != nil {
		return err
	}
	if user, err := l.HeldBy(id); user == "" || err != nil {
		return err
	}
	return l.mountedRoot(id, func(root, _ *os.File) error {
		if err := unix.IoctlSetInt(int(root.Fd()), fiThaw, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("thaw volume %s: %w", id, err)
		}
		return nil
	})
}

// Shows compares device numbers: that of the mounted file system, or that of the mounted device node.
func (l loop) Shows(m mounttable.Mount, id ID) (bool, error) {
	file, shown := unix.Mkdev(uint32(m.Major), uint32(m.Minor)), false
	if n, err := mounttable.NumberOf(m.Point); err == nil && n.Block {
		file = unix.Mkdev(n.Major, n.Minor)
	}
	err := l.each(id, func(dev *os.File, _ *unix.LoopInfo64) error {
		var st unix.Stat_t
		err := unix.Fstat(int(dev.Fd()), &st)
		shown = shown || st.Rdev == file
		return err
	})
	return shown, err
}

func (l loop) Stats(_ Record, at string) (bytes, inodes *csi.VolumeUsage, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		return nil, nil, fmt.Errorf("statfs %s: %w", at, err)
	}
	size := func(blocks uint64) int64 { return int64(blocks) * st.Bsize }
	return &csi.VolumeUsage{Unit: csi.VolumeUsage_BYTES, Total: size(st.Blocks), Used: size(st.Blocks - st.Bfree),
			Available: size(st.Bavail)},
		&csi.VolumeUsage{Unit: csi.VolumeUsage_INODES, Total: int64(st.Files), Used: int64(st.Files - st.Ffree),
			Available: int64(st.Ffree)}, nil
}
