package main

import (
	"cmp"
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/mount"
)

// The caller chooses the ID of an inline (ephemeral) volume. Its publish makes it and stages it at its one target, and
// its unpublish removes it.

// parseNodeID parses a volume ID of a node call. An ID that CreateVolume did not return may be that of an inline volume.
func parseNodeID(text string) (volumeID, error) {
	id, err := parseID(volumeKind, text)
	if status.Code(err) == codes.NotFound {
		return idFor(inlineKind, text), nil
	}
	return id, err
}

func (d *driver) publishInline(
	ctx context.Context, req *csi.NodePublishVolumeRequest, to string, a access, badRequest error,
) error {
	id, err := parseNodeID(req.GetVolumeId())
	if err := cmp.Or(err, badRequest); err != nil {
		return err
	}
	size := &csi.CapacityRange{}
	if text, ok := req.GetVolumeContext()[sizeKey]; ok {
		if size.RequiredBytes, err = parseSize(text); err != nil {
			return status.Errorf(codes.InvalidArgument, "volume context %s=%.16q: %v", sizeKey, text, err)
		}
	}
	if a.usage.Block || id.kind() == volumeKind {
		return status.Error(codes.InvalidArgument, "an inline volume has access type mount, and no ID of CreateVolume")
	}
	if req.GetReadonly() {
		a.usage.Mode = readerMode
	}
	unlock, err := d.lock(id)
	if err != nil {
		return err
	}
	defer unlock()
	if done, err := d.inlineExists(id, to, a.usage); done || err != nil {
		return err
	}
	r, err := d.createEmpty(ctx, record{ID: id, Usage: usage{Mode: a.usage.Mode}}, size)
	if err != nil {
		return err
	}
	if err = mount.Make(to, false); err == nil {
		err = d.stage(ctx, r, to, a)
	}
	if err != nil {
		return errors.Join(err, removeTarget(r, to), d.removeUnused(context.WithoutCancel(ctx), r))
	}
	return nil
}

// inlineExists reports whether the volume is published as requested. A volume that is not mounted is removed.
func (d *driver) inlineExists(id volumeID, to string, u usage) (bool, error) {
	r, err := d.load(id)
	if err != nil {
		return false, known(err)
	}
	staged, err := d.staged(r)
	switch {
	case err != nil:
		return false, err
	case !staged:
		return false, d.remove(id)
	case r.Stage.Path != to || r.Stage.Usage != u:
		return false, status.Errorf(codes.AlreadyExists, "the inline volume is published at %s for %s", r.Stage.Path,
			r.Stage.Usage)
	}
	return true, nil
}

// unpublishInline unmounts and removes a volume. A missing volume is no error.
func (d *driver) unpublishInline(ctx context.Context, id volumeID, at string) error {
	unlock, err := d.lock(id)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := d.load(id)
	switch {
	case known(err) != nil:
		return err
	case err != nil || r.Stage != nil && r.Stage.Path != at:
		return d.takeDown(record{ID: id, Backend: d.newVolumes}, at) // what is mounted there is something else
	}
	if err := d.takeDown(r, at); err != nil {
		return err
	}
	if err := removeTarget(r, at); err != nil {
		return err
	}
	return d.removeUnused(ctx, r)
}
