package csi

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/registry"
)

// GroupSnapshot is a group snapshot as the plugin describes it, unchecked. It is the zero value if the answer has none.
type GroupSnapshot struct {
	ID        string
	Snapshots []Snapshot
	Taken     time.Time // creation_time
	Ready     bool      // ready_to_use
}

// CreateGroupSnapshot sends CreateVolumeGroupSnapshot.
func (f *Fleet) CreateGroupSnapshot(
	ctx context.Context, at registry.InstanceKey, r CreateSnapshotRequest,
) (GroupSnapshot, error) {
	req := &csi.CreateVolumeGroupSnapshotRequest{
		Name: r.Name, SourceVolumeIds: idStrings(r.Volumes), Parameters: r.Parameters, Secrets: reveal(r.Secrets),
	}
	var reply csi.CreateVolumeGroupSnapshotResponse
	err := f.send(ctx, registry.CreateGroupSnapshotRPC, at, req, &reply, nil)
	return groupSnapshot(reply.GetGroupSnapshot()), err
}

// DeleteGroupSnapshot sends DeleteVolumeGroupSnapshot.
func (f *Fleet) DeleteGroupSnapshot(ctx context.Context, at registry.InstanceKey, r SnapshotRequest) error {
	req := &csi.DeleteVolumeGroupSnapshotRequest{
		GroupSnapshotId: string(r.Snapshot), SnapshotIds: idStrings(r.Members), Secrets: reveal(r.Secrets),
	}
	return f.send(ctx, registry.DeleteGroupSnapshotRPC, at, req, &csi.DeleteVolumeGroupSnapshotResponse{},
		r.Private.asFunc)
}

// GetGroupSnapshot sends GetVolumeGroupSnapshot.
func (f *Fleet) GetGroupSnapshot(
	ctx context.Context, at registry.InstanceKey, r SnapshotRequest,
) (GroupSnapshot, error) {
	req := &csi.GetVolumeGroupSnapshotRequest{
		GroupSnapshotId: string(r.Snapshot), SnapshotIds: idStrings(r.Members), Secrets: reveal(r.Secrets),
	}
	var reply csi.GetVolumeGroupSnapshotResponse
	err := f.send(ctx, registry.GetGroupSnapshotRPC, at, req, &reply, r.Private.asFunc)
	return groupSnapshot(reply.GetGroupSnapshot()), err
}

func groupSnapshot(m *csi.VolumeGroupSnapshot) GroupSnapshot {
	out := GroupSnapshot{ID: m.GetGroupSnapshotId(), Ready: m.GetReadyToUse()}
	for _, one := range m.GetSnapshots() {
		out.Snapshots = append(out.Snapshots, snapshot(one))
	}
	if t := m.GetCreationTime(); t.IsValid() {
		out.Taken = t.AsTime()
	}
	return out
}

func idStrings(ids []registry.ExternalID) (out []string) {
	for _, id := range ids {
		out = append(out, string(id))
	}
	return out
}
