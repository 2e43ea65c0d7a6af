package main

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// NodeStageVolume mounts a volume at its staging path. The staging path of a raw volume stays empty: its device is
// attached.
func (n *node) NodeStageVolume(
	ctx context.Context, req *csi.NodeStageVolumeRequest,
) (*csi.NodeStageVolumeResponse, error) {
	id, badID := disk.ParseID(disk.Volume, req.GetVolumeId())
	a, badAccess := readAccess(req.GetVolumeCapability())
	at, badPath := n.place("staging target path", req.GetStagingTargetPath())
	if err := refusal(badID, badAccess, missingParent(badPath)); err != nil {
		return nil, err
	}
	h, r, err := n.pool.Acquire(id)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	if err := checkAttachment(r, n.id, n.attach, req.GetPublishContext()); err != nil {
		return nil, err
	}
	if r.Attached[n.id].ReadOnly {
		a.flags = a.flags.ReadOnly()
	}
	return &csi.NodeStageVolumeResponse{}, n.stage(ctx, h, r, at, a)
}

// missingParent explains the error of a path whose parent directory is missing.
func missingParent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return disk.Errorf(disk.ErrInUse, "make the parent directory first: %w", err)
	}
	return err
}

func (n *node) stage(ctx context.Context, h *disk.Hold, r disk.Record, at mount.Place, a access) error {
	if !r.Usage.Fits(a.usage) {
		return disk.Errorf(disk.ErrInUse, "volume %s was created for %s, not for %s", r.ID, r.Usage, a.usage)
	}
	now, err := n.inspect(r)
	if err != nil {
		return err
	}
	if a.usage.FileSystem, err = n.fileSystem(now, a.usage); err != nil {
		return err
	}
	done, err := now.stagedAt(at, a.usage)
	if err != nil || done {
		return err
	}
	st := now.stage // publishes that were not unpublished stay in the record
	st.Path, st.Usage, st.Boot = at.String(), a.usage, n.pool.Boot()
	now.record, now.stage = r.WithStage(n.id, &st), st
	if err := h.Save(now.record); err != nil {
		return err
	}
	if err := n.mountStage(ctx, h, now, at, a); err != nil {
		return errors.Join(missingParent(err), n.undoStage(h, r, now, at))
	}
	return nil
}

// fileSystem returns the type to stage with: the requested one, that of the volume, that of its data, or the default,
// in this order.
func (n *node) fileSystem(now view, u disk.Usage) (string, error) {
	if u.Access == disk.Raw {
		return "", nil
	}
	if requested := cmp.Or(u.FileSystem, now.record.Usage.FileSystem); requested != "" {
		return requested, nil
	}
	return now.backend.FileSystem(now.record.ID, n.pool.FileSystem)
}

// stagedAt reports whether the volume is staged as requested. Another stage of it is an error.
func (v view) stagedAt(at mount.Place, usage disk.Usage) (bool, error) {
	staged, err := v.staged()
	switch {
	case err != nil:
		return false, err
	case staged && v.stage.Path != at.String():
		return false, disk.Errorf(disk.ErrExists, "volume %s is staged at %s already", v.record.ID, v.stage.Path)
	case staged && v.stage.Usage != usage:
		return false, disk.Errorf(disk.ErrExists, "volume %s is staged at %s for %s", v.record.ID, at,
			v.stage.Usage)
	case staged:
		return true, nil
	}
	shown, err := v.shown(at.String())
	if shown {
		err = disk.Errorf(disk.ErrExists, "volume %s is mounted at %s without a stage; unstage it first",
			v.record.ID, at)
	}
	return false, err
}

