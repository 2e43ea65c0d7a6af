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

// CreateSnapshot copies a volume. The copy is complete when it returns.
func (d *driver) CreateSnapshot(
	ctx context.Context, req *csi.CreateSnapshotRequest,
) (*csi.CreateSnapshotResponse, error) {
	_, badSource := parseID(volumeKind, req.GetSourceVolumeId())
	if err := cmp.Or(checkName(req.GetName()), noParameters(req.GetParameters()), badSource); err != nil {
		return nil, err
	}
	r, err := d.snapshot(ctx, req.GetName(), req.GetSourceVolumeId())
	return &csi.CreateSnapshotResponse{Snapshot: snapshot(r)}, err
}

func snapshot(r record) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId: string(r.ID), SourceVolumeId: string(r.Source), SizeBytes: r.Bytes,
		CreationTime: timestamppb.New(r.Created), ReadyToUse: true, GroupSnapshotId: string(r.ID.group()),
	}
}

func (d *driver) DeleteSnapshot(
	ctx context.Context, req *csi.DeleteSnapshotRequest,
) (*csi.DeleteSnapshotResponse, error) {
	return &csi.DeleteSnapshotResponse{}, d.delete(ctx, snapshotKind, req.GetSnapshotId(), func(r record) error {
		if g := r.ID.group(); g != "" {
			return status.Errorf(codes.InvalidArgument, "snapshot %s is part of group snapshot %s: delete that", r.ID, g)
		}
		return nil
	})
}

// ListSnapshots lists snapshots, those of an ID or a source if one is given.
func (d *driver) ListSnapshots(
	_ context.Context, req *csi.ListSnapshotsRequest,
) (*csi.ListSnapshotsResponse, error) {
	all, err := d.all(snapshotKind)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(r record) bool {
		id, source := req.GetSnapshotId(), req.GetSourceVolumeId()
		return id != "" && id != string(r.ID) || source != "" && source != string(r.Source)
	})
	all, next, err := page(all, idOf, snapshotKind, req.GetMaxEntries(), req.GetStartingToken())
	answer := &csi.ListSnapshotsResponse{NextToken: next}
	for _, r := range all {
		answer.Entries = append(answer.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: snapshot(r)})
	}
	return answer, err
}

func (d *driver) GetSnapshot(_ context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	r, err := d.get(snapshotKind, req.GetSnapshotId())
	return &csi.GetSnapshotResponse{Snapshot: snapshot(r)}, err
}

// readSource returns the ID of a content source, or an empty ID for none.
func readSource(s *csi.VolumeContentSource) (volumeID, error) {
	switch {
	case s == nil:
		return "", nil
	case s.GetSnapshot() != nil:
		return parseID(snapshotKind, s.GetSnapshot().GetSnapshotId())
	case s.GetVolume() != nil:
		return parseID(volumeKind, s.GetVolume().GetVolumeId())
	}
	return "", status.Error(codes.InvalidArgument, "the volume content source names neither a snapshot nor a volume")
}

func contentSource(id volumeID) *csi.VolumeContentSource {
	switch id.kind() {
	case snapshotKind:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: string(id)},
		}}
	case volumeKind:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: string(id)},
		}}
	}
	return nil
}
