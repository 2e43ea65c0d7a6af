package main

import (
	"cmp"
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// An ephemeral (inline) volume has an id of its caller's, is made empty by the publish that names it, is at one target,
// and is gone with its unpublish. Nothing but its publish and its unpublish knows it, so a start removes one that is
// mounted no more.

// known is the id of a volume that a caller of the node names: what CreateVolume did not make may be an ephemeral one.
func known(volumeID string) (disk.ID, error) {
	id, err := disk.ParseID(disk.Volume, volumeID)
	if errors.Is(err, disk.ErrNotFound) {
		return disk.IDFor(disk.Ephemeral, disk.Name(volumeID)), nil
	}
	return id, err
}

// inline is an ephemeral volume as a caller asks for it.
type inline struct {
	publication
	id   disk.ID
	want disk.Wanted
}

func (n *node) inline(req *csi.NodePublishVolumeRequest) (inline, error) {
	id, badID := known(req.GetVolumeId())
	if badID == nil && id.Kind() == disk.Volume {
		badID = disk.Errorf(disk.ErrInvalid, "an ephemeral volume cannot have the id of one that CreateVolume makes")
	}
	p, badRest := n.target(req)
	var size byteSize
	var badSize error
	if text, ok := req.GetVolumeContext()[sizeKey]; ok && size.Set(text) != nil {
		badSize = disk.Errorf(disk.ErrInvalid, "volume context %s=%.16q: want bytes, or a number as 64MiB", sizeKey,
			text)
	}
	if err := refusal(badID, badSize, badRest); err != nil {
		return inline{}, err
	}
	if p.access.usage.Access == disk.Raw {
		return inline{}, disk.Errorf(disk.ErrInvalid, "an ephemeral volume is a file system: ask for access type mount")
	}
	if err := n.pool.Backends[n.pool.Making].Takes(p.access.usage); err != nil {
		return inline{}, err
	}
	if p.readOnly {
		p.access.flags = p.access.flags.ReadOnly()
	}
	if n.pool.Making == disk.LoopBackend {
		p.access.usage.FileSystem = cmp.Or(p.access.usage.FileSystem, n.pool.FileSystem)
	}
	return inline{p, id, disk.Wanted{Name: disk.Name(req.GetVolumeId()), AtLeast: int64(size), Usage: p.access.usage}},
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
		if done, err := n.settleEphemeral(h, r, in); done || err != nil {
			return err
		}
	case !errors.Is(err, disk.ErrNotFound):
		return err
	}
	return n.bringEphemeral(ctx, h, in)
}

// settleEphemeral says whether the volume is there already. One that is half made, or mounted no more, is removed.
func (n *node) settleEphemeral(h *disk.Hold, r disk.Record, in inline) (bool, error) {
	now, err := n.look(r)
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
		return false, disk.Errorf(disk.ErrInUse, "the ephemeral volume is published at %s, and has one target",
			now.stage.Path)
	}
	bytes, err := n.pool.SizeOf(in.want)
	have := now.stage.Published[in.to.String()]
	if err == nil && (now.stage.Usage != in.access.usage || have.ReadOnly != in.readOnly || r.Bytes != bytes) {
		err = disk.Errorf(disk.ErrExists, "the ephemeral volume is published at %s for another usage (%s)", in.to,
			now.stage.Usage)
	}
	return true, err
}

func (n *node) bringEphemeral(ctx context.Context, h *disk.Hold, in inline) error {
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
		err = b.Mount(ctx, r.ID, in.to, disk.Mounting{
			Bytes: r.Bytes, FileSystem: st.Usage.FileSystem, Flags: in.access.flags, Group: st.Usage.Group,
		})
	}
	if err == nil {
		return nil
	}
	undone := n.endEphemeral(context.WithoutCancel(ctx), h, r, in.to)
	if foreign(undone) {
		undone = n.pool.Discard(h, r)
	}
	return errors.Join(err, undone)
}

// unpublishEphemeral takes the volume down and away. One that does not exist was taken away before.
func (n *node) unpublishEphemeral(ctx context.Context, id disk.ID, at mount.Place) error {
	h, err := n.pool.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Load()
	if errors.Is(err, disk.ErrNotFound) {
		r, err = disk.Record{ID: id, Backend: n.pool.Making}, nil
	}
	if err != nil {
		return err
	}
	if r.Staged[n.id].Path != at.String() {
		return n.takeDown(r, at) // what is mounted there is something else
	}
	return n.endEphemeral(ctx, h, r, at)
}

func (n *node) endEphemeral(ctx context.Context, h *disk.Hold, r disk.Record, at mount.Place) error {
	if err := n.takeDown(r, at); err != nil {
		return err
	}
	if err := removeTarget(r.Staged[n.id], at.String()); err != nil {
		return err
	}
	if now, err := n.look(r); err == nil {
		awaitRelease(ctx, now)
	}
	return n.pool.Discard(h, r)
}

// recoverEphemeral removes a volume that a kill or a reboot took from its target.
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
	now, err := n.look(r)
	if err != nil {
		return err
	}
	who, err := now.backend.HeldBy(id)
	if len(now.table.Stack(now.stage.Path)) > 0 || who != "" || err != nil {
		return err
	}
	n.log.Info("remove an ephemeral volume that is published no more", "volume", r.Name, "path", now.stage.Path)
	if err := removeTarget(now.stage, now.stage.Path); err != nil {
		return err
	}
	return n.pool.Discard(h, r)
}
