package mount

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// ErrNoDevice: what is at this path is neither a block nor a character device.
var ErrNoDevice = errors.New("not a device node")

// Device makes a host's device appear in the space, as a node of the space's own: what is done to its owner and mode stays there,
// and no nodev of the source's mount disarms it. Where the kernel lets nobody make a node (a user namespace), it is the host's own
// node, bound, with its owner and mode.
type Device struct {
	Source   string // absolute, on the host
	Target   string // absolute, in the space; made if it does not exist
	UID      int    // who owns it; the group is that of the source
	ReadOnly bool   // nobody has the right to write. Root needs no right: only a device cgroup keeps it from writing
}

func (d Device) target() string { return d.Target }

func (d Device) put(t *tree) error {
	return Bind{Source: d.Source, Target: d.Target, ReadOnly: d.ReadOnly}.put(t)
}

// nodes makes the nodes of the devices, in a tmpfs that is gone before anything sees it: what stays are clones of the single nodes.
func (t *tree) nodes(layers []Layer, scratch string) error {
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
	defer func() { _ = unix.Unmount(scratch, unix.MNT_DETACH) }() // it is this thread's alone, and gone with it at the latest
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

// open gives a detached clone of the node, made at the path, or of the source.
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

// mode is that of the source, but for the owner, who has the access that is asked for, and writing, if it is not.
func (d Device) mode(source uint32) uint32 {
	if d.ReadOnly {
		return source&0o555 | 0o400
	}
	return source&0o777 | 0o600
}

// rehang mounts what is of the host's directory dir at its place in a copy of that. The node of the terminals' multiplexer finds the
// terminals beside itself, and one that is bound has nothing beside it; so it is made anew. Where the kernel lets nobody make a node,
// it is bound as all else, and of no use to the task.
func (t *tree) rehang(fd int, dir, at string) error {
	if st, err := deviceStat(fd); err == nil && dir == "/dev" && filepath.Base(at) == "ptmx" {
		if err := makeNode(at, st, int(st.Uid), uint32(st.Mode)&0o777); !errors.Is(err, unix.EPERM) {
			return err
		}
	}
	return hang(fd, at)
}

// makeNode makes another node of a device. EPERM: there is none.
func makeNode(at string, of unix.Statx_t, uid int, mode uint32) error {
	if err := unix.Mknod(at, uint32(of.Mode)&unix.S_IFMT|mode, int(unix.Mkdev(of.Rdev_major, of.Rdev_minor))); err != nil {
		return fmt.Errorf("make the node %s: %w", at, err)
	}
	if err := errors.Join(unix.Chown(at, uid, int(of.Gid)), unix.Chmod(at, mode)); err != nil {
		return fmt.Errorf("give the node %s its owner and mode: %v", at, err)
	}
	return nil
}

// deviceStat is of an open path, and an error if that is no device.
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

// Number is what the kernel knows a device by.
type Number struct {
	Block        bool // else a character device
	Major, Minor uint32
}

// NumberOf is the number of the device whose node is at path, its links followed; ErrNoDevice if another kind of file is there. It
// opens the path and no more, so it is safe for a volume.
func NumberOf(path string) (Number, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return Number{}, err
	}
	defer unix.Close(fd)
	st, err := deviceStat(fd)
	return Number{st.Mode&unix.S_IFMT == unix.S_IFBLK, st.Rdev_major, st.Rdev_minor}, err
}
