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
	"strings"

	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/mount"
)

// loop keeps a volume as a sparse image of an ext4 file system and shows it on a loop device.
//
// The kernel frees a device by itself when nothing uses it any more (LO_FLAGS_AUTOCLEAR): a kill between attaching and
// mounting leaks nothing, and unmounting is all there is to detaching.
type loop struct{ store *Store }

func imageName(id ID) string { return "images/" + string(id) + ".img" }

// Make writes a new file every time: a mkfs that outlived a killed loopfs still writes to the old one, which has no name.
func (l *loop) Make(ctx context.Context, id ID, size int64) error {
	part := imageName(id) + ".part"
	if err := l.store.erase(part, imageName(id)); err != nil {
		return err
	}
	f, err := l.store.root.OpenFile(part, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("make the image: %w", err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		return fmt.Errorf("size the image: %w", err)
	}
	if err := format(ctx, f); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync the image: %w", err)
	}
	if err := l.store.root.Rename(part, imageName(id)); err != nil {
		return fmt.Errorf("name the image: %w", err)
	}
	return l.store.syncDir("images")
}

// format gives mkfs the open file, not its name.
func format(ctx context.Context, image *os.File) error {
	cmd := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-m", "0", "/proc/self/fd/3")
	cmd.ExtraFiles = []*os.File{image}
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("mkfs.ext4: %w", context.Cause(ctx))
	}
	if err != nil {
		return fmt.Errorf("mkfs.ext4: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

func (l *loop) Remove(id ID) error { return l.store.erase(imageName(id)+".part", imageName(id)) }

func (l *loop) Mount(id ID, at mount.Place, flags mount.Flags) error {
	dev, err := l.attach(id)
	if err != nil {
		return err
	}
	defer dev.Close() // the mount keeps the device; without one this frees it
	if err := at.MountDevice(dev.Name(), "ext4", flags); err != nil {
		if errors.Is(err, unix.EINVAL) {
			return Errorf(ErrInvalid, "ext4 refuses the volume or its mount flags: %w", err)
		}
		return err
	}
	return nil
}

// attach opens the loop device of the volume's image. There is never a second device over one image: two ext4 over the same
// bytes would destroy them.
func (l *loop) attach(id ID) (*os.File, error) {
	if err := LoopPossible(); err != nil {
		return nil, Errorf(ErrUnavailable, "volume %s needs a loop device: %w", id, err)
	}
	image, err := l.store.root.OpenFile(imageName(id), os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open the image: %w", err)
	}
	defer image.Close()
	if dev, err := l.deviceOf(id); dev != nil || err != nil {
		return dev, err
	}
	for range 64 { // somebody else may take the free device between the two calls
		dev, err := freeLoop()
		if err != nil {
			return nil, err
		}
		cfg := unix.LoopConfig{Fd: uint32(image.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
		copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], id)
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &cfg)
		if err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("set up %s: %w", dev.Name(), err)
		}
	}
	return nil, Errorf(ErrFull, "every free loop device was taken by somebody else at once")
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
	dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open the free loop device: %w", err)
	}
	return dev, nil
}

// deviceOf opens the loop device that has the volume's image, or returns nil. An open device is not freed.
func (l *loop) deviceOf(id ID) (*os.File, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, fmt.Errorf("list the loop devices: %w", err)
	}
	for _, file := range files {
		name, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(name), string(id)) { // freed meanwhile, or somebody else's
			continue
		}
		dev, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(filepath.Dir(file))), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("open a loop device: %w", err)
		}
		ours, err := l.backs(dev, id)
		if ours {
			return dev, nil
		}
		dev.Close()
		if err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// backs says whether that device is over the volume's image, by device and inode number: names differ between namespaces.
func (l *loop) backs(dev *os.File, id ID) (bool, error) {
	info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
	if errors.Is(err, unix.ENXIO) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("ask %s for its file: %w", dev.Name(), err)
	}
	st, err := l.store.root.Stat(imageName(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at the image: %w", err)
	}
	return sameFile(st, info), nil
}

func (l *loop) Shows(_ mount.Table, e *mount.Entry, id ID) (bool, error) {
	if e.Major != loopMajor {
		return false, nil
	}
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", e.Major, e.Minor))
	if err != nil {
		return false, fmt.Errorf("find the loop device of %s: %w", e.Mountpoint, err)
	}
	dev, err := os.Open("/dev/" + filepath.Base(link))
	if err != nil {
		return false, fmt.Errorf("open the loop device of %s: %w", e.Mountpoint, err)
	}
	defer dev.Close()
	return l.backs(dev, id)
}

func (l *loop) HeldBy(id ID) (string, error) {
	dev, err := l.deviceOf(id)
	if dev == nil || err != nil {
		return "", err
	}
	defer dev.Close()
	return dev.Name(), nil
}
