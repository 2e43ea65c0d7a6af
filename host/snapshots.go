package host

import (
	"context"

	"google.golang.org/grpc"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// CreateSnapshot takes a snapshot of a volume, and waits until volumes can be created from it (ready_to_use of CSI) or
// until ctx ends; then the shim continues to wait. The same spec again returns the same snapshot. ErrUnsupported: the
// plugin lacks CREATE_DELETE_SNAPSHOT. ErrConflict: the volume is not ready.
func (h *Host) CreateSnapshot(ctx context.Context, s SnapshotSpec) (Snapshot, error) {
	reply, err := call(ctx, h, writes, pb.NewSnapshotsClient, pb.SnapshotsClient.Create,
		&pb.CreateSnapshotRequest{Call: mutating(), Spec: wire.SnapshotSpecProto(s)})
	return wire.Snapshot(reply.GetSnapshot()), err
}

// CreateGroupSnapshot takes snapshots of several volumes at one point in time (CreateVolumeGroupSnapshot of CSI), and
// otherwise does what CreateSnapshot does. The spec names Volumes of one plugin. Each member is a snapshot as well,
// with the id SnapshotSpec.MemberID: volumes are created from it, and it is deleted with the group only.
// ErrUnsupported: the plugin lacks CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT.
func (h *Host) CreateGroupSnapshot(ctx context.Context, s SnapshotSpec) (Snapshot, error) {
	reply, err := call(ctx, h, writes, pb.NewSnapshotsClient, pb.SnapshotsClient.CreateGroup,
		&pb.CreateSnapshotRequest{Call: mutating(), Spec: wire.SnapshotSpecProto(s)})
	return wire.Snapshot(reply.GetSnapshot()), err
}

// DeleteGroupSnapshot has the plugin delete the group snapshot with all its snapshots, and removes its record.
func (h *Host) DeleteGroupSnapshot(ctx context.Context, n SnapshotName) error {
	_, err := call(ctx, h, writes, pb.NewSnapshotsClient, pb.SnapshotsClient.DeleteGroup,
		&pb.DeleteSnapshotRequest{Call: mutating(), Name: wire.SnapshotNameProto(n)})
	return err
}

// DeregisterGroupSnapshot removes the record of the group snapshot; the plugin keeps it and its snapshots.
func (h *Host) DeregisterGroupSnapshot(ctx context.Context, n SnapshotName) error {
	_, err := call(ctx, h, writes, pb.NewSnapshotsClient, pb.SnapshotsClient.DeregisterGroup,
		&pb.DeregisterSnapshotRequest{Call: mutating(), Name: wire.SnapshotNameProto(n)})
	return err
}

// DeleteSnapshot has the plugin delete the snapshot, and removes its record. Volumes that were created from it stay.
func (h *Host) DeleteSnapshot(ctx context.Context, n SnapshotName) error {
	_, err := call(ctx, h, writes, pb.NewSnapshotsClient, pb.SnapshotsClient.Delete,
		&pb.DeleteSnapshotRequest{Call: mutating(), Name: wire.SnapshotNameProto(n)})
	return err
}

// DeregisterSnapshot removes the snapshot's record; the plugin keeps the snapshot.
func (h *Host) DeregisterSnapshot(ctx context.Context, n SnapshotName) error {
	_, err := call(ctx, h, writes, pb.NewSnapshotsClient, pb.SnapshotsClient.Deregister,
		&pb.DeregisterSnapshotRequest{Call: mutating(), Name: wire.SnapshotNameProto(n)})
	return err
}

// SnapshotQuery selects snapshots. The zero value selects all.
type SnapshotQuery struct {
	Blocking
	Name   SnapshotName
	Plugin PluginID
	Volume VolumeID
}

// Snapshots returns the snapshots that CreateSnapshot has taken and those that belong to a group snapshot, and the
// index for which this list is true.
func (h *Host) Snapshots(ctx context.Context, q SnapshotQuery) ([]Snapshot, Seq, error) {
	return h.listSnapshots(ctx, q, pb.SnapshotsClient.List)
}

// GroupSnapshots returns the group snapshots, and the index for which this list is true.
func (h *Host) GroupSnapshots(ctx context.Context, q SnapshotQuery) ([]Snapshot, Seq, error) {
	return h.listSnapshots(ctx, q, pb.SnapshotsClient.ListGroups)
}

func (h *Host) listSnapshots(ctx context.Context, q SnapshotQuery, method func(
	pb.SnapshotsClient, context.Context, *pb.ListSnapshotsRequest, ...grpc.CallOption,
) (*pb.ListSnapshotsReply, error)) ([]Snapshot, Seq, error) {
	return pages(q.Blocking, func(p *pb.Page) ([]Snapshot, *pb.Answer, string, error) {
		reply, err := call(ctx, h, reads, pb.NewSnapshotsClient, method, &pb.ListSnapshotsRequest{
			Call: &pb.Call{}, Page: p, Namespace: string(q.Name.Namespace), Id: string(q.Name.ID),
			Plugin: string(q.Plugin), Volume: string(q.Volume),
		})
		return convert(reply.GetSnapshots(), wire.Snapshot), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// SnapshotsAtPlugin lists the snapshots that a plugin has (ListSnapshots of CSI), also those without a record: these
// have no SnapshotSpec. ErrUnsupported: the plugin lacks LIST_SNAPSHOTS.
func (h *Host) SnapshotsAtPlugin(ctx context.Context, plugin PluginID) ([]Snapshot, error) {
	reply, err := call(ctx, h, reads, pb.NewSnapshotsClient, pb.SnapshotsClient.ListAtPlugin,
		&pb.ListSnapshotsAtPluginRequest{Call: &pb.Call{}, Plugin: string(plugin)})
	return convert(reply.GetSnapshots(), wire.Snapshot), err
}
