package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/mount"
)

// loop keeps a volume as a sparse image, and attaches it to loop devices.
type loop struct {
	record
	dir string
}

func (l loop) image() string { return filepath.Join(l.dir, "image") }

// make makes the image, with a file system unless the volume is a block device.
func (l loop) make(ctx context.Context) error {
	if err := os.WriteFile(l.image(), nil, 0o600); err != nil {
		return err
	}
	if err := l.grow(); err != nil || l.Usage.Block {
		return err
	}
	return errors.Join(tool(ctx, 0, "mkfs.ext4", "-q", "-F", "-m", "0", l.image()), l.sync())
}

func (l loop) copyFrom(ctx context.Context, source backend) error {
	if err := cp(ctx, source.(loop).image(), l.image()); err != nil {
		return err
	}
	return errors.Join(l.grow(), l.sync())
}

// cp copies a file or a directory: by reflink where the file system has them, else without writing its zeros.
func cp(ctx context.Context, from, to string) error {
	return tool(ctx, 0, "cp", "-a", "-x", "--reflink=auto", "--sparse=always", "-T", from, to)
}

// grow enlarges the image, if it is smaller than the volume.
func (l loop) grow() error {
	st, err := os.Stat(l.image())
	if err == nil && st.Size() < l.Bytes {
		err = errors.Join(os.Truncate(l.image(), l.Bytes), l.sync())
	}
	return err
}

func (l loop) sync() error { return onFile(l.image(), (*os.File).Sync) }

// onFile calls do with an open file or directory.
func onFile(name string, do func(f *os.File) error) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return do(f)
}

// growUnmounted enlarges the file system in an image that is not in use. It works on a copy, as resize2fs must not be
// killed.
func (l loop) growUnmounted(ctx context.Context, s store) error {
	if size, _, err := l.readSuper(); err != nil || nearlyFull(l.Bytes, size) {
		return err
	}
	if user, err := l.heldBy(); err != nil || user != "" {
		return err // another namespace has it mounted: the copy would lose what is written there
	}
	return s.temporary(l.ID, func(dir string) error {
		part := loop{record: l.record, dir: dir}
		if err := part.copyFrom(ctx, l); err != nil {
			return err
		}
		if err := tool(ctx, 1, "e2fsck", "-f", "-p", part.image()); err != nil {
			return err
		}
		if err := tool(ctx, 0, "resize2fs", "-f", part.image()); err != nil {
			return err
		}
		return errors.Join(part.sync(), rename(part.image(), l.image()))
	})
}

// nearlyFull reports whether an ext4 may be as large as possible: ext4 omits a last group that has too few blocks for
// its own tables.
func nearlyFull(size, fs int64) bool { return size-fs < min(size/32, 8<<20) }

// tool runs a program. Exit codes up to most are success. The error is ENOSPC if its output says so. A program that
// outlives a killed loopfs works in a directory that is never used again, see store.temporary.
func tool(ctx context.Context, most int, command ...string) error {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return status.Errorf(codes.FailedPrecondition, "install %s (e2fsprogs, coreutils): %v", command[0], err)
	}
	cmd := exec.CommandContext(ctx, path, command[1:]...)
	cmd.Env = append(os.Environ(), "LC_ALL=C") // for the words of ENOSPC
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", command[0], context.Cause(ctx))
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() && exit.ExitCode() <= most {
		return nil
	}
	if err != nil && bytes.Contains(out, []byte("No space left on device")) {
		err = unix.ENOSPC
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", command[0], err, bytes.TrimSpace(out))
	}
	return nil
}

// readSuper reads the superblock of an ext4 (kernel documentation, filesystems/ext4/super): its size, which is 0 if
// there is no superblock, and whether the kernel found errors.
func (l loop) readSuper() (size int64, damaged bool, err error) {
	b := make([]byte, 1024)
	if err := onFile(l.image(), func(f *os.File) error { return readFull(f, b, 1024) }); err != nil {
		return 0, false, fmt.Errorf("read the superblock: %w", err)
	}
	if binary.LittleEndian.Uint16(b[56:]) != 0xEF53 {
		return 0, false, nil
	}
	count := uint64(binary.LittleEndian.Uint32(b[4:]))
	if binary.LittleEndian.Uint32(b[96:])&0x80 != 0 { // 64bit
		count |= uint64(binary.LittleEndian.Uint32(b[336:])) << 32
	}
	size = int64(count << (10 + binary.LittleEndian.Uint32(b[24:])&31))
	return size, binary.LittleEndian.Uint16(b[58:])&2 != 0, nil
}

func (l loop) mount(ctx context.Context, s store) error {
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
	return errors.Join(mountExt4(dev.Name(), l.Stage.Path, l.Stage.flags()), l.setReadAhead())
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
	if size, _, err := l.readSuper(); err != nil || nearlyFull(l.Bytes, size) {
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
			return status.Error(codes.FailedPrecondition, "the kernel enlarges a mounted ext4 only with "+
				"CAP_SYS_RESOURCE, which loopfs lacks; unstage the volume and stage it again, which enlarges it")
		}
		if errno != 0 {
			return fmt.Errorf("enlarge the file system to %d blocks: %w", count, errno)
		}
		return nil
	})
}

// freeze brings the staged file system to a state that needs no repair, and blocks writes until thaw, also beyond the
// end of this process.
func (l loop) freeze() error {
	return onFile(l.Stage.Path, func(root *os.File) error { return unix.IoctlSetInt(int(root.Fd()), fiFreeze, 0) })
}

