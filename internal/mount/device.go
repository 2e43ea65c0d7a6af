package mount

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// ErrNoDevice means that the file at a path is neither a block nor a character device.
var ErrNoDevice = errors.New("not a device node")

// Device shows a device of the host in the space, as a new node. The node may have another owner and mode, and a nodev
// flag of the source's mount has no effect on it. Where the kernel refuses to make nodes (in a user namespace), the
// host's node is bound, with its owner and mode.
type Device struct {
	Source   string // absolute, on the host
	Target   string // absolute, in the space; made if it does not exist
	UID      int    // owner; the group is that of the source
	ReadOnly bool   // no write permission. Only a device cgroup can also keep root from writing
}

func (d Device) target() string { return d.Target }

func (d Device) mount(t *tree) error {
	return Bind{Source: d.Source, Target: d.Target, ReadOnly: d.ReadOnly}.mount(t)
}

// makeDevices makes the nodes of the devices in a tmpfs, clones each node, and unmounts the tmpfs.
func (t *tree) makeDevices(layers []Layer, scratch string) error {
	var devices []Device
	for _, l := range layers {
		if d, is := l.(Device); is {
			devices = append(devices, d)
		}
	}
	if len(devices) == 0 {
		return nil
	}
	if err := unix.Mount("tmpfs", scratch, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "size=64k,mode=700"); err != nil {
		return fmt.Errorf("mount a tmpfs for device nodes: %w", err)
	}
	defer func() { _ = unix.Unmount(scratch, unix.MNT_DETACH) }() // only this thread sees it
	for i, d := range devices {
		if _, twice := t.sources[d.Target]; twice {
			return fmt.Errorf("device %s: %s is the target of two binds", d.Source, d.Target)
		}
		fd, err := d.open(filepath.Join(scratch, strconv.Itoa(i)))
		if err != nil {
			return fmt.Errorf("device %s: %w", d.Source, err)
		}
		t.sources[d.Target] = fd
	}
	return nil
}

// open returns a detached clone of a new node at path. If no node can be made, it is a clone of the source.
func (d Device) open(path string) (int, error) {
	source, err := unix.Open(d.Source, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(source)
	st, err := deviceStat(source)
	if err != nil {
		return -1, err
	}
	err = makeNode(path, st, d.UID, d.mode(uint32(st.Mode)))
	if errors.Is(err, unix.EPERM) {
		return clone(procFD(source), 0)
	}
	if err != nil {
		return -1, err
	}
	return clone(path, 0)
}

// mode returns the mode of the source, with access for the owner. If ReadOnly is set, it has no write access.
func (d Device) mode(source uint32) uint32 {
	if d.ReadOnly {
		return source&0o555 | 0o400
	}
	return source&0o777 | 0o600
}

// attachCopied mounts an entry of the host's directory dir in the copy of dir. /dev/ptmx looks for terminals in its own
// directory, which does not work through a bind, so attachCopied makes the node again. Where the kernel refuses that,
// it binds the node, which then does not work in the task.
func (t *tree) attachCopied(fd int, dir, at string) error {
	if st, err := deviceStat(fd); err == nil && dir == "/dev" && filepath.Base(at) == "ptmx" {
		if err := makeNode(at, st, int(st.Uid), uint32(st.Mode)&0o777); !errors.Is(err, unix.EPERM) {
			return err
		}
	}
	return attachTree(fd, at)
}

// makeNode makes a new node for a device. EPERM means that no node was made.
func makeNode(at string, of unix.Statx_t, uid int, mode uint32) error {
	if err := unix.Mknod(at, uint32(of.Mode)&unix.S_IFMT|mode,
		int(unix.Mkdev(of.Rdev_major, of.Rdev_minor))); err != nil {
		return fmt.Errorf("make the node %s: %w", at, err)
	}
	if err := errors.Join(unix.Chown(at, uid, int(of.Gid)), unix.Chmod(at, mode)); err != nil {
		return fmt.Errorf("give the node %s its owner and mode: %v", at, err)
	}
	return nil
}

// deviceStat returns the status of an open device node, or ErrNoDevice.
func deviceStat(fd int) (unix.Statx_t, error) {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS, &st); err != nil {
		return st, fmt.Errorf("statx: %w", err)
	}
	if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFBLK && kind != unix.S_IFCHR {
		return st, ErrNoDevice
	}
	return st, nil
}

// Number identifies a device.
type Number struct {
	Block        bool // else a character device
	Major, Minor uint32
}

// NumberOf returns the number of the device at path, or ErrNoDevice. It follows links and asks no server, so path may
// be in a volume.
func NumberOf(path string) (Number, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return Number{}, err
	}
	defer unix.Close(fd)
	st, err := deviceStat(fd)
	return Number{st.Mode&unix.S_IFMT == unix.S_IFBLK, st.Rdev_major, st.Rdev_minor}, err
}
