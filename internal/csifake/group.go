package csifake

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// group implements the group controller.
type group struct {
	csi.UnimplementedGroupControllerServer
	p *Plugin
}

func (s group) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (
	*csi.GroupControllerGetCapabilitiesResponse, error,
) {
	reply := &csi.GroupControllerGetCapabilitiesResponse{}
	for _, n := range s.p.caps["group"] {
		rpc := &csi.GroupControllerServiceCapability_RPC{Type: csi.GroupControllerServiceCapability_RPC_Type(n)}
		reply.Capabilities = append(reply.Capabilities,
			&csi.GroupControllerServiceCapability{Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: rpc}})
	}
	return reply, nil
}

func (s group) CreateVolumeGroupSnapshot(_ context.Context, r *csi.CreateVolumeGroupSnapshotRequest) (
	*csi.CreateVolumeGroupSnapshotResponse, error,
) {
	if r.GetName() == "" || len(r.GetSourceVolumeIds()) == 0 {
		return nil, invalid("name or source_volume_ids is missing")
	}
	reply := &csi.CreateVolumeGroupSnapshotResponse{}
	return reply, s.p.cfg.Backend.change(func(c *contents) error {
		id := "group-" + snapshotID(r.GetName())
		if have := c.Groups[id]; have != nil && len(have) != len(r.GetSourceVolumeIds()) {
			return status.Errorf(codes.AlreadyExists, "group snapshot %q is of other volumes", r.GetName())
		}
		for _, source := range r.GetSourceVolumeIds() { // if one is missing, nothing is made
			if _, err := s.p.find(c, source); err != nil {
				return err
			}
		}
		var ids []string
		for _, source := range r.GetSourceVolumeIds() {
			x, err := s.p.snap(c, r.GetName()+"/"+source, source, id)
			if err != nil {
				return err
			}
			ids = append(ids, x.ID)
		}
		c.Groups[id] = ids
		reply.GroupSnapshot = groupMessage(c, id)
		return nil
	})
}

func groupMessage(c *contents, id string) *csi.VolumeGroupSnapshot {
	m := &csi.VolumeGroupSnapshot{GroupSnapshotId: id, ReadyToUse: true}
	for _, x := range c.Groups[id] {
		if c.Snapshots[x] == nil {
			continue
		}
		m.Snapshots = append(m.Snapshots, c.Snapshots[x].message())
		m.CreationTime = &timestamppb.Timestamp{Seconds: c.Snapshots[x].Made}
	}
	return m
}

func (s group) DeleteVolumeGroupSnapshot(_ context.Context, r *csi.DeleteVolumeGroupSnapshotRequest) (
	*csi.DeleteVolumeGroupSnapshotResponse, error,
) {
	if r.GetGroupSnapshotId() == "" {
		return nil, invalid("group_snapshot_id is missing")
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, s.p.cfg.Backend.change(func(c *contents) error {
		if err := wholeGroup(c, r.GetGroupSnapshotId(), r.GetSnapshotIds()); err != nil {
			return err
		}
		for _, x := range c.Groups[r.GetGroupSnapshotId()] {
			delete(c.Snapshots, x)
		}
		delete(c.Groups, r.GetGroupSnapshotId())
		return nil
	})
}

// wholeGroup returns an error if the group exists and ids are not exactly its snapshots.
func wholeGroup(c *contents, id string, ids []string) error {
	have := c.Groups[id]
	if have != nil && !slices.Equal(slices.Sorted(slices.Values(have)), slices.Sorted(slices.Values(ids))) {
		return invalid("group snapshot %q has the snapshots %q, not %q", id, have, ids)
	}
	return nil
}

func (s group) GetVolumeGroupSnapshot(_ context.Context, r *csi.GetVolumeGroupSnapshotRequest) (
	*csi.GetVolumeGroupSnapshotResponse, error,
) {
	if r.GetGroupSnapshotId() == "" {
		return nil, invalid("group_snapshot_id is missing")
	}
	reply := &csi.GetVolumeGroupSnapshotResponse{}
	return reply, s.p.cfg.Backend.change(func(c *contents) error {
		if c.Groups[r.GetGroupSnapshotId()] == nil {
			return status.Errorf(codes.NotFound, "group snapshot %q does not exist", r.GetGroupSnapshotId())
		}
		if err := wholeGroup(c, r.GetGroupSnapshotId(), r.GetSnapshotIds()); err != nil {
			return err
		}
		reply.GroupSnapshot = groupMessage(c, r.GetGroupSnapshotId())
		return nil
	})
}
