package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// NodeStageVolume mounts a volume at its one staging path on this node.
func (n *node) NodeStageVolume(_ context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	id, badID := disk.ParseID(req.GetVolumeId())
	a, badAccess := readAccess(req.GetVolumeCapability())
	at, badPath := n.place("staging target path", req.GetStagingTargetPath())
	if err := refusal(badID, badAccess, missingParent(badPath)); err != nil {
		return nil, err
	}
	h, err := n.pool.Lock(id)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	r, err := h.Find()
	if err != nil {
		return nil, err
	}
	if err := mayUse(r, n.id, n.attach, req.GetPublishContext()); err != nil {
		return nil, err
	}
	if r.Attached[n.id].ReadOnly {
		a.flags = a.flags.ReadOnly()
	}
	return &csi.NodeStageVolumeResponse{}, n.stage(h, r, at, a)
}

// missingParent gives an answer to a caller that did not make the directories which are its to make.
func missingParent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return disk.Errorf(disk.ErrInUse, "the caller has to make the directory above first: %w", err)
	}
	return err
}

func (n *node) stage(h *disk.Hold, r disk.Record, at mount.Place, a access) error {
	if !fits(r.Usage, a.usage) {
		return disk.Errorf(disk.ErrInUse, "volume %s was made for mode %s, not for %s", r.ID, r.Usage.Mode, a.usage.Mode)
	}
	now, err := n.look(r)
	if err != nil {
		return err
	}
	done, err := n.staged(now, r, at, a.usage)
	if err != nil || done {
		return err
	}
	st := r.Staged[n.id] // publishes that were never taken down stay on record
	st.Path, st.Usage, st.Boot = at.String(), a.usage, n.pool.Boot()
	if err := h.Save(r.WithStage(n.id, &st)); err != nil {
		return err
	}
	if err := now.backend.Mount(r.ID, at, a.flags); err != nil {
		return errors.Join(missingParent(err), n.giveUpStage(h, r, at))
	}
	return nil
}

// staged says whether the volume is staged exactly so. Staged otherwise is an error.
func (n *node) staged(now here, r disk.Record, at mount.Place, usage disk.Usage) (bool, error) {
	st, recorded := r.Staged[n.id]
	if recorded && st.Path != at.String() {
		if shown, err := now.shown(st.Path); shown || err != nil {
			return false, errors.Join(disk.Errorf(disk.ErrExists, "volume %s is staged at %s already", r.ID, st.Path), err)
		}
	}
	shown, err := now.shown(at.String())
	if err != nil || !shown {
		return false, err
	}
	if !recorded || st.Path != at.String() || st.Usage != usage {
		return false, disk.Errorf(disk.ErrExists, "volume %s is staged at %s for another usage", r.ID, at)
	}
	return true, nil
}

// giveUpStage takes the record of a stage back that did not come to be.
func (n *node) giveUpStage(h *disk.Hold, r disk.Record, at mount.Place) error {
	if err := n.takeDown(r, at); err != nil {
		return err
	}
	if st := r.Staged[n.id]; len(st.Published) > 0 {
		return h.Save(r)
	}
	return h.Save(r.WithStage(n.id, nil))
}

// NodeUnstageVolume takes the staging mount away. The volume must not be published on this node any more.
func (n *node) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	id, badID := disk.ParseID(req.GetVolumeId())
	at, badPath := n.oldPlace("staging target path", req.GetStagingTargetPath())
	if err := refusal(badID, badPath); err != nil {
		return nil, err
	}
	h, err := n.pool.Lock(id)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	r, err := h.Find()
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnstageVolumeResponse{}, n.unstage(ctx, h, r, at)
}

func (n *node) unstage(ctx context.Context, h *disk.Hold, r disk.Record, at mount.Place) error {
	now, err := n.look(r)
	if err != nil {
		return err
	}
	st, recorded := r.Staged[n.id]
	if !recorded || st.Path != at.String() && now.table.At(st.Path) != nil {
		return n.takeDown(r, at) // not staged here; a mount without a record is taken down all the same
	}
	for target := range st.Published {
		if now.table.At(target) != nil {
			return disk.Errorf(disk.ErrInUse, "volume %s is still published at %s", r.ID, target)
		}
	}
	if err := n.takeDown(r, at); err != nil {
		return err
	}
	for target := range st.Published {
		if err := n.removeTarget(target); err != nil {
			return err
		}
	}
	awaitRelease(ctx, now)
	return h.Save(r.WithStage(n.id, nil))
}

// awaitRelease gives the kernel a moment to free the loop device, so that a delete right after this one succeeds. Something
// else may keep the device (a copy of the mount in another namespace); the volume is unstaged all the same.
func awaitRelease(ctx context.Context, now here) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for {
		if who, err := now.backend.HeldBy(now.id); who == "" || err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// removeTarget removes the directory of a publish that is mounted no more.
func (n *node) removeTarget(target string) error {
	at, err := mount.Resolve(target)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("target path: %w", err)
	}
	return at.Remove()
}
