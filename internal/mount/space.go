package mount

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Propagation is the propagation of a bind as the program in the space sees it (mount_namespaces(7)).
type Propagation int

const (
	// Slave binds follow what the host mounts and unmounts below the source. Nothing propagates back.
	Slave Propagation = iota
	// Private binds propagate nothing in either direction.
	Private
	// Bidirectional binds also propagate mounts to the host, where they stay when the space ends.
	Bidirectional
)

// Space is the file system that a program sees: the host's directories as slaves, with the Layers on top, in their
// order. Without Layers a Space looks like the host, but has its own root directory.
type Space struct {
	Scratch string // an existing directory of the host where the root is built; nothing of that appears on the host
	Layers  []Layer
}

// Layer is a Bind, a Device, a Dir or a Tmpfs.
type Layer interface {
	target() string
	mount(*tree) error
}

// Bind makes a file or directory of the host appear in the space, with the mounts below it.
type Bind struct {
	Source      string // absolute, on the host
	Target      string // absolute, in the space; made if it does not exist, but never in a directory of the host
	ReadOnly    bool   // also for the mounts that are below it now
	Propagation Propagation
}

// Dir makes a directory in the space. An existing one keeps its mode.
type Dir struct {
	Path string // absolute, in the space
	Mode uint32 // permission bits
}

// Tmpfs mounts an empty file system in memory, which vanishes with the space.
type Tmpfs struct {
	Path     string // absolute, in the space
	Size     string // in the syntax of tmpfs(5); empty: 1m
	Mode     uint32 // permission bits
	UID, GID int    // owner
}

func (b Bind) target() string  { return b.Target }
func (d Dir) target() string   { return d.Path }
func (t Tmpfs) target() string { return t.Path }

// Run calls fn on a thread inside a new space. Processes that fn starts run in the space, and it vanishes with the last
// of them, without cleanup. fn must not use other goroutines, because these run outside. The order of the steps
// matters. A bidirectional source is cloned while it is still a peer of the host's mount, because a slave cannot become
// a peer again. All other mounts become slaves and not private, because a private copy would keep a device busy after
// the host has unmounted it. All sources are opened before the new root covers anything.
func (s Space) Run(fn func() error) error {
	if err := s.check(); err != nil {
		return err
	}
	return OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("make a mount namespace: %w", err)
		}
		t := newTree()
		defer t.close()
		if err := t.cloneBinds(s.Layers, func(b Bind) bool { return b.Propagation == Bidirectional }); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
			return fmt.Errorf("make all mounts slaves of the host's: %w", err)
		}
		if err := t.makeDevices(s.Layers, s.Scratch); err != nil {
			return err
		}
		if err := t.cloneBinds(s.Layers, func(b Bind) bool { return b.Propagation != Bidirectional }); err != nil {
			return err
		}
		if err := t.buildRoot(s.Scratch); err != nil {
			return err
		}
		for _, l := range s.Layers {
			if err := l.mount(t); err != nil {
				return err
			}
		}
		if err := t.makeCopiesReadOnly(); err != nil {
			return err
		}
		return fn()
	})
}

// check refuses impossible layers before anything is changed.
func (s Space) check() error {
	for _, l := range s.Layers {
		if at := l.target(); !filepath.IsAbs(at) || filepath.Clean(at) == "/" {
			return fmt.Errorf("target %q in the task is no absolute path below /", at)
		}
		if b, is := l.(Bind); is && b.Propagation == Bidirectional {
			if err := checkBidirectional(b); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkBidirectional refuses a source from which mounts would not propagate to the host.
func checkBidirectional(b Bind) error {
	table, err := Table(0)
	if err != nil {
		return err
	}
	m, err := table.mountOf(b.Source)
	if err != nil {
		return fmt.Errorf("bind %s: %w", b.Source, err)
	}
	if !m.Shared() {
		return fmt.Errorf("bind %s with bidirectional propagation: it lies on %s, which is %s: %w", b.Source, m.Point,
			m.Propagation(), ErrNotShared)
	}
	return nil
}

func (b Bind) mount(t *tree) error {
	fd := t.sources[b.Target]
	dir, err := isDir(fd)
	if err != nil {
		return fmt.Errorf("bind %s: %w", b.Source, err)
	}
	attr := unix.MountAttr{}
	if b.ReadOnly {
		attr.Attr_set = unix.MOUNT_ATTR_RDONLY
	}
	if b.Propagation == Private {
		attr.Propagation = unix.MS_PRIVATE
	}
	if err := setAttr(fd, true, attr); err != nil {
		return fmt.Errorf("bind %s: %w", b.Source, err)
	}
	at, err := t.openTarget(b.Target, dir, 0o755)
	if err != nil {
		return fmt.Errorf("bind %s at %s: %w", b.Source, b.Target, err)
	}
	defer unix.Close(at.fd)
	if err := attach(fd, at.fd, ""); err != nil {
		return fmt.Errorf("bind %s at %s: %w", b.Source, b.Target, explainMismatch(err, dir))
	}
	switch {
	case b.Propagation == Bidirectional:
		t.setArea(at.path, shared)
	case within("/dev", b.Source):
		t.setArea(at.path, host) // the space must not make mount points among the host's devices
	default:
		t.setArea(at.path, own)
	}
	return nil
}

func (d Dir) mount(t *tree) error {
	at, err := t.openTarget(d.Path, true, d.Mode)
	if err != nil {
		return fmt.Errorf("make directory %s in the task: %w", d.Path, err)
	}
	return unix.Close(at.fd)
}

func (m Tmpfs) mount(t *tree) error {
	at, err := t.openTarget(m.Path, true, m.Mode)
	if err != nil {
		return fmt.Errorf("mount a tmpfs at %s in the task: %w", m.Path, err)
	}
	defer unix.Close(at.fd)
	size := m.Size
	if size == "" {
		size = "1m"
	}
	options := fmt.Sprintf("size=%s,mode=%o,uid=%d,gid=%d", size, m.Mode&0o7777, m.UID, m.GID)
	if err := unix.Mount("tmpfs", procFD(at.fd), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount a tmpfs at %s in the task: %w", m.Path, err)
	}
	t.setArea(at.path, own)
	return nil
}

// explainMismatch explains the kernel's error: a directory can only be mounted on a directory.
func explainMismatch(err error, dir bool) error {
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("one of source and target is a directory and the other is not (source: %t): %w", dir, err)
	}
	return err
}
