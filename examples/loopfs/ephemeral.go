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

// The caller chooses the ID of an ephemeral (inline) volume. Its publish makes it empty at its one target, and its
// unpublish removes it. Its record has the target as its staging path.

// parseVolumeID parses a volume ID of a node call. An ID that CreateVolume did not return may be that of an ephemeral
// volume.
func parseVolumeID(volumeID string) (disk.ID, error) {
	id, err := disk.ParseID(disk.Volume, volumeID)
	if status.Code(err) == codes.NotFound {
		return disk.IDFor(disk.Ephemeral, disk.Name(volumeID)), nil
	}
	return id, err
}

func (n *node) publishEphemeral(
	ctx context.Context, req *csi.NodePublishVolumeRequest, p publication, badRequest error,
) error {
	id, badID := parseVolumeID(req.GetVolumeId())
	var badSize, badAccess error
	if badID == nil && id.Kind() == disk.Volume {
		badID = status.Error(codes.InvalidArgument, "an ephemeral volume cannot have an ID of CreateVolume")
	}
	var size int64
	if text, ok := req.GetVolumeContext()[sizeKey]; ok {
		if size, badSize = parseSize(text); badSize != nil {
			badSize = status.Errorf(codes.InvalidArgument, "volume context %s=%.16q: %v", sizeKey, text, badSize)
		}
	}
	if p.access.usage.Access == disk.Raw {
		badAccess = status.Error(codes.InvalidArgument, "an ephemeral volume needs the access type mount")
	}
	if err := cmp.Or(badID, badSize, badAccess, badRequest); err != nil {
		return err
	}
	if p.ReadOnly {
		p.access.flags = p.access.flags.ReadOnly()
	}
	if n.pool.NewVolumes == disk.LoopBackend {
		p.access.usage.FileSystem = cmp.Or(p.access.usage.FileSystem, n.pool.FileSystem)
	}
	st := disk.Stage{Path: p.to, Usage: p.access.usage, Boot: n.pool.Boot()}.WithPublish(p.to, &p.Publish)
	want := disk.Request{Name: disk.Name(req.GetVolumeId()), AtLeast: size, Usage: p.access.usage,
		Staged: map[string]disk.Stage{n.id: st}}
	h, err := n.pool.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	if err == nil {
		if done, err := n.existing(h, r, want); done || err != nil {
			return err
		}
	} else if known(err) != nil {
		return err
	}
	return n.makeEphemeral(ctx, h, want, p)
}

// existing reports whether the volume is published as requested. A volume that is incomplete or not mounted is removed.
func (n *node) existing(h *disk.Hold, r disk.Record, want disk.Request) (bool, error) {
	v, err := n.inspect(r)
	if err != nil {
		return false, err
	}
	staged, err := v.staged()
	if err != nil || !staged {
		return false, cmp.Or(err, n.pool.Discard(h, r))
	}
	at := want.Staged[n.id].Path
	bytes, err := n.pool.SizeOf(want, 0)
	switch {
	case err != nil:
		return false, err
	case v.stage.Path != at:
		return false, status.Errorf(codes.FailedPrecondition, "the ephemeral volume is published at %s, and can have one "+
			"target", v.stage.Path)
	case v.stage.Usage != want.Usage, v.stage.Published[at] != want.Staged[n.id].Published[at], r.Bytes != bytes:
		return false, status.Errorf(codes.AlreadyExists, "the ephemeral volume is published at %s for %s", at, v.stage.Usage)
	}
	return true, nil
}

func (n *node) makeEphemeral(ctx context.Context, h *disk.Hold, want disk.Request, p publication) error {
	r, err := n.pool.CreateEmpty(ctx, h, want)
	if err == nil {
		err = mount.Make(p.to, false)
	} else {
		return err
	}
	if err == nil {
		err = n.pool.Backend(r.Backend).Mount(ctx, r, p.to, disk.MountOptions{
			FileSystem: want.Usage.FileSystem, Flags: p.access.flags, Group: want.Usage.Group,
		})
	}
	if err == nil {
		return nil
	}
	undo := n.removeEphemeral(context.WithoutCancel(ctx), h, r, p.to)
	if foreign(undo) {
		undo = n.pool.Discard(h, r)
	}
	return errors.Join(err, undo)
}

// unpublishEphemeral unmounts and removes a volume. A missing volume is no error.
func (n *node) unpublishEphemeral(ctx context.Context, id disk.ID, at string) error {
	h, err := n.pool.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	switch {
	case known(err) != nil:
		return err
	case err != nil || r.Staged[n.id].Path != at:
		return n.takeDown(disk.Record{ID: id, Backend: n.pool.NewVolumes}, at) // what is mounted there is something else
	}
	return n.removeEphemeral(ctx, h, r, at)
}

func (n *node) removeEphemeral(ctx context.Context, h *disk.Hold, r disk.Record, at string) error {
	if err := n.takeDown(r, at); err != nil {
		return err
	}
	if err := mount.Remove(at, false); err != nil {
		return err
	}
	if v, err := n.inspect(r); err == nil {
		v.awaitRelease(ctx)
	}
	return n.pool.Discard(h, r)
}
