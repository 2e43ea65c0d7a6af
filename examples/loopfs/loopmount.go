package main

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

func (l loop) mount(ctx context.Context, s store, at string, flags mount.Flags) error {
	if l.Usage.Block {
		_, err := l.attachBlock(l.stagedReadOnly())
		return err
	}
	if err := l.growUnmounted(ctx, s); err != nil {
		return fmt.Errorf("enlarge the file system: %w", err)
	}
	dev, err := l.attach(false, unix.LO_FLAGS_AUTOCLEAR)
	if err != nil {
		return err
	}
	defer dev.Close() // the mount keeps the device; without one this frees it
	err = mount.Device(dev.Name(), at, flags)
	if errors.Is(err, unix.EINVAL) {
		return status.Errorf(codes.InvalidArgument, "ext4 refuses the volume or its mount flags: %v", err)
	}
	return errors.Join(err, l.setReadAhead())
}

// Requests to ioctl(2), for an open directory of a mounted file system.
const (
	fiFreeze = 0xC0045877 // FIFREEZE
	fiThaw   = 0xC0045878 // FITHAW
	extGrow  = 0x40086610 // EXT4_IOC_RESIZE_FS: the number of blocks
)

func (l loop) expand(at string) error {
	if err := l.ioctl("resize", unix.LOOP_SET_CAPACITY, 0); err != nil || l.Usage.Block {
		return err
	}
	if s, err := l.readSuper(); err != nil || nearlyFull(l.Bytes, s.bytes) {
		return err
	}
	return onFile(at, func(root *os.File) error {
		var st unix.Statfs_t
		if err := unix.Fstatfs(int(root.Fd()), &st); err != nil {
			return err
		}
		count := uint64(l.Bytes / st.Bsize) // the kernel does it in transactions, so a kill does no harm
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, root.Fd(), extGrow, uintptr(unsafe.Pointer(&count)))
		if errno == unix.EPERM {
			return status.Error(codes.FailedPrecondition, "the kernel enlarges a mounted ext4 only with CAP_SYS_RESOURCE, "+
				"which loopfs lacks; unstage the volume and stage it again, which enlarges it")
		}
		if errno != 0 {
			return fmt.Errorf("enlarge the file system to %d blocks: %w", count, errno)
		}
		return nil
	})
}

// freeze brings the mounted file system to a state that needs no repair, and blocks writes until thaw, also beyond the
// end of this process.
func (l loop) freeze(at string) error {
	return onFile(at, func(root *os.File) error {
		if err := unix.IoctlSetInt(int(root.Fd()), fiFreeze, 0); err != nil {
			return fmt.Errorf("freeze volume %s: %w", l.ID, err)
		}
		return nil
	})
}

// thaw ends a freeze. That nothing is frozen is no error.
func (l loop) thaw(at string) error {
	return onFile(at, func(root *os.File) error {
		if err := unix.IoctlSetInt(int(root.Fd()), fiThaw, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("thaw volume %s: %w", l.ID, err)
		}
		return nil
	})
}

// shows compares device numbers: that of the mounted file system, or that of the mounted device node.
func (l loop) shows(m mounttable.Mount) (shown bool, err error) {
	file := unix.Mkdev(uint32(m.Major), uint32(m.Minor))
	if n, err := mounttable.NumberOf(m.Point); err == nil && n.Block {
		file = unix.Mkdev(n.Major, n.Minor)
	}
	err = l.each(func(dev *os.File, _ *unix.LoopInfo64) error {
		var st unix.Stat_t
		err := unix.Fstat(int(dev.Fd()), &st)
		shown = shown || st.Rdev == file
		return err
	})
	return shown, err
}

func (l loop) stats(at string) ([]*csi.VolumeUsage, error) {
	if l.Usage.Block {
		size, err := l.size()
		return []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: size}}, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		return nil, fmt.Errorf("statfs %s: %w", at, err)
	}
	size := func(blocks uint64) int64 { return int64(blocks) * st.Bsize }
	return []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: size(st.Blocks), Used: size(st.Blocks - st.Bfree), Available: size(st.Bavail)},
		{Unit: csi.VolumeUsage_INODES, Total: int64(st.Files), Used: int64(st.Files - st.Ffree),
			Available: int64(st.Ffree)},
	}, nil
}
