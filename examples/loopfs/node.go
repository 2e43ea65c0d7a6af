package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/mount"
)

// The node service. Its calls for health are in health.go.

func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.node, AccessibleTopology: d.topology()}, nil
}

func (d *driver) NodeGetCapabilities(
	context.Context, *csi.NodeGetCapabilitiesRequest,
) (*csi.NodeGetCapabilitiesResponse, error) {
	answer := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	} {
		answer.Capabilities = append(answer.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return answer, nil
}

// resolve resolves a path from a request. A path that overlaps the data directory is refused, and also one without a
// parent if a volume is to be mounted there.
func (d *driver) resolve(what, path string, toMount bool) (string, error) {
	if path == "" {
		return "", status.Errorf(codes.InvalidArgument, "the %s is missing", what)
	}
	at, err := resolvePath(path)
	orphan := errors.Is(err, fs.ErrNotExist)
	switch {
	case err != nil && !orphan:
		return "", err
	case inside(at, d.path), inside(d.path, at):
		return "", status.Errorf(codes.InvalidArgument, "the %s %s overlaps the data directory", what, at)
	case orphan && toMount:
		return "", status.Errorf(codes.FailedPrecondition, "make the parent directory first: %v", err)
	}
	return at, nil
}

// shown reports whether the volume is mounted at a path. Another mount there is an error.
func (d *driver) shown(r record, path string) (bool, error) {
	table, err := mount.Table(0)
	if err != nil {
		return false, err
	}
	m, found := table.At(path)
	switch {
	case !found && len(table.Stack(path)) > 0:
		return false, status.Errorf(codes.FailedPrecondition, "the mount at %s is hidden by another one above; "+
			"unmount that first", path)
	case !found:
		return false, nil
	}
	ours, err := d.bytesOf(r).shows(m)
	if err == nil && !ours {
		err = status.Errorf(codes.FailedPrecondition, "another mount is at %s; loopfs does not touch it", path)
	}
	return ours, err
}

// published lists the recorded targets where anything is mounted.
func (d *driver) published(r record) (targets []string, err error) {
	if r.Stage == nil {
		return nil, nil
	}
	table, err := mount.Table(0)
	for path := range r.Stage.Published {
		if len(table.Stack(path)) > 0 {
			targets = append(targets, path)
		}
	}
	return targets, err
}

// staged reports whether the volume is mounted at its staging path, or its device attached.
func (d *driver) staged(r record) (bool, error) {
	if r.Stage == nil {
		return false, nil
	}
	if l, ok := d.bytesOf(r).(loop); ok && r.Usage.Block {
		return l.attached(r.stagedReadOnly())
	}
	return d.shown(r, r.Stage.Path)
}

// takeDown unmounts the volume at a path, also if it is mounted more than once.
func (d *driver) takeDown(r record, at string) error {
	for {
		if shown, err := d.shown(r, at); err != nil || !shown {
			return err
		}
		if err := unix.Unmount(at, unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", at, err)
		}
	}
}

// NodeStageVolume mounts a volume at its staging path. The staging path of a block volume stays empty: its device is
// attached.
func (d *driver) NodeStageVolume(
	ctx context.Context, req *csi.NodeStageVolumeRequest,
) (*csi.NodeStageVolumeResponse, error) {
	u, badUsage := readUsage(req.GetVolumeCapability())
	at, badPath := d.resolve("staging target path", req.GetStagingTargetPath(), true)
	if err := cmp.Or(badUsage, badPath); err != nil {
		return nil, err
	}
	err := d.locked(volumeKind, req.GetVolumeId(), func(r record) error { return d.stage(ctx, r, at, u) })
	return &csi.NodeStageVolumeResponse{}, err
}

func (d *driver) stage(ctx context.Context, r record, at string, u usage) error {
	staged, err := d.staged(r)
	switch {
	case err != nil:
		return err
	case !r.Usage.fits(u):
		return status.Errorf(codes.FailedPrecondition, "volume %s was created for %s, not for %s", r.ID, r.Usage, u)
	case staged && (r.Stage.Path != at || r.Stage.Usage != u):
		return status.Errorf(codes.AlreadyExists, "volume %s is staged at %s for %s", r.ID, r.Stage.Path, r.Stage.Usage)
	case staged && r.Usage.Block:
		// An unstage on a full disk could not save the record. Its detach may have marked the device for release,
		// which mount takes back.
		return d.bytesOf(r).mount(ctx, d.store)
	case staged:
		return nil
	}
	if _, err := d.shown(r, at); err != nil {
		return err
	}
	before := r.Stage
	r.Stage = &stage{Path: at, Usage: u}
	if before != nil { // targets that were not unpublished stay in the record
		r.Stage.Published = before.Published
	}
	if err := d.save(r); err != nil {
		return err
	}
	b := d.bytesOf(r)
	if err = b.grow(); err == nil { // an expansion that was killed has perhaps saved the size alone
		err = b.mount(ctx, d.store)
	}
	if err != nil {
		r.Stage = before
		return errors.Join(err, d.save(r))
	}
	return nil
}

// NodeUnstageVolume unmounts the staging path, or detaches the device. A published volume is refused.
func (d *driver) NodeUnstageVolume(
	ctx context.Context, req *csi.NodeUnstageVolumeRequest,
) (*csi.NodeUnstageVolumeResponse, error) {
	at, err := d.resolve("staging target path", req.GetStagingTargetPath(), false)
	if err != nil {
		return nil, err
	}
	err = d.locked(volumeKind, req.GetVolumeId(), func(r record) error {
		if r.Stage == nil || r.Stage.Path != at { // not staged there; a mount without a record is unmounted
			return d.takeDown(r, at)
		}
		return d.unstage(ctx, r)
	})
	return &csi.NodeUnstageVolumeResponse{}, err
}

func (d *driver) unstage(ctx context.Context, r record) error {
	if err := d.checkUnpublished(r); err != nil {
		return err
	}
	var err error
	if l, ok := d.bytesOf(r).(loop); ok && r.Usage.Block {
		err = l.detach()
	} else {
		err = d.takeDown(r, r.Stage.Path)
	}
	if err != nil {
		return err
	}
	for target := range r.Stage.Published { // whose mounts ended with an earlier boot
		if err := removeTarget(target, r.Usage.Block); err != nil {
			return err
		}
	}
	r.Stage = nil
	if err := d.saveUnmounted(r); err != nil {
		return err
	}
	_, err = d.awaitRelease(ctx, r)
	return err
}

func (d *driver) checkUnpublished(r record) error {
	targets, err := d.published(r)
	if err == nil && len(targets) > 0 {
		err = status.Errorf(codes.FailedPrecondition, "volume %s is still published at %s", r.ID, targets[0])
	}
	return err
}

// NodeGetVolumeStats returns the bytes and inodes of a file system, or the bytes of a device.
func (d *driver) NodeGetVolumeStats(
	_ context.Context, req *csi.NodeGetVolumeStatsRequest,
) (*csi.NodeGetVolumeStatsResponse, error) {
	if err := checkPath(req.GetVolumePath()); err != nil {
		return nil, err
	}
	r, err := d.get(volumeKind, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	path, err := d.pathOf(r, req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	usage, err := d.bytesOf(r).stats(path)
	return &csi.NodeGetVolumeStatsResponse{Usage: usage}, err
}

func checkPath(path string) error {
	if path == "" {
		return status.Error(codes.InvalidArgument, "the volume path is missing")
	}
	return nil
}

// pathOf resolves a path where the volume is staged or published. The error is NOT_FOUND if it is neither.
func (d *driver) pathOf(r record, path string) (string, error) {
	at, err := resolvePath(path)
	there, published := false, false
	if err == nil && r.Stage != nil {
		_, published = r.Stage.Published[at]
	}
	if published {
		there, err = d.shown(r, at)
	} else if err == nil && r.Stage != nil && r.Stage.Path == at {
		there, err = d.staged(r)
	}
	if !there {
		return "", status.Errorf(codes.NotFound, "volume %s is neither staged nor published at %.128q", r.ID, path)
	}
	return at, err
}

// NodeExpandVolume enlarges the file system or the devices of a volume in use, after ControllerExpandVolume.
func (d *driver) NodeExpandVolume(
	_ context.Context, req *csi.NodeExpandVolumeRequest,
) (*csi.NodeExpandVolumeResponse, error) {
	if err := checkPath(req.GetVolumePath()); err != nil {
		return nil, err
	}
	answer := &csi.NodeExpandVolumeResponse{}
	return answer, d.locked(volumeKind, req.GetVolumeId(), func(r record) error {
		answer.CapacityBytes = r.Bytes
		if err := checkCapability(r, req.GetVolumeCapability()); err != nil {
			return err
		}
		path, err := d.pathOf(r, req.GetVolumePath())
		want := req.GetCapacityRange()
		switch {
		case err != nil:
			return err
		case want.GetRequiredBytes() > r.Bytes || want.GetLimitBytes() > 0 && want.GetLimitBytes() < r.Bytes:
			return status.Errorf(codes.OutOfRange, "volume %s has %d bytes: call ControllerExpandVolume first; it "+
				"never shrinks", r.ID, r.Bytes)
		case !r.Usage.Block && r.stagedReadOnly():
			return status.Errorf(codes.FailedPrecondition, "volume %s is staged read-only, and a read-only file "+
				"system does not grow; the next stage enlarges it", r.ID)
		}
		b := d.bytesOf(r)
		if err := b.grow(); err != nil {
			return err
		}
		return b.expand(path)
	})
}

// NodePublishVolume mounts a staged volume at a target path. The caller makes the parent directory, loopfs the target.
func (d *driver) NodePublishVolume(
	_ context.Context, req *csi.NodePublishVolumeRequest,
) (*csi.NodePublishVolumeResponse, error) {
	to, badTarget := d.resolve("target path", req.GetTargetPath(), true)
	u, badUsage := readUsage(req.GetVolumeCapability())
	from, badStaging := d.resolve("staging target path", req.GetStagingTargetPath(), true)
	if req.GetStagingTargetPath() == "" {
		badStaging = status.Error(codes.FailedPrecondition,
			"the staging target path is missing: stage the volume first")
	} else if badStaging == nil && badTarget == nil && (inside(to, from) || inside(from, to)) {
		badStaging = status.Error(codes.InvalidArgument, "the target path and the staging target path overlap")
	}
	if err := cmp.Or(badUsage, badTarget, badStaging); err != nil {
		return nil, err
	}
	err := d.locked(volumeKind, req.GetVolumeId(), func(r record) error {
		if err := d.checkStage(r, from, u); err != nil {
			return err
		}
		return d.publish(r, to, req.GetReadonly() || u.Mode == readerMode || r.stagedReadOnly())
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
	if have := r.Stage.Usage; !have.fits(u) || have.Flags != u.Flags {
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
		return status.Errorf(codes.FailedPrecondition, "the volume is published at %s, and its access mode allows "+
			"only one target", targets[0])
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
	source, flags := r.Stage.Path, mountFlags(0)
	if readOnly {
		flags = readOnlyFlag
	}
	if l, ok := d.bytesOf(r).(loop); ok && r.Usage.Block {
		if source, err = l.attachBlock(readOnly); err != nil {
			return err
		}
	}
	if err := makeTarget(to, r.Usage.Block); err != nil {
		return err
	}
	return bindMount(source, to, r.Usage.Block, flags)
}

// forgetTarget removes an unmounted target, and its record.
func (d *driver) forgetTarget(r record, target string) error {
	if err := removeTarget(target, r.Usage.Block); err != nil {
		return err
	}
	delete(r.Stage.Published, target)
	return d.saveUnmounted(r)
}

// NodeUnpublishVolume unmounts a volume from a target path and removes the target.
func (d *driver) NodeUnpublishVolume(
	_ context.Context, req *csi.NodeUnpublishVolumeRequest,
) (*csi.NodeUnpublishVolumeResponse, error) {
	at, err := d.resolve("target path", req.GetTargetPath(), false)
	if err != nil {
		return nil, err
	}
	err = d.locked(volumeKind, req.GetVolumeId(), func(r record) error {
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
