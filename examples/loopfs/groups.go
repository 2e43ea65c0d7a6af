package main

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"holdfast/examples/loopfs/internal/disk"
)

// groups implements the group controller service. The snapshots of a group are crash-consistent: all mounted volumes
// are frozen before the first is copied, and thawed after the last. A volume that is published for writing and cannot
// be frozen (a block device, a directory) is refused.
type groups struct {
	csi.UnimplementedGroupControllerServer
	pool *disk.Pool
}

func (g *groups) GroupControllerGetCapabilities(
	context.Context, *csi.GroupControllerGetCapabilitiesRequest,
) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	rpc := &csi.GroupControllerServiceCapability_RPC{
		Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
	}
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{
		{Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: rpc}},
	}}, nil
}

func (g *groups) CreateVolumeGroupSnapshot(
	ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest,
) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	name, err := disk.ParseName(req.GetName())
	if err != nil {
		return nil, err
	}
	parameters, err := mapDigest("parameters", req.GetParameters())
	if err != nil {
		return nil, err
	}
	if len(req.GetSourceVolumeIds()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "the source volume ids are missing")
	}
	r, err := g.pool.SnapshotGroup(ctx, name, parameters, req.GetSourceVolumeIds())
	if err != nil {
		return nil, err
	}
	answer, err := g.snapshots(r)
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: answer}, err
}

func (g *groups) snapshots(r disk.Record) (*csi.VolumeGroupSnapshot, error) {
	answer := &csi.VolumeGroupSnapshot{
		GroupSnapshotId: string(r.ID), CreationTime: timestamppb.New(r.Created), ReadyToUse: true,
	}
	for _, id := range r.Members {
		m, err := g.pool.Get(disk.Snapshot, string(id))
		if err != nil {
			return nil, err
		}
		answer.Snapshots = append(answer.Snapshots, snapshot(m))
	}
	return answer, nil
}

// checkMembers returns INVALID_ARGUMENT if the given snapshot ids, which may be missing, are not those of the group.
func checkMembers(r disk.Record, given []string) error {
	for _, id := range given {
		if !slices.Contains(r.Members, disk.ID(id)) {
			return status.Errorf(codes.InvalidArgument, "snapshot %.128q is not part of group snapshot %s", id, r.ID)
		}
	}
	if n := len(given); n > 0 && n != len(r.Members) {
		return status.Errorf(codes.InvalidArgument, "group snapshot %s has %d snapshots, %d are given", r.ID,
			len(r.Members), n)
	}
	return nil
}

func (g *groups) GetVolumeGroupSnapshot(
	_ context.Context, req *csi.GetVolumeGroupSnapshotRequest,
) (*csi.GetVolumeGroupSnapshotResponse, error) {
	r, err := g.pool.Get(disk.Group, req.GetGroupSnapshotId())
	if err == nil {
		err = checkMembers(r, req.GetSnapshotIds())
	}
	if err != nil {
		return nil, err
	}
	answer, err := g.snapshots(r)
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: answer}, err
}

func (g *groups) DeleteVolumeGroupSnapshot(
	_ context.Context, req *csi.DeleteVolumeGroupSnapshotRequest,
) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	err := g.pool.Delete(disk.Group, req.GetGroupSnapshotId(), func(r disk.Record) error {
		return checkMembers(r, req.GetSnapshotIds())
	})
	return &csi.DeleteVolumeGroupSnapshotResponse{}, err
}