// thaw ends a freeze. It is no error if nothing is frozen.
func (l loop) thaw() error {
	err := onFile(l.Stage.Path, func(root *os.File) error { return unix.IoctlSetInt(int(root.Fd()), fiThaw, 0) })
	if errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// shows compares device numbers: that of the mounted file system, or that of the mounted device node.
func (l loop) shows(m mount.Mount) (shown bool, err error) {
	file := unix.Mkdev(uint32(m.Major), uint32(m.Minor))
	if n, err := mount.NumberOf(m.Point); err == nil && n.Block {
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
		return []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: l.Bytes}}, nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		return nil, fmt.Errorf("statfs %s: %w", at, err)
	}
	size := func(blocks uint64) int64 { return int64(blocks) * st.Bsize }
	return []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: size(st.Blocks), Used: size(st.Blocks - st.Bfree),
			Available: size(st.Bavail)},
		{Unit: csi.VolumeUsage_INODES, Total: int64(st.Files), Used: int64(st.Files - st.Ffree),
			Available: int64(st.Ffree)},
	}, nil
}

// An image never has two writable devices: two file systems on the same bytes would destroy them.
//
// The kernel frees the device of a mounted volume at its last use (LO_FLAGS_AUTOCLEAR). So a kill between attaching and
// mounting leaks nothing, and an unmount detaches. The devices of a block volume stay until detach, also while they are
// not open. Read-only publishes use another, read-only device. It has its own cache: to see what a writer writes
// meanwhile, a reader needs O_DIRECT.

// each calls do with each device of the volume's image. The kernel does not free an open device.
func (l loop) each(do func(dev *os.File, info *unix.LoopInfo64) error) error {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file") // its only error is a bad pattern
	for _, file := range files {
		name, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(name), string(l.ID)) {
			continue
		}
		err = onFile("/dev/"+filepath.Base(filepath.Dir(filepath.Dir(file))), func(dev *os.File) error {
			info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
			var st unix.Stat_t
			if err == nil {
				err = unix.Stat(l.image(), &st)
			}
			if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOENT) ||
				err == nil && (st.Dev != info.Device || st.Ino != info.Inode) {
				return nil // freed meanwhile, or of another image: names differ between namespaces
			}
			if err != nil {
				return fmt.Errorf("read the status of %s: %w", dev.Name(), err)
			}
			return do(dev, info)
		})
		var open *os.PathError
		if errors.As(err, &open) && open.Op == "open" && errors.Is(err, unix.ENXIO) {
			continue // it is being freed
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// attach opens the read-only or the writable device. If there is none, it makes one with the flags. If detach has set
// LO_FLAGS_AUTOCLEAR on a device that was still open, attach clears it again, unless flags has it.
func (l loop) attach(readOnly bool, flags uint32) (*os.File, error) {
	var open *os.File
	err := l.each(func(dev *os.File, info *unix.LoopInfo64) (err error) {
		if open != nil || readOnly != (info.Flags&unix.LO_FLAGS_READ_ONLY != 0) {
			return nil
		}
		if released := info.Flags & unix.LO_FLAGS_AUTOCLEAR; released&^flags != 0 {
			info.Flags &^= released
			if err := unix.IoctlLoopSetStatus64(int(dev.Fd()), info); err != nil {
				return fmt.Errorf("keep %s: %w", dev.Name(), err)
			}
		}
		open, err = os.Open(dev.Name()) // it cannot become another device meanwhile: dev is open
		return err
	})
	if err != nil || open != nil {
		return open, err
	}
	how := os.O_RDWR
	if readOnly {
		how, flags = os.O_RDONLY, flags|unix.LO_FLAGS_READ_ONLY
	}
	image, err := os.OpenFile(l.image(), how, 0)
	if err != nil {
		return nil, err
	}
	defer image.Close()
	cfg := unix.LoopConfig{Fd: uint32(image.Fd()), Info: unix.LoopInfo64{Flags: flags}}
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], l.ID)
	return configure(&cfg)
}

func configure(cfg *unix.LoopConfig) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("find a free loop device: %w", err)
	}
	defer control.Close()
	for range 64 { // another process may take the free device between the two calls
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(dev.Fd()), cfg)
		if err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("set up %s: %w", dev.Name(), err)
		}
	}
	return nil, status.Error(codes.ResourceExhausted, "other processes took every free loop device")
}

// attachBlock returns the path of a block volume's device, which stays until detach.
func (l loop) attachBlock(readOnly bool) (string, error) {
	dev, err := l.attach(readOnly, 0)
	if err != nil {
		return "", err
	}
	return dev.Name(), errors.Join(dev.Close(), l.setReadAhead())
}

func (l loop) heldBy() (name string, err error) {
	err = l.each(func(dev *os.File, _ *unix.LoopInfo64) error {
		name = dev.Name()
		return nil
	})
	return name, err
}

// attached reports whether the volume has the read-only or the writable device.
func (l loop) attached(readOnly bool) (found bool, err error) {
	err = l.each(func(_ *os.File, info *unix.LoopInfo64) error {
		found = found || readOnly == (info.Flags&unix.LO_FLAGS_READ_ONLY != 0)
		return nil
	})
	return found, err
}

// setReadAhead sets how much the kernel reads ahead from the volume's devices.
func (l loop) setReadAhead() error {
	if l.ReadAhead == 0 {
		return nil
	}
	return l.ioctl("set the read-ahead of", unix.BLKRASET, int(l.ReadAhead*2)) // in sectors
}

// detach detaches all devices. The kernel frees a device that is open at its last close.
func (l loop) detach() error { return l.ioctl("detach", unix.LOOP_CLR_FD, 0) }

// ioctl makes a request to each device.
func (l loop) ioctl(what string, request uint, value int) error {
	return l.each(func(dev *os.File, _ *unix.LoopInfo64) error {
		if err := unix.IoctlSetInt(int(dev.Fd()), request, value); err != nil {
			return fmt.Errorf("%s %s: %w", what, dev.Name(), err)
		}
		return nil
	})
}
