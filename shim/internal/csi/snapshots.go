package csi

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/registry"
)

// CreateSnapshotRequest is CreateSnapshotRequest or CreateVolumeGroupSnapshotRequest of CSI.
type CreateSnapshotRequest struct {
	Name       string
	Volume     registry.ExternalID   // source_volume_id
	Volumes    []registry.ExternalID // of a group: source_volume_ids
	Parameters map[string]string
	Secrets    map[string]registry.SecretValue
}

// SnapshotRequest is DeleteSnapshotRequest or GetSnapshotRequest, or the same for a group snapshot.
type SnapshotRequest struct {
	Snapshot registry.ExternalID   // snapshot_id or group_snapshot_id
	Members  []registry.ExternalID // of a group: snapshot_ids
	Secrets  map[string]registry.SecretValue
	Private  Private
}

// Snapshot is a snapshot as the plugin describes it, unchecked. It is the zero value if the answer has none.
type Snapshot struct {
	ID     string
	Volume registry.ExternalID // source_volume_id
	Size   int64               // bytes
	Taken  time.Time           // creation_time
	Ready  bool                // ready_to_use
	Group  registry.ExternalID // group_snapshot_id
}

// CreateSnapshot sends CreateSnapshot.
func (f *Fleet) CreateSnapshot(
	ctx context.Context, at registry.InstanceKey, r CreateSnapshotRequest,
) (Snapshot, error) {
	req := &csi.CreateSnapshotRequest{
		Name: r.Name, SourceVolumeId: string(r.Volume), Parameters: r.Parameters, Secrets: reveal(r.Secrets),
	}
	var reply csi.CreateSnapshotResponse
	err := f.send(ctx, registry.CreateSnapshotRPC, at, req, &reply, nil)
	return snapshot(reply.GetSnapshot()), err
}

// DeleteSnapshot sends DeleteSnapshot.
func (f *Fleet) DeleteSnapshot(ctx context.Context, at registry.InstanceKey, r SnapshotRequest) error {
	req := &csi.DeleteSnapshotRequest{SnapshotId: string(r.Snapshot), Secrets: reveal(r.Secrets)}
	return f.send(ctx, registry.DeleteSnapshotRPC, at, req, &csi.DeleteSnapshotResponse{}, r.Private.asFunc)
}

// GetSnapshot sends GetSnapshot.
func (f *Fleet) GetSnapshot(ctx context.Context, at registry.InstanceKey, r SnapshotRequest) (Snapshot, error) {
	req := &csi.GetSnapshotRequest{SnapshotId: string(r.Snapshot), Secrets: reveal(r.Secrets)}
	var reply csi.GetSnapshotResponse
	err := f.send(ctx, registry.GetSnapshotRPC, at, req, &reply, r.Private.asFunc)
	return snapshot(reply.GetSnapshot()), err
}

// ListSnapshots returns one page of ListSnapshots: the snapshots of one volume, or all if volume is empty. next is the
// token of the next page; it is empty on the last page.
func (f *Fleet) ListSnapshots(
	ctx context.Context, at registry.InstanceKey, volume registry.ExternalID, token string,
) (page []Snapshot, next string, err error) {
	req := &csi.ListSnapshotsRequest{MaxEntries: pageSize, StartingToken: token, SourceVolumeId: string(volume)}
	var reply csi.ListSnapshotsResponse
	err = f.send(ctx, registry.ListSnapshotsRPC, at, req, &reply, nil)
	for _, e := range reply.GetEntries() {
		page = append(page, snapshot(e.GetSnapshot()))
	}
	return page, reply.GetNextToken(), err
}

func snapshot(m *csi.Snapshot) Snapshot {
	out := Snapshot{
		ID: m.GetSnapshotId(), Volume: registry.ExternalID(m.GetSourceVolumeId()), Size: m.GetSizeBytes(),
		Ready: m.GetReadyToUse(), Group: registry.ExternalID(m.GetGroupSnapshotId()),
	}
	if t := m.GetCreationTime(); t.IsValid() {
		out.Taken = t.AsTime()
	}
	return out
}