// mountStage mounts the volume at its staging path, or attaches its device.
func (n *node) mountStage(ctx context.Context, h *disk.Hold, now view, at mount.Place, a access) error {
	r := now.record
	if a.usage.Access == disk.Raw {
		return now.attachDevice()
	}
	how := disk.MountOptions{Bytes: r.Bytes, FileSystem: a.usage.FileSystem, Flags: a.flags}
	if a.usage.Group != r.Group && !now.readOnly() { // once: later changes by workloads stay
		how.Group = a.usage.Group
	}
	if err := now.backend.Mount(ctx, r.ID, at, how); err != nil {
		return err
	}
	r.Group = cmp.Or(how.Group, r.Group)
	r.Usage.FileSystem = cmp.Or(r.Usage.FileSystem, how.FileSystem) // the type is settled now
	r.Formatted = how.FileSystem != ""
	if r.Group == now.record.Group && r.Usage == now.record.Usage && r.Formatted == now.record.Formatted {
		return now.tune()
	}
	now.record = r
	return cmp.Or(h.Save(r), now.tune())
}

// tune sets the mutable parameters of the volume's devices.
func (v view) tune() error {
	if t, ok := v.backend.(disk.Tuner); ok {
		return t.SetReadAhead(v.record.ID, v.record.ReadAhead)
	}
	return nil
}

func (v view) attachDevice() error {
	d, err := v.devices()
	if err != nil {
		return err
	}
	if err := v.backend.Grow(v.record.ID, v.record.Bytes); err != nil { // a kill may have prevented it
		return err
	}
	if _, err = d.Attach(v.record.ID, v.readOnly()); err != nil {
		return err
	}
	return v.tune()
}

// undoStage removes the record and the mount of a stage that failed.
func (n *node) undoStage(h *disk.Hold, before disk.Record, now view, at mount.Place) error {
	if err := n.unmountStage(now, at); err != nil {
		return err
	}
	if len(now.stage.Published) > 0 {
		return h.Save(before)
	}
	return h.Save(before.WithStage(n.id, nil))
}

// unmountStage unmounts the staging path, or detaches the device.
func (n *node) unmountStage(now view, at mount.Place) error {
	if now.stage.Usage.Access != disk.Raw {
		return n.takeDown(now.record, at)
	}
	devices, err := now.devices()
	if err != nil {
		return err
	}
	return devices.Detach(now.record.ID)
}

// NodeUnstageVolume unmounts the staging path, or detaches the device. A published volume is refused.
func (n *node) NodeUnstageVolume(
	ctx context.Context, req *csi.NodeUnstageVolumeRequest,
) (*csi.NodeUnstageVolumeResponse, error) {
	id, badID := disk.ParseID(disk.Volume, req.GetVolumeId())
	at, badPath := n.placeToUnmount("staging target path", req.GetStagingTargetPath())
	if err := refusal(badID, badPath); err != nil {
		return nil, err
	}
	h, r, err := n.pool.Acquire(id)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	return &csi.NodeUnstageVolumeResponse{}, n.unstage(ctx, h, r, at)
}

func (n *node) unstage(ctx context.Context, h *disk.Hold, r disk.Record, at mount.Place) error {
	now, err := n.inspect(r)
	if err != nil {
		return err
	}
	staged, err := now.staged()
	if now.stage.Path != at.String() && (staged || err != nil || now.stage.Path == "") {
		return n.takeDown(r, at) // not staged there; a mount without a record is unmounted
	}
	for target := range now.stage.Published {
		if len(now.table.Stack(target)) > 0 {
			return disk.Errorf(disk.ErrInUse, "volume %s is still published at %s", r.ID, target)
		}
	}
	if err := n.unmountStage(now, at); err != nil {
		return err
	}
	for target := range now.stage.Published {
		if err := removeTarget(now.stage, target); err != nil {
			return err
		}
	}
	awaitRelease(ctx, now)
	return h.Save(r.WithStage(n.id, nil))
}

// awaitRelease waits a second for the kernel to free the loop device, so that a delete directly after this call
// succeeds. A copy of the mount in another namespace may keep the device longer. The volume is unstaged all the same.
func awaitRelease(ctx context.Context, now view) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for {
		if user, err := now.backend.HeldBy(now.record.ID); user == "" || err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}
