package rpc

import (
	"context"
	"slices"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/controller"
)

type snapshots struct {
	pb.UnimplementedSnapshotsServer
	s *Server
}

func (n *snapshots) Create(ctx context.Context, req *pb.CreateSnapshotRequest) (*pb.CreateSnapshotReply, error) {
	snapshot, at, err := change(ctx, n.s, "Snapshots.Create", req, answered(
		func(ctx context.Context, a *Active, call registry.Call) (registry.VolumeSnapshot, error) {
			spec := wire.SnapshotSpec(req.GetSpec())
			name, err := snapshotName(req.GetSpec().GetName())
			if err == nil {
				err = check(spec.Volume, registry.ParseVolumeID)
			}
			if err == nil && spec.Name != "" {
				_, err = registry.ParseCreateName(spec.Name)
			}
			if err != nil {
				return registry.VolumeSnapshot{}, err
			}
			spec.Namespace = name.Namespace
			return a.Snapshots.Create(ctx, call, spec)
		}))
	return &pb.CreateSnapshotReply{Answer: at, Snapshot: wire.SnapshotProto(snapshot)}, err
}

func (n *snapshots) Delete(ctx context.Context, req *pb.DeleteSnapshotRequest) (*pb.DeleteSnapshotReply, error) {
	at, err := n.remove(ctx, "Snapshots.Delete", req, req.GetName(), (*controller.Snapshots).Delete)
	return &pb.DeleteSnapshotReply{Answer: at}, err
}

func (n *snapshots) Deregister(
	ctx context.Context, req *pb.DeregisterSnapshotRequest,
) (*pb.DeregisterSnapshotReply, error) {
	at, err := n.remove(ctx, "Snapshots.Deregister", req, req.GetName(),
		func(s *controller.Snapshots, ctx context.Context, _ registry.Call, name registry.SnapshotName) error {
			return s.Deregister(ctx, name)
		})
	return &pb.DeregisterSnapshotReply{Answer: at}, err
}

// remove runs a use case that removes the record of a snapshot.
func (n *snapshots) remove(ctx context.Context, method string, req request, m *pb.SnapshotName,
	run func(*controller.Snapshots, context.Context, registry.Call, registry.SnapshotName) error) (*pb.Answer, error) {
	return do(ctx, n.s, method, req, func(ctx context.Context, a *Active, call registry.Call) error {
		name, err := snapshotName(m)
		if err != nil {
			return err
		}
		index := func(v registry.View) registry.Seq {
			snapshot, _ := v.Snapshot(name)
			return snapshot.CreateIndex
		}
		return removed(ctx, a, call, index, func() error { return run(a.Snapshots, ctx, call, name) })
	})
}

func (n *snapshots) List(ctx context.Context, req *pb.ListSnapshotsRequest) (*pb.ListSnapshotsReply, error) {
	if err := filters(req.GetNamespace(), req.GetVolume(), "", req.GetPlugin()); err != nil {
		return nil, wire.Status(err)
	}
	key := func(s registry.VolumeSnapshot) string { return s.Key().Path }
	part, next, at, err := list(ctx, n.s, req, key, wire.SnapshotProto,
		func(ctx context.Context, a *Active) (all []registry.VolumeSnapshot, at registry.Seq, err error) {
			err = a.State.View(ctx, func(v registry.View) error {
				all, at = v.Snapshots(), v.Index()
				return nil
			})
			differs := func(wanted, is string) bool { return wanted != "" && wanted != is }
			return slices.DeleteFunc(all, func(s registry.VolumeSnapshot) bool {
				return differs(req.GetNamespace(), string(s.Namespace)) || differs(req.GetId(), string(s.ID)) ||
					differs(req.GetPlugin(), string(s.Plugin)) || differs(req.GetVolume(), string(s.Volume))
			}), at, err
		})
	return &pb.ListSnapshotsReply{Answer: at, Snapshots: part, NextToken: next}, err
}

// ListAtPlugin asks a plugin. It changes nothing, and its answer is of the moment.
func (n *snapshots) ListAtPlugin(
	ctx context.Context, req *pb.ListSnapshotsAtPluginRequest,
) (*pb.ListSnapshotsAtPluginReply, error) {
	plugin, err := registry.ParsePluginID(req.GetPlugin())
	if err != nil {
		return nil, wire.Status(err)
	}
	list, at, err := query(ctx, n.s, req, func(ctx context.Context, a *Active) ([]registry.VolumeSnapshot, error) {
		return a.Snapshots.ListAtPlugin(ctx, plugin, registry.ExternalID(req.GetSourceVolumeId()))
	})
	if err != nil {
		return nil, err
	}
	reply := &pb.ListSnapshotsAtPluginReply{Answer: at}
	for _, s := range list {
		reply.Snapshots = append(reply.Snapshots, wire.SnapshotProto(s))
	}
	return reply, nil
}

func snapshotName(m *pb.SnapshotName) (registry.SnapshotName, error) {
	n := wire.SnapshotName(m)
	if n.Namespace == "" {
		n.Namespace = registry.DefaultNamespace
	}
	if err := check(n.Namespace, registry.ParseNamespace); err != nil {
		return n, err
	}
	return n, check(n.ID, registry.ParseSnapshotID)
}
