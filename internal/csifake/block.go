package csifake

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// BlockKind says what is bound at the target of a block volume.
type BlockKind string

const (
	// BlockLoop is a loop device over a sparse file in DataDir, as large as the volume. It outlives the plugin.
	BlockLoop BlockKind = "loop"
	BlockNode BlockKind = "node" // /dev/null, for machines without loop devices
	BlockFile BlockKind = "file" // a regular file of 1 MiB in DataDir, which a plugin must not use
)

func (c Config) blockKind() BlockKind {
	if c.Block != "" {
		return c.Block
	}
	if _, err := os.Stat("/dev/loop-control"); c.DataDir == "" || err != nil ||
		unix.Access("/dev/loop-control", unix.W_OK) != nil {
		return BlockNode
	}
	return BlockLoop
}

// mountBlock binds the device of a block volume.
func (w work) mountBlock(at string) error {
	kind := w.p.cfg.blockKind()
	if kind == BlockNode {
		return bind("/dev/null", at)
	}
	if w.p.cfg.DataDir == "" {
		return invalid("this plugin has no data directory, so no block volumes of kind %s", kind)
	}
	file := w.p.data(w.volume) + ".block"
	size := int64(1 << 20)
	if kind == BlockLoop {
		size = w.p.cfg.Backend.size(w.volume)
	}
	if err := sparse(file, size); err != nil {
		return err
	}
	if kind == BlockFile {
		return bind(file, at)
	}
	device, err := w.p.cfg.Backend.device(w.volume, w.p.cfg.NodeID)
	if err != nil {
		return err
	}
	if device == "" || !loopOf(device, file) {
		if device, err = attachLoop(file); err != nil {
			return err
		}
		if err := w.p.cfg.Backend.setDevice(w.volume, w.p.cfg.NodeID, device); err != nil {
			return errors.Join(err, detachLoop(device))
		}
	}
	return bind(device, at)
}

// freeBlock detaches the loop device of a volume that is no longer published.
func (w work) freeBlock() error {
	device, err := w.p.cfg.Backend.device(w.volume, w.p.cfg.NodeID)
	if err != nil || device == "" {
		return err
	}
	if loopOf(device, w.p.data(w.volume)+".block") {
		if err := detachLoop(device); err != nil {
			return err
		}
	}
	return w.p.cfg.Backend.setDevice(w.volume, w.p.cfg.NodeID, "")
}

// sparse makes a sparse file, or enlarges it.
func sparse(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err == nil && st.Size() < size {
		err = f.Truncate(size)
	}
	return err
}

// attachLoop finds a free loop device and attaches a file to it. It retries for a while, because other processes may
// take the device first.
func attachLoop(file string) (device string, err error) {
	backing, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer backing.Close()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		if device, err = freeLoop(); err != nil {
			return "", err
		}
		if err = configureLoop(device, backing); !errors.Is(err, unix.EBUSY) {
			return device, failed("attach", device, err)
		}
	}
	return "", failed("attach", device, err)
}

func freeLoop() (string, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer control.Close()
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	return fmt.Sprintf("/dev/loop%d", n), failed("find a free device at", "/dev/loop-control", err)
}

func configureLoop(device string, backing *os.File) error {
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.IoctlLoopConfigure(int(f.Fd()), &unix.LoopConfig{Fd: uint32(backing.Fd())})
}

// loopOf reports whether a loop device is attached to this file.
func loopOf(device, file string) bool {
	f, err := os.OpenFile(device, os.O_RDONLY, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	var st unix.Stat_t
	return err == nil && unix.Stat(file, &st) == nil && info.Inode == st.Ino && info.Device == st.Dev
}

// FreeLoops detaches all loop devices over files below a directory, for tests that end with a published block volume.
// Such a device outlives its plugin and its file. Start calls FreeLoops for its DataDir.
func FreeLoops(dir string) error {
	backed, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	var errs []error
	for _, at := range backed {
		if file, err := os.ReadFile(at); err == nil && strings.HasPrefix(string(file), filepath.Clean(dir)+"/") {
			errs = append(errs, detachLoop("/dev/"+strings.Split(at, "/")[3]))
		}
	}
	return errors.Join(errs...)
}

func detachLoop(device string) error {
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = unix.IoctlRetInt(int(f.Fd()), unix.LOOP_CLR_FD)
	return failed("detach", device, err)
}
