package main

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// publication is one volume at one target, as a caller asks for it.
type publication struct {
	from, to mount.Place
	access   access
	readOnly bool
}

// NodePublishVolume shows a staged volume at a target path. The directory above has to be there; the target is made.
func (n *node) NodePublishVolume(_ context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	id, badID := disk.ParseID(req.GetVolumeId())
	p, badRest := n.publication(req)
	if err := refusal(badID, badRest); err != nil {
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
	return &csi.NodePublishVolumeResponse{}, n.publish(h, r, p)
}

func (n *node) publication(req *csi.NodePublishVolumeRequest) (publication, error) {
	a, err := readAccess(req.GetVolumeCapability())
	if err != nil {
		return publication{}, err
	}
	to, err := n.place("target path", req.GetTargetPath())
	if err != nil {
		return publication{}, missingParent(err)
	}
	if req.GetStagingTargetPath() == "" {
		return publication{}, disk.Errorf(disk.ErrInUse, "the staging target path is missing: stage the volume first")
	}
	from, err := n.place("staging target path", req.GetStagingTargetPath())
	if err != nil {
		return publication{}, missingParent(err)
	}
	if mount.Inside(to.String(), from.String()) || mount.Inside(from.String(), to.String()) {
		return publication{}, disk.Errorf(disk.ErrInvalid, "the target path and the staging target path overlap")
	}
	return publication{from: from, to: to, access: a, readOnly: req.GetReadonly() || a.usage.Mode == disk.Reader}, nil
}

func (n *node) publish(h *disk.Hold, r disk.Record, p publication) error {
	now, err := n.look(r)
	if err != nil {
		return err
	}
	st, err := n.stageOf(now, r, p)
	if err != nil {
		return err
	}
	if done, err := published(now, r, st, p); done || err != nil {
		return err
	}
	if err := alone(now, st, p); err != nil {
		return err
	}
	next := st.WithPublish(p.to.String(), &disk.Publish{Mode: p.access.usage.Mode, ReadOnly: p.readOnly})
	if err := h.Save(r.WithStage(n.id, &next)); err != nil {
		return err
	}
	if err := n.show(p); err != nil {
		return errors.Join(err, n.giveUpPublish(h, r, st, p))
	}
	return nil
}

// stageOf finds the stage that a publish builds on: mounted at the path that the caller names, and wide enough.
func (n *node) stageOf(now here, r disk.Record, p publication) (disk.Stage, error) {
	st, ok := r.Staged[n.id]
	shown, err := now.shown(p.from.String())
	if err != nil {
		return st, err
	}
	if !ok || !shown || st.Path != p.from.String() {
		return st, disk.Errorf(disk.ErrInUse, "volume %s is not staged at %s: stage it first", r.ID, p.from)
	}
	if !fits(st.Usage, p.access.usage) || st.Usage.Flags != p.access.usage.Flags {
		return st, disk.Errorf(disk.ErrInUse, "volume %s is staged with another capability (mode %s)", r.ID, st.Usage.Mode)
	}
	return st, nil
}

// published says whether the volume is at the target exactly so. There otherwise is an error.
func published(now here, r disk.Record, st disk.Stage, p publication) (bool, error) {
	shown, err := now.shown(p.to.String())
	if err != nil || !shown {
		return false, err
	}
	have, ok := st.Published[p.to.String()]
	if !ok || have.Mode != p.access.usage.Mode || have.ReadOnly != p.readOnly {
		return false, disk.Errorf(disk.ErrExists, "volume %s is published at %s for another usage", r.ID, p.to)
	}
	return true, nil
}

// alone refuses a second target, unless both are for many writers (the table under NodePublishVolume in the specification).
func alone(now here, st disk.Stage, p publication) error {
	for target, other := range st.Published {
		if target == p.to.String() || now.table.At(target) == nil {
			continue
		}
		if other.Mode != disk.MultiWriter || p.access.usage.Mode != disk.MultiWriter {
			return disk.Errorf(disk.ErrInUse, "the volume is published at %s, and its access mode allows one target", target)
		}
	}
	return nil
}

func (n *node) show(p publication) error {
	if err := p.to.Make(); err != nil {
		return err
	}
	flags := mount.Flags{} // the staging mount's own flags come along
	if p.readOnly {
		flags = flags.ReadOnly()
	}
	return p.to.BindFrom(p.from, flags)
}

// giveUpPublish takes the record and the directory of a publish back that did not come to be.
func (n *node) giveUpPublish(h *disk.Hold, r disk.Record, st disk.Stage, p publication) error {
	if err := n.takeDown(r, p.to); err != nil {
		return err
	}
	if err := p.to.Remove(); err != nil && !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ENOTEMPTY) {
		return err // a file, or a directory with something in it, was there before and stays
	}
	return h.Save(r.WithStage(n.id, &st))
}

// NodeUnpublishVolume takes a volume from a target path and removes the target.
func (n *node) NodeUnpublishVolume(_ context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	id, badID := disk.ParseID(req.GetVolumeId())
	at, badPath := n.oldPlace("target path", req.GetTargetPath())
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
	return &csi.NodeUnpublishVolumeResponse{}, n.unpublish(h, r, at)
}

func (n *node) unpublish(h *disk.Hold, r disk.Record, at mount.Place) error {
	st := r.Staged[n.id]
	if at.String() == st.Path {
		return disk.Errorf(disk.ErrInvalid, "%s is the staging target path: unstage it", at)
	}
	if err := n.takeDown(r, at); err != nil {
		return err
	}
	if _, recorded := st.Published[at.String()]; !recorded {
		return nil // never published there, or taken down already: the directory is somebody else's
	}
	if err := at.Remove(); err != nil {
		return err
	}
	st = st.WithPublish(at.String(), nil)
	return h.Save(r.WithStage(n.id, &st))
}
