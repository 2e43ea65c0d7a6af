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

// NodeStageVolume mounts a volume at its one staging path on this node. A raw volume gets its device; its staging path
// stays empty.
func (n *node) NodeStageVolume(
	ctx context.Context, req *csi.NodeStageVolumeRequest,
) (*csi.NodeStageVolumeResponse, error) {
	id, badID := disk.ParseID(disk.Volume, req.GetVolumeId())
	a, badAccess := readAccess(req.GetVolumeCapability())
	at, badPath := n.place("staging target path", req.GetStagingTargetPath())
	if err := refusal(badID, badAccess, missingParent(badPath)); err != nil {
		return nil, err
	}
	h, r, err := n.pool.Take(id)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	if err := mayUse(r, n.id, n.attach, req.GetPublishContext()); err != nil {
		return nil, err
	}
	if r.Attached[n.id].ReadOnly {
		a.flags = a.flags.ReadOnly()
	}
	return &csi.NodeStageVolumeResponse{}, n.stage(ctx, h, r, at, a)
}

// missingParent gives an answer to a caller that did not make the directories which are its to make.
func missingParent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return disk.Errorf(disk.ErrInUse, "the caller has to make the directory above first: %w", err)
	}
	return err
}

func (n *node) stage(ctx context.Context, h *disk.Hold, r disk.Record, at mount.Place, a access) error {
	if !r.Usage.Fits(a.usage) {
		return disk.Errorf(disk.ErrInUse, "volume %s was made for %s, not for %s", r.ID, r.Usage, a.usage)
	}
	now, err := n.look(r)
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
	st := now.stage // publishes that were never taken down stay on record
	st.Path, st.Usage, st.Boot = at.String(), a.usage, n.pool.Boot()
	now.record, now.stage = r.WithStage(n.id, &st), st
	if err := h.Save(now.record); err != nil {
		return err
	}
	if err := n.bring(ctx, h, now, at, a); err != nil {
		return errors.Join(missingParent(err), n.giveUpStage(h, r, now, at))
	}
	return nil
}

// fileSystem is the type that the volume is staged with: what is asked for, or what it was made for, or what it holds,
// or loopfs' own choice.
func (n *node) fileSystem(now here, u disk.Usage) (string, error) {
	if u.Access == disk.Raw {
		return "", nil
	}
	if asked := cmp.Or(u.FileSystem, now.record.Usage.FileSystem); asked != "" {
		return asked, nil
	}
	return now.backend.FileSystem(now.record.ID, n.pool.FileSystem)
}

// stagedAt says whether the volume is staged exactly so. Staged otherwise is an error.
func (h here) stagedAt(at mount.Place, usage disk.Usage) (bool, error) {
	staged, err := h.staged()
	switch {
	case err != nil:
		return false, err
	case staged && h.stage.Path != at.String():
		return false, disk.Errorf(disk.ErrExists, "volume %s is staged at %s already", h.record.ID, h.stage.Path)
	case staged && h.stage.Usage != usage:
		return false, disk.Errorf(disk.ErrExists, "volume %s is staged at %s for another usage (%s)", h.record.ID, at,
			h.stage.Usage)
	case staged:
		return true, nil
	}
	shown, err := h.shown(at.String())
	if shown {
		err = disk.Errorf(disk.ErrExists, "volume %s is mounted at %s and not staged there; unstage it first",
			h.record.ID, at)
	}
	return false, err
}

// bring mounts the volume, or gives it its device.
func (n *node) bring(ctx context.Context, h *disk.Hold, now here, at mount.Place, a access) error {
	r := now.record
	if a.usage.Access == disk.Raw {
		return now.bringDevice()
	}
	how := disk.Mounting{Bytes: r.Bytes, FileSystem: a.usage.FileSystem, Flags: a.flags}
	if a.usage.Group != r.Group && !now.readOnly() { // once: what workloads make of it later is theirs
		how.Group = a.usage.Group
	}
	if err := now.backend.Mount(ctx, r.ID, at, how); err != nil {
		return err
	}
	r.Group = cmp.Or(how.Group, r.Group)
	r.Usage.FileSystem = cmp.Or(r.Usage.FileSystem, how.FileSystem) // the volume is of that type from now on
	if r.Group == now.record.Group && r.Usage == now.record.Usage {
		return nil
	}
	return h.Save(r)
}

func (h here) bringDevice() error {
	d, err := h.devices()
	if err != nil {
		return err
	}
	if err := h.backend.Grow(h.record.ID, h.record.Bytes); err != nil { // which a kill may have prevented
		return err
	}
	_, err = d.Attach(h.record.ID, h.readOnly())
	return err
}

// giveUpStage takes the record of a stage back that did not come to be.
func (n *node) giveUpStage(h *disk.Hold, before disk.Record, now here, at mount.Place) error {
	if err := n.putAway(now, at); err != nil {
		return err
	}
	if len(now.stage.Published) > 0 {
		return h.Save(before)
	}
	return h.Save(before.WithStage(n.id, nil))
}

// putAway takes down what a stage brought.
func (n *node) putAway(now here, at mount.Place) error {
	if now.stage.Usage.Access != disk.Raw {
		return n.takeDown(now.record, at)
	}
	devices, err := now.devices()
	if err != nil {
		return err
	}
	return devices.Detach(now.record.ID)
}

// NodeUnstageVolume takes the staging mount, or the device, away. The volume must not be published on this node any
// more.
func (n *node) NodeUnstageVolume(
	ctx context.Context, req *csi.NodeUnstageVolumeRequest,
) (*csi.NodeUnstageVolumeResponse, error) {
	id, badID := disk.ParseID(disk.Volume, req.GetVolumeId())
	at, badPath := n.oldPlace("staging target path", req.GetStagingTargetPath())
	if err := refusal(badID, badPath); err != nil {
		return nil, err
	}
	h, r, err := n.pool.Take(id)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	return &csi.NodeUnstageVolumeResponse{}, n.unstage(ctx, h, r, at)
}

func (n *node) unstage(ctx context.Context, h *disk.Hold, r disk.Record, at mount.Place) error {
	now, err := n.look(r)
	if err != nil {
		return err
	}
	staged, err := now.staged()
	if now.stage.Path != at.String() && (staged || err != nil || now.stage.Path == "") {
		return n.takeDown(r, at) // not staged here; a mount without a record is taken down all the same
	}
	for target := range now.stage.Published {
		if len(now.table.Stack(target)) > 0 {
			return disk.Errorf(disk.ErrInUse, "volume %s is still published at %s", r.ID, target)
		}
	}
	if err := n.putAway(now, at); err != nil {
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

// awaitRelease gives the kernel a moment to free the loop device, so that a delete right after this one succeeds.
// Something else may keep the device (a copy of the mount in another namespace); the volume is unstaged all the same.
func awaitRelease(ctx context.Context, now here) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for {
		if who, err := now.backend.HeldBy(now.record.ID); who == "" || err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}
