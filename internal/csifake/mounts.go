package csifake

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// MountKind says what a plugin with Mounts mounts at stage, or at publish if it does not stage.
type MountKind string

const (
	MountTmpfs MountKind = "tmpfs" // of 4 MiB
	MountBind  MountKind = "bind"  // a directory of DataDir
	MountFuse  MountKind = "fuse"  // an empty FUSE file system that dies with the plugin; the script may make it hang
)

// With Mounts, stage mounts a volume's data at the staging path, and publish binds that at the target. Without staging,
// and for an ephemeral volume, the data is mounted at the target. A mount becomes read-only in a second step. Without
// Mounts, publish makes, and unpublish removes, an empty directory or file at the target, as any plugin does. The
// plugin never follows a path that may hold a volume.

// work is the work of one call at a path.
type work struct {
	p      *Plugin
	c      *call
	volume string
	path   string
}

// stage mounts a volume at its staging path.
func (w work) stage(c *csi.VolumeCapability) error {
	if !w.p.cfg.Mounts || c.GetBlock() != nil {
		return w.p.runMiddleRule(w.c)
	}
	return w.put(false, w.mountData)
}

// publish mounts a volume at its target.
func (w work) publish(r *csi.NodePublishVolumeRequest) error {
	if w.p.cfg.Blind {
		return w.p.runMiddleRule(w.c)
	}
	block := r.GetVolumeCapability().GetBlock() != nil
	if err := w.makeTarget(block); err != nil {
		return err
	}
	if !w.p.cfg.Mounts {
		return w.p.runMiddleRule(w.c)
	}
	from := func(at string) error { return bind(r.GetStagingTargetPath(), at) }
	switch {
	case block:
		from = w.mountBlock
	case r.GetStagingTargetPath() == "":
		from = w.mountData
	}
	return w.put(r.GetReadonly(), from)
}

// put makes a mount at the path, in two steps.
func (w work) put(readonly bool, mount func(at string) error) error {
	if !isMounted(w.path) {
		if err := mount(w.path); err != nil {
			return err
		}
	}
	if err := w.p.runMiddleRule(w.c); err != nil || !readonly {
		return err
	}
	return failed("remount read-only", w.path,
		unix.Mount("", w.path, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
}

// mountData mounts the data of a volume.
func (w work) mountData(at string) error {
	switch w.p.cfg.mountKind() {
	case MountFuse:
		return w.p.fuses.mount(w.p, w.volume, at)
	case MountBind:
		data := w.p.data(w.volume)
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

// data returns the directory of a volume's data. Its name is a hash, because an ID may have any characters.
func (p *Plugin) data(id string) string {
	return filepath.Join(p.cfg.DataDir, fmt.Sprintf("%x", sha256.Sum256([]byte(id)))[:16])
}

func (w work) makeTarget(block bool) error {
	if !block {
		if err := os.Mkdir(w.path, 0o755); err != nil && !os.IsExist(err) {
			return fmt.Errorf("make target: %w", err)
		}
		return nil
	}
	f, err := os.OpenFile(w.path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if os.IsExist(err) {
		return nil // do not open it: it may be a device
	}
	if err != nil {
		return fmt.Errorf("make target: %w", err)
	}
	return f.Close()
}

func bind(from, to string) error {
	return failed("bind", to, unix.Mount(from, to, "", unix.MS_BIND, ""))
}

// unstage unmounts a volume from its staging path.
func (w work) unstage() error {
	if !w.p.cfg.Mounts {
		return w.p.runMiddleRule(w.c)
	}
	if err := w.unmount(); err != nil {
		return err
	}
	return w.p.runMiddleRule(w.c)
}

// unpublish unmounts a volume from its target, and removes the target.
func (w work) unpublish() error {
	if w.p.cfg.Blind {
		return w.p.runMiddleRule(w.c)
	}
	if w.p.cfg.Mounts {
		if err := w.unmount(); err != nil {
			return err
		}
	}
	if err := w.p.runMiddleRule(w.c); err != nil {
		return err
	}
	if err := os.Remove(w.path); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("remove target: %w", err)
	}
	return nil
}

// unmount removes all mounts at the path.
func (w work) unmount() error {
	for isMounted(w.path) {
		if err := unix.Unmount(w.path, unix.UMOUNT_NOFOLLOW); err != nil {
			return failed("unmount", w.path, err)
		}
	}
	w.p.fuses.close(w.path)
	return nil
}

// isMounted reports whether something is mounted at a path. It sends no request to the mount, which may hang or be
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

// mountsAt counts the mounts at a path in the kernel's table.
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
