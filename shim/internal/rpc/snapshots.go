package rpc

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/cluster"
	"holdfast/shim/internal/controller"
)

type snapshots struct {
	pb.UnimplementedSnapshotsServer
	s *Server
}

func (n *snapshots) Create(ctx context.Context, req *pb.CreateSnapshotRequest) (*pb.CreateSnapshotReply, error) {
	return n.create(ctx, "Snapshots.Create", req, false)
}

func (n *snapshots) CreateGroup(ctx context.Context, req *pb.CreateSnapshotRequest) (*pb.CreateSnapshotReply, error) {
	return n.create(ctx, "Snapshots.CreateGroup", req, true)
}

func (n *snapshots) create(
	ctx context.Context, method string, req *pb.CreateSnapshotRequest, group bool,
) (*pb.CreateSnapshotReply, error) {
	snapshot, at, err := change(ctx, n.s, method, req, withStoredAnswer(
		func(ctx context.Context, a *Active, call registry.Call) (registry.VolumeSnapshot, error) {
			spec, err := snapshotSpec(req.GetSpec(), group)
			if err != nil {
				return registry.VolumeSnapshot{}, err
			}
			return a.Snapshots.Create(ctx, call, spec)
		}))
	return &pb.CreateSnapshotReply{Answer: at, Snapshot: wire.SnapshotProto(snapshot)}, err
}

// snapshotSpec returns the spec of a snapshot, or of a group snapshot. The volumes of a group are sorted.
func snapshotSpec(m *pb.SnapshotSpec, group bool) (registry.SnapshotSpec, error) {
	spec := wire.SnapshotSpec(m)
	name, err := snapshotName(m.GetName())
	if err != nil {
		return spec, err
	}
	spec.Namespace = name.Namespace
	volumes := []registry.VolumeID{spec.Volume}
	if group {
		slices.Sort(spec.Volumes)
		volumes = spec.Volumes
	}
	for i, id := range volumes {
		if err := check(id, registry.ParseVolumeID); err != nil {
			return spec, err
		}
		if i > 0 && id == volumes[i-1] {
			return spec, registry.Invalid("volume %s is given twice", id)
		}
	}
	for name, s := range spec.Secrets {
		if s.Literal != "" {
			return spec, registry.Invalid(
				"secret %q of a snapshot is a reference: an environment variable, a file or a callback", name)
		}
	}
	switch {
	case group && (len(volumes) == 0 || len(volumes) > maxGroup):
		return spec, registry.Invalid("a group snapshot is taken of 1 to %d volumes, not of %d", maxGroup, len(volumes))
	case group != spec.IsGroup() || group && spec.Volume != "":
		return spec, registry.Invalid("a snapshot is taken of one volume, a group snapshot of a list of volumes")
	case spec.Name != "":
		_, err = registry.ParseCreateName(spec.Name)
	}
	return spec, err
}

// maxGroup bounds the volumes of a group snapshot, because its record names all of them.
const maxGroup = 100

func (n *snapshots) Delete(ctx context.Context, req *pb.DeleteSnapshotRequest) (*pb.DeleteSnapshotReply, error) {
	at, err := n.remove(ctx, "Snapshots.Delete", req, req.GetName(), registry.View.Snapshot,
		(*controller.Snapshots).Delete)
	return &pb.DeleteSnapshotReply{Answer: at}, err
}

func (n *snapshots) DeleteGroup(ctx context.Context, req *pb.DeleteSnapshotRequest) (*pb.DeleteSnapshotReply, error) {
	at, err := n.remove(ctx, "Snapshots.DeleteGroup", req, req.GetName(), registry.View.GroupSnapshot,
		(*controller.Snapshots).DeleteGroup)
	return &pb.DeleteSnapshotReply{Answer: at}, err
}

func (n *snapshots) Deregister(
	ctx context.Context, req *pb.DeregisterSnapshotRequest,
) (*pb.DeregisterSnapshotReply, error) {
	at, err := n.remove(ctx, "Snapshots.Deregister", req, req.GetName(), registry.View.Snapshot,
		(*controller.Snapshots).Deregister)
	return &pb.DeregisterSnapshotReply{Answer: at}, err
}

func (n *snapshots) DeregisterGroup(
	ctx context.Context, req *pb.DeregisterSnapshotRequest,
) (*pb.DeregisterSnapshotReply, error) {
	at, err := n.remove(ctx, "Snapshots.DeregisterGroup", req, req.GetName(), registry.View.GroupSnapshot,
		(*controller.Snapshots).DeregisterGroup)
	return &pb.DeregisterSnapshotReply{Answer: at}, err
}

