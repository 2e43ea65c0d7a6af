package main

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"
)

// node implements the node service. Publishing is in publish.go, ephemeral volumes are in ephemeral.go, health is in
// health.go.
type node struct {
	csi.UnimplementedNodeServer
	pool       *disk.Pool
	id         string
	attach     bool // whether every volume has to be attached before it is staged
	maxVolumes int
	topology   map[string]string
}

func (n *node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{
		NodeId: n.id, MaxVolumesPerNode: int64(n.maxVolumes), AccessibleTopology: &csi.Topology{Segments: n.topology},
	}, nil
}

func (n *node) NodeGetCapabilities(
	context.Context, *csi.NodeGetCapabilitiesRequest,
) (*csi.NodeGetCapabilitiesResponse, error) {
	answer := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	} {
		answer.Capabilities = append(answer.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return answer, nil
}

// place resolves a path from a request. A path that overlaps the data directory is refused, and also one without a
// parent if a volume is to be mounted there.
func (n *node) place(what, path string, toMount bool) (string, error) {
	if path == "" {
		return "", status.Errorf(codes.InvalidArgument, "the %s is missing", what)
	}
	at, err := mount.Resolve(path)
	orphan, data := errors.Is(err, fs.ErrNotExist), n.pool.Path()
	switch {
	case err != nil && !orphan:
		return "", err
	case mount.Inside(at, data), mount.Inside(data, at):
		return "", status.Errorf(codes.InvalidArgument, "the %s %s overlaps the data directory", what, at)
	case orphan && toMount:
		return "", status.Errorf(codes.FailedPrecondition, "make the parent directory first: %v", err)
	}
	return at, nil
}

// view is the state of a volume on this node: its record and the mount table of one moment.
type view struct {
	table   mounttable.Mounts
	backend disk.Backend
	devices disk.Devices // nil if the backend has none
	node    string
	record  disk.Record
	stage   disk.Stage // as the record has it; without a path if it has none
}

func (n *node) inspect(r disk.Record) (view, error) {
	table, err := mounttable.Table(0)
	return view{table: table, backend: n.pool.Backend(r.Backend), devices: n.pool.Devices(r), node: n.id, record: r,
		stage: r.Staged[n.id]}, err
}

// shown reports whether the volume is mounted at a path. Another mount there is an error.
func (v view) shown(path string) (bool, error) {
	m, found := v.table.At(path)
	switch {
	case !found && len(v.table.Stack(path)) > 0:
		return false, status.Errorf(codes.FailedPrecondition, "the mount at %s is hidden by another one above; unmount that "+
			"first", path)
	case !found:
		return false, nil
	}
	ours, err := v.backend.Shows(m, v.record.ID)
	if err == nil && !ours {
		err = status.Errorf(codes.FailedPrecondition, "another mount is at %s; loopfs does not touch it", path)
	}
	return ours, err
}

// raw reports whether the volume is staged as a device.
func (v view) raw() bool { return v.stage.Usage.Access == disk.Raw }

// readOnly reports whether the volume is staged read-only.
func (v view) readOnly() bool { return v.record.ReadOnly(v.node) }

// staged reports whether the volume is mounted at its staging path, or its device attached.
func (v view) staged() (bool, error) {
	switch {
	case v.stage.Path == "":
		return false, nil
	case v.raw():
		device, err := v.devices.Device(v.record.ID, v.readOnly())
		return device != "", err
	}
	return v.shown(v.stage.Path)
}

// takeDown unmounts the volume at a path, also if it is mounted more than once.
func (n *node) takeDown(r disk.Record, at string) error {
	for {
		v, err := n.inspect(r)
		if err != nil {
			return err
		}
		if shown, err := v.shown(at); err != nil || !shown {
			return err
		}
		if err := mount.Unmount(at); err != nil {
			return err
		}
	}
}

// checkAttachment checks that the volume is attached to this node, if attaching is required or used, and that the
// publish context has its token.
func (n *node) checkAttachment(r disk.Record, context map[string]string) error {
	have, ok := r.Attached[n.id]
	switch {
	case !ok && (n.attach || len(r.Attached) > 0):
		return status.Errorf(codes.FailedPrecondition, "volume %s is not attached to node %s", r.ID, n.id)
	case ok && have.Token != context[tokenKey]:
		return status.Errorf(codes.FailedPrecondition, "the publish context is not that of the attachment of volume %s to "+
			"node %s", r.ID, n.id)
	}
	return nil
}

// NodeStageVolume mounts a volume at its staging path. The staging path of a raw volume stays empty: its device is
// attached.
func (n *node) NodeStageVolume(
	ctx context.Context, req *csi.NodeStageVolumeRequest,
) (*csi.NodeStageVolumeResponse, error) {
	a, badAccess := readAccess(req.GetVolumeCapability())
	at, badPath := n.place("staging target path", req.GetStagingTargetPath(), true)
	if err := cmp.Or(badAccess, badPath); err != nil {
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
	if r.Attached[n.id].ReadOnly {
		a.flags = a.flags.ReadOnly()
	}
	return &csi.NodeStageVolumeResponse{}, n.stage(ctx, h, r, at, a)
}

func (n *node) stage(ctx context.Context, h *disk.Hold, r disk.Record, at string, a access) error {
	if !r.Usage.Fits(a.usage) {
		return status.Errorf(codes.FailedPrecondition, "volume %s was created for %s, not for %s", r.ID, r.Usage, a.usage)
	}
	v, err := n.inspect(r)
	if err != nil {
		return err
	}
	if a.usage.Access == disk.Mounted { // the requested type, that of the volume, that of its data, or the default
		a.usage.FileSystem = cmp.Or(a.usage.FileSystem, r.Usage.FileSystem)
		if a.usage.FileSystem == "" {
			if a.usage.FileSystem, err = v.backend.FileSystem(r.ID, n.pool.FileSystem); err != nil {
				return err
			}
		}
	}
	if done, err := v.stagedAt(at, a.usage); err != nil || done {
		return err
	}
	st := v.stage // publishes that were not unpublished stay in the record
	st.Path, st.Usage, st.Boot = at, a.usage, n.pool.Boot()
	v.record, v.stage = r.WithStage(n.id, &st), st
	if err := h.Save(v.record); err != nil {
		return err
	}
	if err := v.mount(ctx, h, at, a); err != nil {
		if undo := n.unmountStage(v); undo != nil {
			return errors.Join(err, undo)
		}
		if len(st.Published) == 0 {
			r = r.WithStage(n.id, nil)
		}
		return errors.Join(err, h.Save(r))
	}
	return nil
}

// stagedAt reports whether the volume is staged as requested. Another stage of it is an error.
func (v view) stagedAt(at string, usage disk.Usage) (bool, error) {
	staged, err := v.staged()
	switch {
	case err != nil:
		return false, err
	case staged && (v.stage.Path != at || v.stage.Usage != usage):
		return false, status.Errorf(codes.AlreadyExists, "volume %s is staged at %s for %s", v.record.ID, v.stage.Path,
			v.stage.Usage)
	case staged:
		return true, nil
	}
	shown, err := v.shown(at)
	if shown {
		err = status.Errorf(codes.AlreadyExists, "volume %s is mounted at %s without a stage; unstage it first", v.record.ID,
			at)
	}
	return false, err
}

// mount mounts the volume at its staging path, or attaches its device.
func (v view) mount(ctx context.Context, h *disk.Hold, at string, a access) error {
	if v.raw() {
		_, err := v.devices.Attach(v.record, v.readOnly())
		return err
	}
	r := v.record
	how := disk.MountOptions{FileSystem: a.usage.FileSystem, Flags: a.flags}
	if a.usage.Group != r.Group && !v.readOnly() { // once: later changes by workloads stay
		how.Group = a.usage.Group
	}
	if err := v.backend.Mount(ctx, r, at, how); err != nil {
		return err
	}
	r.Group, r.Formatted = cmp.Or(how.Group, r.Group), how.FileSystem != ""
	r.Usage.FileSystem = cmp.Or(r.Usage.FileSystem, how.FileSystem) // the type is settled now
	return h.Save(r)
}

// unmountStage unmounts the staging path, or detaches the device.
func (n *node) unmountStage(v view) error {
	if v.raw() {
		return v.devices.Detach(v.record.ID)
	}
	return n.takeDown(v.record, v.stage.Path)
}

// NodeUnstageVolume unmounts the staging path, or detaches the device. A published volume is refused.
func (n *node) NodeUnstageVolume(
	ctx context.Context, req *csi.NodeUnstageVolumeRequest,
) (*csi.NodeUnstageVolumeResponse, error) {
	at, err := n.place("staging target path", req.GetStagingTargetPath(), false)
	if err != nil {
		return nil, err
	}
	h, r, err := n.pool.Acquire(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer h.Release()
	v, err := n.inspect(r)
	if err != nil {
		return nil, err
	}
	if v.stage.Path != at { // not staged there; a mount without a record is unmounted
		return &csi.NodeUnstageVolumeResponse{}, n.takeDown(r, at)
	}
	for target := range v.stage.Published {
		if len(v.table.Stack(target)) > 0 {
			return nil, status.Errorf(codes.FailedPrecondition, "volume %s is still published at %s", r.ID, target)
		}
	}
	if err := n.unmountStage(v); err != nil {
		return nil, err
	}
	for target := range v.stage.Published {
		if err := mount.Remove(target, v.raw()); err != nil {
			return nil, err
		}
	}
	v.awaitRelease(ctx)
	return &csi.NodeUnstageVolumeResponse{}, h.Save(r.WithStage(n.id, nil))
}

// awaitRelease waits a second for the kernel to free the loop device, so that a delete directly after this call
// succeeds. A copy of the mount in another namespace may keep the device longer. The volume is unstaged all the same.
func (v view) awaitRelease(ctx context.Context) {
	if v.devices == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for {
		if user, err := v.devices.HeldBy(v.record.ID); user == "" || err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// NodeGetVolumeStats returns the bytes and inodes of a file system, or the bytes of a device.
func (n *node) NodeGetVolumeStats(
	_ context.Context, req *csi.NodeGetVolumeStatsRequest,
) (*csi.NodeGetVolumeStatsResponse, error) {
	if req.GetVolumePath() == "" {
		return nil, status.Error(codes.InvalidArgument, "the volume path is missing")
	}
	id, err := parseVolumeID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	r, err := n.pool.Get(id.Kind(), string(id))
	if err != nil {
		return nil, err
	}
	v, path, err := n.at(r, req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if v.raw() {
		size, err := v.devices.Size(r.ID)
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: size}}}, err
	}
	bytes, inodes, err := v.backend.Stats(r, path)
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{bytes, inodes}}, err
}

// at returns the view of a volume and the resolved path, if it is staged or published there. Else the error is
// NOT_FOUND.
func (n *node) at(r disk.Record, path string) (view, string, error) {
	gone := status.Errorf(codes.NotFound, "volume %s is neither staged nor published at %.128q", r.ID, path)
	path, err := mount.Resolve(path)
	if err != nil {
		return view{}, "", gone
	}
	v, err := n.inspect(r)
	if err != nil {
		return view{}, "", err
	}
	there := false
	if _, published := v.stage.Published[path]; published {
		there, err = v.shown(path)
	} else if v.stage.Path == path {
		there, err = v.staged()
	}
	if status.Code(err) == codes.FailedPrecondition || err == nil && !there { // something else is mounted there
		return view{}, "", gone
	}
	return v, path, err
}

// NodeExpandVolume enlarges the file system or the devices of a volume in use, after ControllerExpandVolume.
func (n *node) NodeExpandVolume(
	_ context.Context, req *csi.NodeExpandVolumeRequest,
) (*csi.NodeExpandVolumeResponse, error) {
	if req.GetVolumePath() == "" {
		return nil, status.Error(codes.InvalidArgument, "the volume path is missing")
	}
	h, r, err := n.pool.Acquire(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer h.Release()
	if err := checkCapability(r, req.GetVolumeCapability()); err != nil {
		return nil, err
	}
	v, _, err := n.at(r, req.GetVolumePath())
	want := req.GetCapacityRange()
	switch {
	case err != nil:
		return nil, err
	case want.GetRequiredBytes() > r.Bytes || want.GetLimitBytes() > 0 && want.GetLimitBytes() < r.Bytes:
		return nil, status.Errorf(codes.OutOfRange, "volume %s has %d bytes: call ControllerExpandVolume first; it never "+
			"shrinks", r.ID, r.Bytes)
	case !v.raw() && v.readOnly():
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is staged read-only, and a read-only file system "+
			"does not grow; the next stage enlarges it", r.ID)
	}
	if err := v.backend.Grow(r.ID, r.Bytes); err != nil {
		return nil, err
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: r.Bytes}, v.backend.Expand(r.ID, v.raw())
}

// foreign reports whether a target was not removed because loopfs did not make it: it is of another type, or not empty.
func foreign(err error) bool { return errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENOTEMPTY) }
