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

// With Mounts, stage mounts a volume's data at the staging path, publish binds that at the target; a plugin without
// staging mounts the data at the target. The data is a tmpfs, or a directory of DataDir. A block volume is a regular
// file of DataDir bound to a file at the target; without DataDir there are no block volumes.
// Without Mounts, publish makes and removes an empty directory or file at the target, as any plugin does.

func (p *Plugin) mountStaging(id, path string, c *csi.VolumeCapability) error {
	if !p.cfg.Mounts || c.GetBlock() != nil {
		return nil
	}
	return p.mountData(id, path, false)
}

func (p *Plugin) mountData(id, path string, readonly bool) error {
	if mounted, err := mountinfo.Mounted(path); err != nil || mounted {
		return err
	}
	if p.cfg.DataDir == "" {
		flags := uintptr(0)
		if readonly {
			flags = unix.MS_RDONLY
		}
		return failed("mount tmpfs", path, unix.Mount("csifake", path, "tmpfs", flags, "size=4m,mode=0777"))
	}
	data := p.data(id)
	if err := os.MkdirAll(data, 0o700); err != nil {
		return err
	}
	return bind(data, path, readonly)
}

// data is where a volume keeps its data. An id may hold anything: it is hashed.
func (p *Plugin) data(id string) string {
	return filepath.Join(p.cfg.DataDir, fmt.Sprintf("%x", sha256.Sum256([]byte(id)))[:16])
}

func (p *Plugin) mountTarget(id string, r *csi.NodePublishVolumeRequest) error {
	if p.cfg.Blind {
		return nil
	}
	target, block := r.GetTargetPath(), r.GetVolumeCapability().GetBlock() != nil
	if err := makeTarget(target, block); err != nil {
		return err
	}
	if !p.cfg.Mounts {
		return nil
	}
	if mounted, err := mountinfo.Mounted(target); err != nil || mounted {
		return err
	}
	switch {
	case block:
		return p.bindBlock(id, target, r.GetReadonly())
	case r.GetStagingTargetPath() != "":
		return bind(r.GetStagingTargetPath(), target, r.GetReadonly())
	}
	return p.mountData(id, target, r.GetReadonly())
}

func makeTarget(path string, block bool) error {
	if !block {
		if err := os.Mkdir(path, 0o755); err != nil && !os.IsExist(err) {
			return fmt.Errorf("make target: %w", err)
		}
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return fmt.Errorf("make target: %w", err)
	}
	return f.Close()
}

func (p *Plugin) bindBlock(id, target string, readonly bool) error {
	if p.cfg.DataDir == "" {
		return invalid("this plugin has no data directory, so no block volumes")
	}
	f, err := os.OpenFile(p.data(id)+".block", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(1<<20), f.Close()); err != nil {
		return err
	}
	return bind(p.data(id)+".block", target, readonly)
}

func bind(from, to string, readonly bool) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return failed("bind", to, err)
	}
	if !readonly {
		return nil
	}
	return failed("remount read-only", to, unix.Mount("", to, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
}

// unmount takes away the mount at a path, if there is one.
func (p *Plugin) unmount(path string) error {
	if !p.cfg.Mounts {
		return nil
	}
	mounted, err := mountinfo.Mounted(path)
	if errors.Is(err, os.ErrNotExist) || err == nil && !mounted {
		return nil
	}
	if err != nil {
		return err
	}
	return failed("unmount", path, unix.Unmount(path, unix.UMOUNT_NOFOLLOW))
}

func (p *Plugin) removeTarget(path string) error {
	if p.cfg.Blind {
		return nil
	}
	if err := p.unmount(path); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("remove target: %w", err)
	}
	return nil
}

func failed(what, path string, err error) error {
	if err != nil {
		return fmt.Errorf("csifake: %s %s: %w", what, path, err)
	}
	return nil
}
