package main

import (
	"context"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/disk"
)

// page returns one page of ready records in the order of IDs. The token is the last ID of the page before, so it stays
// valid when its volume is deleted.
func page(all []disk.Record, kind disk.Kind, max int32, token string) (entries []disk.Record, next string, err error) {
	if err := checkPage(kind, max, token); err != nil {
		return nil, "", err
	}
	for _, r := range all {
		if r.State != disk.Ready || string(r.ID) <= token {
			continue
		}
		if n := len(entries); n > 0 && n == int(max) {
			return entries, string(entries[n-1].ID), nil
		}
		entries = append(entries, r)
	}
	return entries, "", nil
}

func (c *controller) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	all, err := c.pool.All(disk.Volume)
	if err != nil {
		return nil, err
	}
	entries, next, err := page(all, disk.Volume, req.GetMaxEntries(), req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	places, err := c.places()
	if err != nil {
		return nil, err
	}
	answer := &csi.ListVolumesResponse{NextToken: next}
	for _, r := range entries {
		e := &csi.ListVolumesResponse_Entry{Volume: volume(r, places)}
		if c.attach {
			e.Status = &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: attachedTo(r)}
		}
		answer.Entries = append(answer.Entries, e)
	}
	return answer, nil
}

func attachedTo(r disk.Record) []string { return slices.Sorted(maps.Keys(r.Attached)) }

func (c *controller) ControllerGetVolume(
	_ context.Context, req *csi.ControllerGetVolumeRequest,
) (*csi.ControllerGetVolumeResponse, error) {
	id, err := disk.ParseID(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	r, err := c.pool.Find(id)
	if err != nil {
		return nil, err
	}
	places, err := c.places()
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{
		Volume: volume(r, places), Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: attachedTo(r)},
	}, nil
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
	entries, next, err := page(all, disk.Snapshot, req.GetMaxEntries(), req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	answer := &csi.ListSnapshotsResponse{NextToken: next}
	for _, r := range entries {
		answer.Entries = append(answer.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: snapshot(r)})
	}
	return answer, nil
}

func (c *controller) GetSnapshot(_ context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	id, err := disk.ParseID(disk.Snapshot, req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	r, err := c.pool.Find(id)
	if err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: snapshot(r)}, nil
}
