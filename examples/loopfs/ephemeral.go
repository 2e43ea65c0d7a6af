package main

import (
	"cmp"
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// The caller chooses the ID of an ephemeral (inline) volume. Its publish makes it empty at its one target, and its
// unpublish removes it. No other call knows it, so a start removes one that is not mounted.

// parseVolumeID parses a volume ID of a node call. An ID that CreateVolume did not return may be that of an ephemeral
// volume.
func parseVolumeID(volumeID string) (disk.ID, error) {
	id, err := disk.ParseID(disk.Volume, volumeID)
	if errors.Is(err, disk.ErrNotFound) {
		return disk.IDFor(disk.Ephemeral, disk.Name(volumeID)), nil
	}
	return id, err
}

// inline is a requested ephemeral volume.
type inline struct {
	publication
	id   disk.ID
	want disk.Request
}

func (n *node) inline(req *csi.NodePublishVolumeRequest) (inline, error) {
	id, badID := parseVolumeID(req.GetVolumeId())
	if badID == nil && id.Kind() == disk.Volume {
		badID = disk.Errorf(disk.ErrInvalid, "an ephemeral volume cannot have an ID of CreateVolume")
	}
	p, badRest := n.target(req)
	var size byteSize
	var badSize error
	if text, ok := req.GetVolumeContext()[sizeKey]; ok && size.Set(text) != nil {
		badSize = disk.Errorf(disk.ErrInvalid, "volume context %s=%.16q: want a number of bytes, or 64MiB", sizeKey,
			text)
	}
	if err := refusal(badID, badSize, badRest); err != nil {
		return inline{}, err
	}
	if p.access.usage.Access == disk.Raw {
		return inline{}, disk.Errorf(disk.ErrInvalid, "an ephemeral volume needs the access type mount")
	}
	if err := n.pool.Backends[n.pool.NewVolumes].Supports(p.access.usage); err != nil {
		return inline{}, err
	}
	if p.readOnly {
		p.access.flags = p.access.flags.ReadOnly()
	}
	if n.pool.NewVolumes == disk.LoopBackend {
		p.access.usage.FileSystem = cmp.Or(p.access.usage.FileSystem, n.pool.FileSystem)
	}
	return inline{p, id, disk.Request{Name: disk.Name(req.GetVolumeId()), AtLeast: int64(size), Usage: p.access.usage}},
		nil
}

func (n *node) publishEphemeral(ctx context.Context, req *csi.NodePublishVolumeRequest) error {
	in, err := n.inline(req)
	if err != nil {
		return err
	}
	h, err := n.pool.Lock(in.id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	switch {
	case err == nil:
		if done, err := n.existingEphemeral(h, r, in); done || err != nil {
			return err
		}
	case !errors.Is(err, disk.ErrNotFound):
		return err
	}
	return n.makeEphemeral(ctx, h, in)
}

// existingEphemeral reports whether the volume is published as requested. A volume that is incomplete or not mounted is
// removed.
func (n *node) existingEphemeral(h *disk.Hold, r disk.Record, in inline) (bool, error) {
	now, err := n.inspect(r)
	if err != nil {
		return false, err
	}
	staged, err := now.staged()
	switch {
	case err != nil:
		return false, err
	case !staged:
		return false, n.pool.Discard(h, r)
	case now.stage.Path != in.to.String():
		return false, disk.Errorf(disk.ErrInUse, "the ephemeral volume is published at %s, and can have one target",
			now.stage.Path)
	}
	bytes, err := n.pool.SizeOf(in.want)
	have := now.stage.Published[in.to.String()]
	if err == nil && (now.stage.Usage != in.access.usage || have.ReadOnly != in.readOnly || r.Bytes != bytes) {
		err = disk.Errorf(disk.ErrExists, "the ephemeral volume is published at %s for %s", in.to,
			now.stage.Usage)
	}
	return true, err
}

func (n *node) makeEphemeral(ctx context.Context, h *disk.Hold, in inline) error {
	st := disk.Stage{Path: in.to.String(), Usage: in.access.usage, Boot: n.pool.Boot()}
	st = st.WithPublish(st.Path, &disk.Publish{Mode: st.Usage.Mode, ReadOnly: in.readOnly})
	r, err := n.pool.MakeEphemeral(ctx, h, in.want, n.id, st)
	if err != nil {
		return err
	}
	b, err := n.pool.Backend(r)
	if err == nil {
		err = in.to.Make()
	}
	if err == nil {
		err = b.Mount(ctx, r.ID, in.to, disk.MountOptions{
			Bytes: r.Bytes, FileSystem: st.Usage.FileSystem, Flags: in.access.flags, Group: st.Usage.Group,
		})
	}
	if err == nil {
		return nil
	}
	undoErr := n.removeEphemeral(context.WithoutCancel(ctx), h, r, in.to)
	if foreign(undoErr) {
		undoErr = n.pool.Discard(h, r)
	}
	return errors.Join(err, undoErr)
}

// unpublishEphemeral unmounts and removes a volume. A missing volume is no error.
func (n *node) unpublishEphemeral(ctx context.Context, id disk.ID, at mount.Place) error {
	h, err := n.pool.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	if errors.Is(err, disk.ErrNotFound) {
		r, err = disk.Record{ID: id, Backend: n.pool.NewVolumes}, nil
	}
	if err != nil {
		return err
	}
	if r.Staged[n.id].Path != at.String() {
		return n.takeDown(r, at) // what is mounted there is something else
	}
	return n.removeEphemeral(ctx, h, r, at)
}

func (n *node) removeEphemeral(ctx context.Context, h *disk.Hold, r disk.Record, at mount.Place) error {
	if err := n.takeDown(r, at); err != nil {
		return err
	}
	if err := removeTarget(r.Staged[n.id], at.String()); err != nil {
		return err
	}
	if now, err := n.inspect(r); err == nil {
		awaitRelease(ctx, now)
	}
	return n.pool.Discard(h, r)
}

// recoverEphemeral removes a volume that a kill or a reboot unmounted.
func (n *node) recoverEphemeral(id disk.ID) error {
	h, err := n.pool.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	if err != nil {
		return err
	}
	now, err := n.inspect(r)
	if err != nil {
		return err
	}
	user, err := now.backend.HeldBy(id)
	if len(now.table.Stack(now.stage.Path)) > 0 || user != "" || err != nil {
		return err
	}
	n.log.Info("removing an ephemeral volume that is not mounted", "volume", r.Name, "path", now.stage.Path)
	if err := removeTarget(now.stage, now.stage.Path); err != nil {
		return err
	}
	return n.pool.Discard(h, r)
}