// remove runs an operation that removes the record of a snapshot, which find reads.
func (n *snapshots) remove(
	ctx context.Context, method string, req request, m *pb.SnapshotName,
	find func(registry.View, registry.SnapshotName) (registry.VolumeSnapshot, bool),
	run func(*controller.Snapshots, context.Context, registry.Call, registry.SnapshotName) error,
) (*pb.Answer, error) {
	return do(ctx, n.s, method, req, func(ctx context.Context, a *Active, call registry.Call) error {
		name, err := snapshotName(m)
		if err != nil {
			return err
		}
		indexOf := func(v registry.View) registry.Seq {
			snapshot, _ := find(v, name)
			return snapshot.CreateIndex
		}
		return runRemoval(ctx, a, call, indexOf, func() error { return run(a.Snapshots, ctx, call, name) })
	})
}

func (n *snapshots) List(ctx context.Context, req *pb.ListSnapshotsRequest) (*pb.ListSnapshotsReply, error) {
	return n.list(ctx, req, registry.View.Snapshots)
}

func (n *snapshots) ListGroups(ctx context.Context, req *pb.ListSnapshotsRequest) (*pb.ListSnapshotsReply, error) {
	return n.list(ctx, req, registry.View.GroupSnapshots)
}

func (n *snapshots) list(
	ctx context.Context, req *pb.ListSnapshotsRequest, read func(registry.View) []registry.VolumeSnapshot,
) (*pb.ListSnapshotsReply, error) {
	if err := checkFilters(req.GetNamespace(), req.GetVolume(), "", req.GetPlugin()); err != nil {
		return nil, wire.Status(err)
	}
	key := func(s registry.VolumeSnapshot) string { return s.Key().Path }
	buckets := []registry.Bucket{registry.BucketSnapshots, registry.BucketGroupSnapshots}
	part, next, at, err := list(ctx, n.s, req, buckets, key, wire.SnapshotProto,
		func(ctx context.Context, a *Active) (all []registry.VolumeSnapshot, at registry.Seq, err error) {
			err = a.State.View(ctx, func(v registry.View) error {
				all, at = read(v), v.Index()
				return nil
			})
			ofVolume := func(m registry.GroupMember) bool { return req.GetVolume() == string(m.Volume) }
			return slices.DeleteFunc(all, func(s registry.VolumeSnapshot) bool {
				return !(passes(req.GetNamespace(), s.Namespace) && passes(req.GetId(), s.ID) &&
					passes(req.GetPlugin(), s.Plugin) &&
					(req.GetVolume() == "" || slices.ContainsFunc(s.Each(), ofVolume)))
			}), at, err
		})
	return &pb.ListSnapshotsReply{Answer: at, Snapshots: part, NextToken: next}, err
}

// ListAtPlugin asks a plugin. It changes nothing, and its answer is true only at that moment.
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

// Blocks sends a list of blocks in parts. If this shim cannot finish a list, the next shim continues it.
func (n *snapshots) Blocks(
	req *pb.SnapshotBlocksRequest, stream grpc.ServerStreamingServer[pb.SnapshotBlocksReply],
) error {
	if a := n.s.active.Load(); a != nil && a.Cluster != nil {
		ctx, cancel := a.whileActive(stream.Context())
		defer cancel()
		ask := func(ctx context.Context, req *pb.SnapshotBlocksRequest) ([]byte, error) {
			reply, _, err := a.pass(ctx, pb.Snapshots_Blocks_FullMethodName, req)
			return reply, err
		}
		rest, err := passBlocks(ctx, req, ask, func(part *pb.SnapshotBlocksReply) error {
			part.Answer = a.latest(ctx)
			return stream.Send(part)
		})
		if !errors.Is(err, cluster.ErrHere) {
			return a.status(stream.Context(), err)
		}
		req = rest
	}
	return n.blocks(stream.Context(), req, stream.Send)
}

// blocks lists blocks at this node.
func (n *snapshots) blocks(
	caller context.Context, req *pb.SnapshotBlocksRequest, send func(*pb.SnapshotBlocksReply) error,
) error {
	a, err := n.s.activeFor(req)
	if err != nil {
		return err
	}
	q := registry.BlockQuery{Base: registry.SnapshotID(req.GetBaseId()), Offset: req.GetStartingOffset()}
	if q.Snapshot, err = snapshotName(req.GetSnapshot()); err == nil && q.Base != "" {
		err = check(q.Base, registry.ParseSnapshotID)
	}
	if err != nil {
		return wire.Status(err)
	}
	ctx, cancel := a.whileActive(caller)
	defer cancel()
	next := q.Offset
	err = a.Snapshots.Blocks(ctx, q, func(part registry.Blocks) error {
		reply := &pb.SnapshotBlocksReply{Answer: a.latest(ctx), BlockType: string(part.Type),
			VolumeCapacityBytes: part.Capacity}
		for _, r := range part.Ranges {
			reply.Ranges = append(reply.Ranges, &pb.BlockRange{Offset: r.Offset, Size: r.Size})
			next = r.End()
		}
		reply.NextOffset = next
		return send(reply)
	})
	return a.status(caller, err)
}
