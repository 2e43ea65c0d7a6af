package main

import (
	"cmp"
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// The snapshots of a group are crash-consistent: all mounted volumes are frozen before the first is copied, and thawed
// after the last. A volume that is published for writing and cannot be frozen (a block device, a directory) is refused.

func (d *driver) GroupControllerGetCapabilities(
	context.Context, *csi.GroupControllerGetCapabilitiesRequest,
) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	rpc := &csi.GroupControllerServiceCapability_RPC{
		Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
	}
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{
		{Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: rpc}},
	}}, nil
}

func (d *driver) CreateVolumeGroupSnapshot(
	ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest,
) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	if err := cmp.Or(checkName(req.GetName()), noParameters(req.GetParameters())); err != nil {
		return nil, err
	}
	if len(req.GetSourceVolumeIds()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "the source volume ids are missing")
	}
	r, err := d.snapshotGroup(ctx, req.GetName(), req.GetSourceVolumeIds())
	if err != nil {
		return nil, err
	}
	answer, err := d.groupSnapshot(r)
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: answer}, err
}

func (d *driver) groupSnapshot(r record) (*csi.VolumeGroupSnapshot, error) {
	answer := &csi.VolumeGroupSnapshot{
		GroupSnapshotId: string(r.ID), CreationTime: timestamppb.New(r.Created), ReadyToUse: true,
	}
	for _, id := range r.Members {
		m, err := d.load(id)
		if err != nil {
			return nil, err
		}
		answer.Snapshots = append(answer.Snapshots, snapshot(m))
	}
	return answer, nil
}

// checkMembers returns INVALID_ARGUMENT if the given snapshot ids, which may be missing, are not those of the group.
func checkMembers(r record, given []string) error {
	for _, id := range given {
		if !slices.Contains(r.Members, volumeID(id)) {
			return status.Errorf(codes.InvalidArgument, "snapshot %.128q is not part of group snapshot %s", id, r.ID)
		}
	}
	if n := len(given); n > 0 && n != len(r.Members) {
		return status.Errorf(codes.InvalidArgument, "group snapshot %s has %d snapshots, %d are given", r.ID,
			len(r.Members), n)
	}
	return nil
}

func (d *driver) GetVolumeGroupSnapshot(
	_ context.Context, req *csi.GetVolumeGroupSnapshotRequest,
) (*csi.GetVolumeGroupSnapshotResponse, error) {
	r, err := d.get(groupKind, req.GetGroupSnapshotId())
	if err == nil {
		err = checkMembers(r, req.GetSnapshotIds())
	}
	if err != nil {
		return nil, err
	}
	answer, err := d.groupSnapshot(r)
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: answer}, err
}

func (d *driver) DeleteVolumeGroupSnapshot(
	ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest,
) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	err := d.delete(ctx, groupKind, req.GetGroupSnapshotId(), func(r record) error {
		return checkMembers(r, req.GetSnapshotIds())
	})
	return &csi.DeleteVolumeGroupSnapshotResponse{}, err
}
