package main

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"

	"holdfast/examples/loopfs/internal/disk"
)

// CreateSnapshot copies a volume. The copy is complete when it returns.
func (c *controller) CreateSnapshot(
	ctx context.Context, req *csi.CreateSnapshotRequest,
) (*csi.CreateSnapshotResponse, error) {
	name, badName := disk.ParseName(req.GetName())
	source, badSource := disk.ParseID(disk.Volume, req.GetSourceVolumeId())
	_, badParameters := mapDigest("parameters", req.GetParameters())
	if err := refusal(badName, badSource, badParameters); err != nil {
		return nil, err
	}
	r, err := c.pool.Snapshot(ctx, name, source)
	if err != nil {
		return nil, err
	}
	return &csi.CreateSnapshotResponse{Snapshot: snapshot(r)}, nil
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
	id, err := disk.ParseID(disk.Snapshot, req.GetSnapshotId())
	if err == nil {
		err = c.pool.Delete(id, func(r disk.Record) error {
			if r.InGroup != "" {
				return disk.Errorf(disk.ErrInvalid, "snapshot %s is part of group snapshot %s: delete that", id, r.InGroup)
			}
			return nil
		})
	}
	if err != nil && !errors.Is(err, disk.ErrNotFound) {
		return nil, err
	}
	return &csi.DeleteSnapshotResponse{}, nil
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
	return "", disk.Errorf(disk.ErrInvalid, "the volume content source names neither a snapshot nor a volume")
}

func contentSource(id disk.ID) *csi.VolumeContentSource {
	switch {
	case id == "":
		return nil
	case id.Kind() == disk.Snapshot:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: string(id)},
		}}
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: string(id)},
	}}
}
