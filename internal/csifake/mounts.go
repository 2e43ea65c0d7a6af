package csifake

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// MountKind is what a plugin with Mounts mounts at stage, or at publish if it does not stage.
type MountKind string

const (
	MountTmpfs MountKind = "tmpfs" // of 4 MiB
	MountBind  MountKind = "bind"  // a directory of DataDir
	MountFuse  MountKind = "fuse"  // an empty FUSE file system that dies with the plugin; the script may make it hang
)

// With Mounts, stage mounts a volume's data at the staging path, and publish binds that at the target; a plugin without
// staging, and an ephemeral volume, has its data mounted at the target. What is to be read-only becomes so in a second
// step. Without Mounts, publish makes and removes an empty directory or file at the target, as any plugin does. No path
// that may hold a volume is followed.

// work is what one call does to a path.
type work struct {
	p      *Plugin
	c      *call
	volume string
	path   string
}

// stage puts a volume at its staging path.
func (w work) stage(c *csi.VolumeCapability) error {
	if !w.p.cfg.Mounts || c.GetBlock() != nil || w.c.lies(NoMount) {
		return w.p.middle(w.c)
	}
	return w.put(false, w.mountData)
}

// publish puts a volume at its target.
func (w work) publish(r *csi.NodePublishVolumeRequest) error {
	if w.p.cfg.Blind {
		return w.p.middle(w.c)
	}
	block := r.GetVolumeCapability().GetBlock() != nil
	if err := w.makeTarget(block); err != nil {
		return err
	}
	if !w.p.cfg.Mounts || w.c.lies(NoMount) {
		return w.p.middle(w.c)
	}
	from := func(at string) error { return bind(r.GetStagingTargetPath(), at) }
	switch {
	case block:
		from = w.mountBlock
	case r.GetStagingTargetPath() == "" || w.c.lies(WrongData):
		from = w.mountData
	}
	return w.afterAnswer(func() error { return w.put(r.GetReadonly() && !w.c.lies(Writable), from) })
}

// afterAnswer runs change, which mounts or unmounts at the path; under mount_late it does so after the answer. A change
// of an earlier call that is still pending is cancelled or waited for: the last call for a path decides what is mounted
// there.
func (w work) afterAnswer(change func() error) error {
	w.p.putOff.end(w.path)
	var after time.Duration
	if r := w.c.acts.before; r != nil {
		after = time.Duration(r.MountLate)
	}
	if after == 0 {
		return change()
	}
	if err := w.p.middle(w.c); err != nil {
		return err
	}
	w.c.acts.middle = nil // it has acted
	begin, over := w.p.putOff.begin(w.path)
	w.p.late.Go(func() {
		defer over()
		select {
		case <-time.After(after):
		case <-w.p.ended:
			return
		}
		w.p.alive.RLock()
		defer w.p.alive.RUnlock()
		if w.p.dead || !begin() {
			return
		}
		if err := change(); err != nil {
			w.p.cfg.Log.Error("a late mount failed", "path", w.path, "error", err)
		}
	})
	return nil
}

// putOff holds the changes of mounts that come after their answers, by path.
type putOff struct {
	mu    sync.Mutex
	paths map[string]*lateChange
}

type lateChange struct {
	over      chan struct{}
	begun     bool
	calledOff bool
}

// begin records a change. The function begin reports whether it is to happen; over ends it.
func (p *putOff) begin(path string) (begin func() bool, over func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := &lateChange{over: make(chan struct{})}
	if p.paths == nil {
		p.paths = map[string]*lateChange{}
	}
	p.paths[path] = c
	return func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		c.begun = !c.calledOff
		return c.begun
	}, func() { close(c.over) }
}

// end calls the change at a path off, or waits for its end.
func (p *putOff) end(path string) {
	p.mu.Lock()
	c := p.paths[path]
	delete(p.paths, path)
	begun := false
	if c != nil {
		begun, c.calledOff = c.begun, true
	}
	p.mu.Unlock()
	if begun {
		<-c.over
	}
}

