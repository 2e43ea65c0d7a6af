package main

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// publication is a requested publish of a volume.
type publication struct {
	from, to mount.Place
	access   access
	readOnly bool
	device   string // of a raw volume, when it is known
}

// NodePublishVolume mounts a staged volume at a target path. The caller makes the parent directory, loopfs the target.
func (n *node) NodePublishVolume(
	ctx context.Context, req *csi.NodePublishVolumeRequest,
) (*csi.NodePublishVolumeResponse, error) {
	if req.GetVolumeContext()[ephemeralKey] == "true" {
		return &csi.NodePublishVolumeResponse{}, n.publishEphemeral(ctx, req)
	}
	id, badID := disk.ParseID(disk.Volume, req.GetVolumeId())
	p, badRest := n.publication(req)
	if err := refusal(badID, badRest); err != nil {
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
	return &csi.NodePublishVolumeResponse{}, n.publish(h, r, p)
}

func (n *node) publication(req *csi.NodePublishVolumeRequest) (publication, error) {
	p, err := n.target(req)
	if err != nil {
		return publication{}, err
	}
	if req.GetStagingTargetPath() == "" {
		return publication{}, disk.Errorf(disk.ErrInUse, "the staging target path is missing: stage the volume first")
	}
	if p.from, err = n.place("staging target path", req.GetStagingTargetPath()); err != nil {
		return publication{}, missingParent(err)
	}
	if mount.Inside(p.to.String(), p.from.String()) || mount.Inside(p.from.String(), p.to.String()) {
		return publication{}, disk.Errorf(disk.ErrInvalid, "the target path and the staging target path overlap")
	}
	return p, nil
}

// target parses what publishes of ephemeral and other volumes have in common.
func (n *node) target(req *csi.NodePublishVolumeRequest) (publication, error) {
	a, err := readAccess(req.GetVolumeCapability())
	if err != nil {
		return publication{}, err
	}
	to, err := n.place("target path", req.GetTargetPath())
	if err != nil {
		return publication{}, missingParent(err)
	}
	return publication{to: to, access: a, readOnly: req.GetReadonly() || a.usage.Mode == disk.Reader}, nil
}

func (n *node) publish(h *disk.Hold, r disk.Record, p publication) error {
	now, err := n.inspect(r)
	if err != nil {
		return err
	}
	if err := now.stageFor(p); err != nil {
		return err
	}
	if p.device, err = now.deviceFor(p); err != nil {
		return err
	}
	if done, err := now.published(p); done || err != nil {
		return err
	}
	if err := now.checkSingleTarget(p); err != nil {
		return err
	}
	next := now.stage.WithPublish(p.to.String(), &disk.Publish{Mode: p.access.usage.Mode, ReadOnly: p.readOnly,
		Device: p.device})
	if err := h.Save(r.WithStage(n.id, &next)); err != nil {
		return err
	}
	if err := bind(p); err != nil {
		return errors.Join(err, n.undoPublish(h, r, p))
	}
	return nil
}

// stageFor checks that the volume is staged at the requested path, with a capability that includes the requested one.
func (v view) stageFor(p publication) error {
	staged, err := v.staged()
	if err != nil {
		return err
	}
	if !staged || v.stage.Path != p.from.String() {
		return disk.Errorf(disk.ErrInUse, "volume %s is not staged at %s: stage it first", v.record.ID, p.from)
	}
	have, requested := v.stage.Usage, p.access.usage
	if !have.Fits(requested) || have.Flags != requested.Flags || have.Group != requested.Group {
		return disk.Errorf(disk.ErrInUse, "volume %s is staged for %s", v.record.ID, have)
	}
	return nil
}

// deviceFor returns the device of a raw volume, the read-only one for a read-only publish.
func (v view) deviceFor(p publication) (string, error) {
	if p.access.usage.Access != disk.Raw {
		return "", nil
	}
	d, err := v.devices()
	if err != nil {
		return "", err
	}
	device, err := d.Attach(v.record.ID, p.readOnly || v.readOnly())
	if err != nil {
		return "", err
	}
	return device, v.tune()
}

// published reports whether the volume is published at the target as requested. Another publish of it there is an
// error.
func (v view) published(p publication) (bool, error) {
	shown, err := v.shown(p.to.String())
	if err != nil || !shown {
		return false, err
	}
	have, ok := v.stage.Published[p.to.String()]
	if !ok || have.Mode != p.access.usage.Mode || have.ReadOnly != p.readOnly || have.Device != p.device {
		return false, disk.Errorf(disk.ErrExists, "volume %s is published at %s for another usage", v.record.ID, p.to)
	}
	return true, nil
}

// checkSingleTarget refuses a second target, unless both are for many writers (the table of NodePublishVolume in the
// specification).
func (v view) checkSingleTarget(p publication) error {
	for target, other := range v.stage.Published {
		if target == p.to.String() || len(v.table.Stack(target)) == 0 {
			continue
		}
		if other.Mode != disk.MultiWriter || p.access.usage.Mode != disk.MultiWriter {
			return disk.Errorf(disk.ErrInUse, "the volume is published at %s, and its access mode allows only one target",
				target)
		}
	}
	return nil
}

func bind(p publication) error {
	flags := mount.Flags{} // the flags of the staging mount are kept
	if p.readOnly {
		flags = flags.ReadOnly()
	}
	if p.device != "" {
		if err := p.to.MakeFile(); err != nil {
			return err
		}
		return p.to.BindFile(p.device, flags)
	}
	if err := p.to.Make(); err != nil {
		return err
	}
	return p.to.BindFrom(p.from, flags)
}

// undoPublish removes the record and the target of a publish that failed.
func (n *node) undoPublish(h *disk.Hold, before disk.Record, p publication) error {
	if err := n.takeDown(before, p.to); err != nil {
		return err
	}
	if err := clean(before.Staged[n.id], p.to); err != nil && !foreign(err) {
		return err
	}
	return h.Save(before)
}

// foreign reports whether a target was not removed because loopfs did not make it: it is of another type, or not empty.
func foreign(err error) bool { return errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENOTEMPTY) }

// NodeUnpublishVolume unmounts a volume from a target path and removes the target.
func (n *node) NodeUnpublishVolume(
	ctx context.Context, req *csi.NodeUnpublishVolumeRequest,
) (*csi.NodeUnpublishVolumeResponse, error) {
	id, badID := parseVolumeID(req.GetVolumeId())
	at, badPath := n.placeToUnmount("target path", req.GetTargetPath())
	if err := refusal(badID, badPath); err != nil {
		return nil, err
	}
	if id.Kind() == disk.Ephemeral {
		return &csi.NodeUnpublishVolumeResponse{}, n.unpublishEphemeral(ctx, id, at)
	}
	h, r, err := n.pool.Acquire(id)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	return &csi.NodeUnpublishVolumeResponse{}, n.unpublish(h, r, at)
}

func (n *node) unpublish(h *disk.Hold, r disk.Record, at mount.Place) error {
	st := r.Staged[n.id]
	if at.String() == st.Path {
		return disk.Errorf(disk.ErrInvalid, "%s is the staging target path: use NodeUnstageVolume", at)
	}
	if err := n.takeDown(r, at); err != nil {
		return err
	}
	if _, recorded := st.Published[at.String()]; !recorded {
		return nil // never published there, or unpublished before: the directory is not ours
	}
	if err := clean(st, at); err != nil {
		return err
	}
	st = st.WithPublish(at.String(), nil)
	return h.Save(r.WithStage(n.id, &st))
}
