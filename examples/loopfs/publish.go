package main

import (
	"cmp"
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// publication is a requested publish of a volume.
type publication struct {
	from, to string
	access   access
	disk.Publish
}

// NodePublishVolume mounts a staged volume at a target path. The caller makes the parent directory, loopfs the target.
func (n *node) NodePublishVolume(
	ctx context.Context, req *csi.NodePublishVolumeRequest,
) (*csi.NodePublishVolumeResponse, error) {
	to, badTarget := n.place("target path", req.GetTargetPath(), true)
	a, badAccess := readAccess(req.GetVolumeCapability())
	p := publication{to: to, access: a, Publish: disk.Publish{Mode: a.usage.Mode,
		ReadOnly: req.GetReadonly() || a.usage.Mode == disk.Reader}}
	if req.GetVolumeContext()[ephemeralKey] == "true" {
		return &csi.NodePublishVolumeResponse{}, n.publishEphemeral(ctx, req, p, cmp.Or(badAccess, badTarget))
	}
	from, badStaging := n.place("staging target path", req.GetStagingTargetPath(), true)
	if req.GetStagingTargetPath() == "" {
		badStaging = status.Error(codes.FailedPrecondition, "the staging target path is missing: stage the volume first")
	} else if badStaging == nil && badTarget == nil && (mount.Inside(to, from) || mount.Inside(from, to)) {
		badStaging = status.Error(codes.InvalidArgument, "the target path and the staging target path overlap")
	}
	if err := cmp.Or(badAccess, badTarget, badStaging); err != nil {
		return nil, err
	}
	h, r, err := n.pool.Acquire(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer h.Release()
	if err := n.checkAttachment(r, req.GetPublishContext()); err != nil {
		return nil, err
	}
	p.from = from
	return &csi.NodePublishVolumeResponse{}, n.publish(h, r, p)
}

func (n *node) publish(h *disk.Hold, r disk.Record, p publication) error {
	v, err := n.inspect(r)
	if err != nil {
		return err
	}
	if err := v.stageFor(p); err != nil {
		return err
	}
	if p.access.usage.Access == disk.Raw {
		if p.Device, err = v.devices.Attach(r, p.ReadOnly || v.readOnly()); err != nil {
			return err
		}
	}
	if shown, err := v.shown(p.to); err != nil || shown {
		if err == nil && v.stage.Published[p.to] != p.Publish {
			err = status.Errorf(codes.AlreadyExists, "volume %s is published at %s for another usage", r.ID, p.to)
		}
		return err
	}
	for target, other := range v.stage.Published { // see the table of NodePublishVolume in the specification
		if target != p.to && len(v.table.Stack(target)) > 0 && (other.Mode != disk.MultiWriter ||
			p.Mode != disk.MultiWriter) {
			return status.Errorf(codes.FailedPrecondition, "the volume is published at %s, and its access mode allows only "+
				"one target", target)
		}
	}
	next := v.stage.WithPublish(p.to, &p.Publish)
	if err := h.Save(r.WithStage(n.id, &next)); err != nil {
		return err
	}
	if err := bind(p); err != nil {
		undo := n.takeDown(r, p.to)
		if undo == nil {
			undo = mount.Remove(p.to, p.Device != "")
		}
		if undo == nil || foreign(undo) {
			undo = h.Save(r)
		}
		return errors.Join(err, undo)
	}
	return nil
}

// stageFor checks that the volume is staged at the requested path, with a capability that includes the requested one.
func (v view) stageFor(p publication) error {
	staged, err := v.staged()
	have, requested := v.stage.Usage, p.access.usage
	switch {
	case err != nil:
		return err
	case !staged || v.stage.Path != p.from:
		return status.Errorf(codes.FailedPrecondition, "volume %s is not staged at %s: stage it first", v.record.ID, p.from)
	case !have.Fits(requested) || have.Flags != requested.Flags || have.Group != requested.Group:
		return status.Errorf(codes.FailedPrecondition, "volume %s is staged for %s", v.record.ID, have)
	}
	return nil
}

// bind mounts the staging mount or the device at the target.
func bind(p publication) error {
	source, flags := p.from, mount.Flags{} // the flags of the staging mount are kept
	if p.ReadOnly {
		flags = flags.ReadOnly()
	}
	if p.Device != "" {
		source = p.Device
	}
	if err := mount.Make(p.to, p.Device != ""); err != nil {
		return err
	}
	tree, err := mount.Bind(source)
	if err != nil {
		return err
	}
	defer tree.Close()
	return tree.Attach(p.to, flags)
}

// NodeUnpublishVolume unmounts a volume from a target path and removes the target.
func (n *node) NodeUnpublishVolume(
	ctx context.Context, req *csi.NodeUnpublishVolumeRequest,
) (*csi.NodeUnpublishVolumeResponse, error) {
	id, badID := parseVolumeID(req.GetVolumeId())
	at, badPath := n.place("target path", req.GetTargetPath(), false)
	if err := cmp.Or(badID, badPath); err != nil {
		return nil, err
	}
	if id.Kind() == disk.Ephemeral {
		return &csi.NodeUnpublishVolumeResponse{}, n.unpublishEphemeral(ctx, id, at)
	}
	h, r, err := n.pool.Acquire(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer h.Release()
	st := r.Staged[n.id]
	if at == st.Path {
		return nil, status.Errorf(codes.InvalidArgument, "%s is the staging target path: use NodeUnstageVolume", at)
	}
	if err := n.takeDown(r, at); err != nil {
		return nil, err
	}
	if _, recorded := st.Published[at]; !recorded { // never published there, or unpublished: the directory is not ours
		return &csi.NodeUnpublishVolumeResponse{}, nil
	}
	if err := mount.Remove(at, st.Usage.Access == disk.Raw); err != nil {
		return nil, err
	}
	st = st.WithPublish(at, nil)
	return &csi.NodeUnpublishVolumeResponse{}, h.Save(r.WithStage(n.id, &st))
}
