package main

import (
	"cmp"
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/mount"
)

// NodePublishVolume mounts a staged volume at a target path. The caller makes the parent directory, loopfs the target.
func (d *driver) NodePublishVolume(
	ctx context.Context, req *csi.NodePublishVolumeRequest,
) (*csi.NodePublishVolumeResponse, error) {
	to, badTarget := d.resolve("target path", req.GetTargetPath(), true)
	a, badAccess := readAccess(req.GetVolumeCapability())
	if req.GetVolumeContext()[inlineKey] == "true" {
		return &csi.NodePublishVolumeResponse{}, d.publishInline(ctx, req, to, a, cmp.Or(badAccess, badTarget))
	}
	from, badStaging := d.resolve("staging target path", req.GetStagingTargetPath(), true)
	if req.GetStagingTargetPath() == "" {
		badStaging = status.Error(codes.FailedPrecondition, "the staging target path is missing: stage the volume first")
	} else if badStaging == nil && badTarget == nil && (mount.Inside(to, from) || mount.Inside(from, to)) {
		badStaging = status.Error(codes.InvalidArgument, "the target path and the staging target path overlap")
	}
	if err := cmp.Or(badAccess, badTarget, badStaging); err != nil {
		return nil, err
	}
	err := d.locked(volumeKind, req.GetVolumeId(), func(r record) error {
		if err := d.checkStage(r, from, a.usage); err != nil {
			return err
		}
		return d.publish(r, to, req.GetReadonly() || a.usage.Mode == readerMode || r.stagedReadOnly())
	})
	return &csi.NodePublishVolumeResponse{}, err
}

// checkStage checks that the volume is staged at a path, with a capability that includes the requested one.
func (d *driver) checkStage(r record, from string, u usage) error {
	staged, err := d.staged(r)
	switch {
	case err != nil:
		return err
	case !staged || r.Stage.Path != from:
		return status.Errorf(codes.FailedPrecondition, "volume %s is not staged at %s: stage it first", r.ID, from)
	}
	if have := r.Stage.Usage; !have.fits(u) || have.Flags != u.Flags || have.Group != u.Group {
		return status.Errorf(codes.FailedPrecondition, "volume %s is staged for %s", r.ID, have)
	}
	return nil
}

// publish mounts a staged volume at a target, unless it is mounted there.
func (d *driver) publish(r record, to string, readOnly bool) error {
	shown, err := d.shown(r, to)
	if err != nil {
		return err
	}
	if have, recorded := r.Stage.Published[to]; shown && recorded && have == readOnly {
		return nil
	} else if shown {
		return status.Errorf(codes.AlreadyExists, "volume %s is published at %s for another usage", r.ID, to)
	}
	targets, err := d.published(r)
	if err != nil {
		return err
	}
	if len(targets) > 0 && r.Stage.Usage.Mode != multiWriterMode {
		return status.Errorf(codes.FailedPrecondition, "the volume is published at %s, and its access mode allows only one "+
			"target", targets[0])
	}
	if r.Stage.Published == nil {
		r.Stage.Published = map[string]bool{}
	}
	r.Stage.Published[to] = readOnly
	if err := d.save(r); err != nil {
		return err
	}
	if err := d.bind(r, to, readOnly); err != nil {
		return errors.Join(err, d.forgetTarget(r, to))
	}
	return nil
}

// bind makes the target, and mounts the staging mount, with its flags, or the device there.
func (d *driver) bind(r record, to string, readOnly bool) (err error) {
	source, flags := r.Stage.Path, mount.Flags{}
	if readOnly {
		flags = flags.ReadOnly()
	}
	if l, ok := d.bytesOf(r).(loop); ok && r.Usage.Block {
		if source, err = l.attachBlock(readOnly); err != nil {
			return err
		}
	}
	if err := mount.Make(to, r.Usage.Block); err != nil {
		return err
	}
	return mount.Bind(source, to, flags)
}

// forgetTarget removes an unmounted target, and its record.
func (d *driver) forgetTarget(r record, target string) error {
	if err := removeTarget(r, target); err != nil {
		return err
	}
	delete(r.Stage.Published, target)
	return d.save(r)
}

// removeTarget removes an empty target. One with contents is not of loopfs, and stays.
func removeTarget(r record, at string) error {
	err := mount.Remove(at, r.Usage.Block)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENOTEMPTY) {
		return nil
	}
	return err
}

// NodeUnpublishVolume unmounts a volume from a target path and removes the target.
func (d *driver) NodeUnpublishVolume(
	ctx context.Context, req *csi.NodeUnpublishVolumeRequest,
) (*csi.NodeUnpublishVolumeResponse, error) {
	id, badID := parseNodeID(req.GetVolumeId())
	at, badPath := d.resolve("target path", req.GetTargetPath(), false)
	if err := cmp.Or(badID, badPath); err != nil {
		return nil, err
	}
	if id.kind() == inlineKind {
		return &csi.NodeUnpublishVolumeResponse{}, d.unpublishInline(ctx, id, at)
	}
	err := d.locked(volumeKind, req.GetVolumeId(), func(r record) error {
		if r.Stage != nil && at == r.Stage.Path {
			return status.Errorf(codes.InvalidArgument, "%s is the staging target path: use NodeUnstageVolume", at)
		}
		if err := d.takeDown(r, at); err != nil || r.Stage == nil {
			return err
		}
		if _, recorded := r.Stage.Published[at]; !recorded { // the directory is not ours
			return nil
		}
		return d.forgetTarget(r, at)
	})
	return &csi.NodeUnpublishVolumeResponse{}, err
}
