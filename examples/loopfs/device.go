package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// An image never has two writable devices: two file systems on the same bytes would destroy them.
//
// The kernel frees the device of a mounted volume at its last use (LO_FLAGS_AUTOCLEAR). So a kill between attaching and
// mounting leaks nothing, and an unmount detaches. The devices of a block volume stay until detach, also while they are
// not open. Read-only publishes use another, read-only device. It has its own cache: to see what a writer writes
// meanwhile, a reader needs O_DIRECT.

// each calls do with each device of the volume's image. The kernel does not free an open device.
func (l loop) each(do func(dev *os.File, info *unix.LoopInfo64) error) error {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, file := range files {
		name, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(name), string(l.ID)) { // freed meanwhile, or of another image
			continue
		}
		err = onFile("/dev/"+filepath.Base(filepath.Dir(filepath.Dir(file))), func(dev *os.File) error {
			info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
			if errors.Is(err, unix.ENXIO) {
				return nil
			}
			var st unix.Stat_t
			if err == nil {
				err = unix.Stat(l.image(), &st)
			}
			if errors.Is(err, unix.ENOENT) || err == nil && (st.Dev != info.Device || st.Ino != info.Inode) {
				return nil // names differ between namespaces
			}
			if err != nil {
				return fmt.Errorf("read the status of %s: %w", dev.Name(), err)
			}
			return do(dev, info)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// attach opens the read-only or the writable device. It makes one if there is none.
func (l loop) attach(readOnly bool, flags uint32) (*os.File, error) {
	var open *os.File
	err := l.each(func(dev *os.File, info *unix.LoopInfo64) (err error) {
		if open == nil && readOnly == (info.Flags&unix.LO_FLAGS_READ_ONLY != 0) {
			open, err = os.Open(dev.Name()) // it cannot become another device meanwhile: dev is open
		}
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

// heldBy returns a device that the kernel has of the volume, or an empty string.
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

// size returns the size of the volume's devices in bytes.
func (l loop) size() (size int64, err error) {
	err = l.each(func(dev *os.File, _ *unix.LoopInfo64) (err error) {
		size, err = dev.Seek(0, io.SeekEnd)
		return err
	})
	return size, err
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
