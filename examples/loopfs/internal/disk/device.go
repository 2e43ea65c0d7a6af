package disk

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// An image never has two writable devices: two file systems on the same bytes would destroy them.
//
// The kernel frees the device of a mounted volume at its last use (LO_FLAGS_AUTOCLEAR). So a kill between attaching and
// mounting leaks nothing, and an unmount detaches. The devices of a raw volume stay until Detach, also while they are
// not open. Read-only publishes use another, read-only device. It has its own cache: to see what a writer writes
// meanwhile, a reader needs O_DIRECT.

// each calls do with each device of the volume's image. The kernel does not free an open device.
func (l loop) each(id ID, do func(dev *os.File, info *unix.LoopInfo64) error) error {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return fmt.Errorf("list the loop devices: %w", err)
	}
	for _, file := range files {
		name, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(name), string(id)) { // freed meanwhile, or of another image
			continue
		}
		if err := l.visit("/dev/"+filepath.Base(filepath.Dir(filepath.Dir(file))), id, do); err != nil {
			return err
		}
	}
	return nil
}

func (l loop) visit(path string, id ID, do func(dev *os.File, info *unix.LoopInfo64) error) error {
	dev, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open a loop device: %w", err)
	}
	defer dev.Close()
	info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
	if errors.Is(err, unix.ENXIO) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the status of %s: %w", path, err)
	}
	st, err := l.root.Stat(imageName(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("stat the image: %w", err)
	}
	// names differ between namespaces
	if sys, ok := st.Sys().(*syscall.Stat_t); !ok || sys.Dev != info.Device || sys.Ino != info.Inode {
		return nil
	}
	return do(dev, info)
}

// deviceKind is the mask of the flags in which devices of one image differ.
const deviceKind = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_READ_ONLY

// attach opens the device of that kind. It makes one if there is none.
func (l loop) attach(id ID, kind uint32) (*os.File, error) {
	if err := possible(id); err != nil {
		return nil, err
	}
	var open *os.File
	err := l.each(id, func(dev *os.File, info *unix.LoopInfo64) (err error) {
		switch {
		case info.Flags&deviceKind == kind && open == nil:
			open, err = os.Open(dev.Name()) // it cannot become another device meanwhile: dev is open
		case info.Flags&deviceKind != kind && (info.Flags|kind)&unix.LO_FLAGS_READ_ONLY == 0:
			err = status.Errorf(codes.FailedPrecondition, "%s is still attached to volume %s by another use; detach it: "+
				"losetup -d %s", dev.Name(), id, dev.Name())
		}
		return err
	})
	if err != nil && open != nil {
		open.Close()
	}
	if err != nil || open != nil {
		return open, err
	}
	mode := os.O_RDWR
	if kind&unix.LO_FLAGS_READ_ONLY != 0 {
		mode = os.O_RDONLY
	}
	image, err := l.image(id, mode)
	if err != nil {
		return nil, err
	}
	defer image.Close()
	return configure(image, id, kind)
}

func configure(image *os.File, id ID, flags uint32) (*os.File, error) {
	cfg := unix.LoopConfig{Fd: uint32(image.Fd()), Info: unix.LoopInfo64{Flags: flags}}
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], id)
	for range 64 { // another process may take the free device between the two calls
		dev, err := freeLoop()
		if err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &cfg)
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

func freeLoop() (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("find a free loop device: %w", err)
	}
	defer control.Close()
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return nil, fmt.Errorf("find a free loop device: %w", err)
	}
	return os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
}

func (l loop) Attach(r Record, readOnly bool) (string, error) {
	if err := l.Grow(r.ID, r.Bytes); err != nil { // a kill may have prevented it
		return "", err
	}
	var flags uint32
	if readOnly {
		flags = unix.LO_FLAGS_READ_ONLY
	}
	dev, err := l.attach(r.ID, flags)
	if err != nil {
		return "", err
	}
	return dev.Name(), errors.Join(dev.Close(), l.SetReadAhead(r.ID, r.ReadAhead))
}

func (l loop) HeldBy(id ID) (name string, err error) {
	err = l.each(id, func(dev *os.File, _ *unix.LoopInfo64) error {
		name = dev.Name()
		return nil
	})
	return name, err
}

func (l loop) Device(id ID, readOnly bool) (string, error) {
	var path string
	err := l.each(id, func(dev *os.File, info *unix.LoopInfo64) error {
		if readOnly == (info.Flags&unix.LO_FLAGS_READ_ONLY != 0) {
			path = dev.Name()
		}
		return nil
	})
	return path, err
}

func (l loop) Size(id ID) (int64, error) {
	var size int64
	err := l.each(id, func(dev *os.File, _ *unix.LoopInfo64) (err error) {
		size, err = dev.Seek(0, io.SeekEnd)
		return err
	})
	return size, err
}

func (l loop) SetReadAhead(id ID, kib int64) error {
	if kib == 0 {
		return nil
	}
	return l.each(id, func(dev *os.File, _ *unix.LoopInfo64) error {
		if err := unix.IoctlSetInt(int(dev.Fd()), unix.BLKRASET, int(kib*2)); err != nil { // in sectors
			return fmt.Errorf("set the read-ahead of %s: %w", dev.Name(), err)
		}
		return nil
	})
}

// Detach detaches all devices. The kernel frees a device that is open at its last close.
func (l loop) Detach(id ID) error {
	return l.each(id, func(dev *os.File, _ *unix.LoopInfo64) error {
		if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
			return fmt.Errorf("detach %s: %w", dev.Name(), err)
		}
		return nil
	})
}

// flush writes the caches of the volume's devices to the image.
func (l loop) flush(id ID) error {
	return l.each(id, func(dev *os.File, info *unix.LoopInfo64) error {
		if info.Flags&unix.LO_FLAGS_READ_ONLY != 0 {
			return nil
		}
		if err := dev.Sync(); err != nil {
			return fmt.Errorf("sync %s: %w", dev.Name(), err)
		}
		return nil
	})
}
