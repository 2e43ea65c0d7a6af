package main

import (
	"cmp"
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"holdfast/examples/loopfs/internal/disk"
)

// CreateSnapshot copies a volume. The copy is complete when it returns.
func (c *controller) CreateSnapshot(
	ctx context.Context, req *csi.CreateSnapshotRequest,
) (*csi.CreateSnapshotResponse, error) {
	name, badName := disk.ParseName(req.GetName())
	_, badSource := disk.ParseID(disk.Volume, req.GetSourceVolumeId())
	_, badParameters := mapDigest("parameters", req.GetParameters())
	if err := cmp.Or(badName, badParameters, badSource); err != nil {
		return nil, err
	}
	r, err := c.pool.Snapshot(ctx, name, req.GetSourceVolumeId())
	return &csi.CreateSnapshotResponse{Snapshot: snapshot(r)}, err
}

func snapshot(r disk.Record) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId: string(r.ID), SourceVolumeId: string(r.Source), SizeBytes: r.Bytes,
		CreationTime: timestamppb.New(r.Created), ReadyToUse: true, GroupSnapshotId: string(r.InGroup),
	}
}

func (c *controller) DeleteSnapshot(
	_ context.Context, req *csi.DeleteSnapshotRequest,
) (*csi.DeleteSnapshotResponse, error) {
	err := c.pool.Delete(disk.Snapshot, req.GetSnapshotId(), func(r disk.Record) error {
		if r.InGroup != "" {
			return status.Errorf(codes.InvalidArgument, "snapshot %s is part of group snapshot %s: delete that", r.ID,
				r.InGroup)
		}
		return nil
	})
	return &csi.DeleteSnapshotResponse{}, err
}

// ListSnapshots lists snapshots, those of an ID or a source if one is given.
func (c *controller) ListSnapshots(
	_ context.Context, req *csi.ListSnapshotsRequest,
) (*csi.ListSnapshotsResponse, error) {
	all, err := c.pool.All(disk.Snapshot)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(r disk.Record) bool {
		id, source := req.GetSnapshotId(), req.GetSourceVolumeId()
		return id != "" && id != string(r.ID) || source != "" && source != string(r.Source)
	})
	all, next, err := page(all, disk.Snapshot, req.GetMaxEntries(), req.GetStartingToken())
	answer := &csi.ListSnapshotsResponse{NextToken: next}
	for _, r := range all {
		answer.Entries = append(answer.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: snapshot(r)})
	}
	return answer, err
}

func (c *controller) GetSnapshot(_ context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	r, err := c.pool.Get(disk.Snapshot, req.GetSnapshotId())
	return &csi.GetSnapshotResponse{Snapshot: snapshot(r)}, err
}

// readSource returns the ID of a content source, or an empty ID for none.
func readSource(s *csi.VolumeContentSource) (disk.ID, error) {
	switch {
	case s == nil:
		return "", nil
	case s.GetSnapshot() != nil:
		return disk.ParseID(disk.Snapshot, s.GetSnapshot().GetSnapshotId())
	case s.GetVolume() != nil:
		return disk.ParseID(disk.Volume, s.GetVolume().GetVolumeId())
	}
	return "", status.Error(codes.InvalidArgument, "the volume content source names neither a snapshot nor a volume")
}

func contentSource(id disk.ID) *csi.VolumeContentSource {
	switch id.Kind() {
	case disk.Snapshot:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: string(id)},
		}}
	case disk.Volume:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: string(id)},
		}}
	}
	return nil
}