// put mounts something at the path, in two steps.
func (w work) put(readonly bool, mount func(at string) error) error {
	at := w.path
	if w.c.lies(Elsewhere) || w.c.lies(Symlink) {
		at = Beside(w.path)
		if err := os.Mkdir(at, 0o755); err != nil && !os.IsExist(err) {
			return err
		}
	}
	before := 0
	if isMounted(at) {
		var err error
		if before, err = mountsAt(at); err != nil {
			return err
		}
	}
	want := 1
	if w.c.lies(Stacked) {
		want = 2
	}
	for range want - before {
		if err := mount(at); err != nil {
			return err
		}
	}
	if err := w.p.middle(w.c); err != nil || !readonly {
		return err
	}
	return failed("remount read-only", at, unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
}

// mountData mounts what a volume holds.
func (w work) mountData(at string) error {
	id := w.volume
	if w.c.lies(WrongData) {
		id += " of somebody else"
	}
	switch w.p.cfg.mountKind() {
	case MountFuse:
		return w.p.fuses.mount(w.p, w.volume, at)
	case MountBind:
		data := w.p.data(id)
		if err := os.MkdirAll(data, 0o700); err != nil {
			return err
		}
		return bind(data, at)
	}
	return failed("mount tmpfs", at, unix.Mount("csifake", at, "tmpfs", 0, "size=4m,mode=0777"))
}

func (c Config) mountKind() MountKind {
	switch {
	case c.Mount != "":
		return c.Mount
	case c.DataDir != "":
		return MountBind
	}
	return MountTmpfs
}

// data is where a volume keeps its data. An id may hold anything: it is hashed.
func (p *Plugin) data(id string) string {
	return filepath.Join(p.cfg.DataDir, fmt.Sprintf("%x", sha256.Sum256([]byte(id)))[:16])
}

func (w work) makeTarget(block bool) error {
	switch {
	case w.c.lies(Symlink):
		if err := os.Symlink(Beside(w.path), w.path); err != nil && !os.IsExist(err) {
			return fmt.Errorf("make target: %w", err)
		}
		return nil
	case !block:
		if err := os.Mkdir(w.path, 0o755); err != nil && !os.IsExist(err) {
			return fmt.Errorf("make target: %w", err)
		}
		return nil
	}
	f, err := os.OpenFile(w.path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if os.IsExist(err) {
		return nil // not opened: it may be a device
	}
	if err != nil {
		return fmt.Errorf("make target: %w", err)
	}
	return f.Close()
}

func bind(from, to string) error {
	return failed("bind", to, unix.Mount(from, to, "", unix.MS_BIND, ""))
}

// unstage takes a volume from its staging path.
func (w work) unstage() error {
	if !w.p.cfg.Mounts || w.c.lies(KeepMount) {
		return w.p.middle(w.c)
	}
	if err := w.unmount(); err != nil {
		return err
	}
	return w.p.middle(w.c)
}

// unpublish takes a volume from its target, and the target too.
func (w work) unpublish() error {
	if w.p.cfg.Blind || w.c.lies(KeepMount) {
		return w.p.middle(w.c)
	}
	return w.afterAnswer(w.removeTarget)
}

func (w work) removeTarget() error {
	if w.p.cfg.Mounts {
		if err := w.unmount(); err != nil {
			return err
		}
	}
	if err := w.p.middle(w.c); err != nil || w.c.lies(LeaveTarget) {
		return err
	}
	if err := os.Remove(w.path); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("remove target: %w", err)
	}
	return nil
}

// unmount takes away all mounts at the path, and at the one beside it.
func (w work) unmount() error {
	for _, path := range []string{w.path, Beside(w.path)} {
		n := 0
		for ; isMounted(path); n++ {
			if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
				return failed("unmount", path, err)
			}
		}
		w.p.fuses.close(path)
		if path != w.path && n > 0 {
			if err := os.Remove(path); err != nil {
				return err
			}
		}
	}
	return nil
}

// isMounted says whether something is mounted at a path. The kernel knows without asking what is: that may hang, or be
// dead.
func isMounted(path string) bool {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, 0,
		&st)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return false
	case err == nil && st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0:
		return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
	}
	n, err := mountsAt(path)
	return err == nil && n > 0
}

// mountsAt counts the mounts at a path, by the kernel's table.
func mountsAt(path string) (int, error) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	path = filepath.Join(dir, filepath.Base(path))
	found, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != path, false })
	return len(found), err
}

func failed(what, path string, err error) error {
	if err != nil {
		return fmt.Errorf("csifake: %s %s: %w", what, path, err)
	}
	return nil
}
