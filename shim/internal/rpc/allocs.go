package rpc

import (
	"context"

	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/task"
)

type allocs struct {
	pb.UnimplementedAllocsServer
	s *Server
}

// synced is the answer to Sync.
type synced struct {
	Allocs []registry.AllocID
	Tasks  task.Synced
}

// Sync takes down allocs before it forgets plugin tasks, because the release of an alloc may need its plugin.
func (s *allocs) Sync(ctx context.Context, req *pb.SyncRequest) (*pb.SyncReply, error) {
	done, at, err := change(ctx, s.s, "Allocs.Sync", req,
		func(ctx context.Context, a *Active, _ registry.Call) (synced, error) {
			allocIDs, living, err := livingAllocsAndTasks(req)
			if err != nil {
				return synced{}, err
			}
			gone, err := a.Allocs.Sync(ctx, allocIDs)
			if err != nil {
				return synced{}, err
			}
			tasks, err := a.Tasks.Sync(ctx, living)
			return synced{gone, tasks}, err
		})
	reply := &pb.SyncReply{Answer: at}
	for _, id := range done.Allocs {
		reply.ReleasedAllocs = append(reply.ReleasedAllocs, string(id))
	}
	for _, k := range done.Tasks.Removed {
		reply.RemovedTasks = append(reply.RemovedTasks, wire.TaskKeyProto(k))
	}
	for _, r := range done.Tasks.Refused {
		reply.Refused = append(reply.Refused, &pb.RefusedTask{Task: wire.TaskKeyProto(r.Task), Reason: r.Why})
	}
	return reply, err
}

func livingAllocsAndTasks(req *pb.SyncRequest) (ids []registry.AllocID, living []task.LivingTask, err error) {
	for _, m := range req.GetAllocs() {
		g, err := wire.AllocGroup(m)
		if err != nil {
			return nil, nil, err
		}
		ids = append(ids, g.Alloc)
	}
	for _, m := range req.GetTasks() {
		t, err := wire.AllocTask(m.GetTask())
		if err != nil {
			return nil, nil, err
		}
		living = append(living, task.LivingTask{Task: t, Running: m.GetRunning(),
			Started: wire.BootTime(m.GetStarted())})
	}
	return ids, living, nil
}

func (s *allocs) Prepare(ctx context.Context, req *pb.PrepareRequest) (*pb.PrepareReply, error) {
	plans, at, err := change(ctx, s.s, "Allocs.Prepare", req,
		func(ctx context.Context, a *Active, call registry.Call) (map[string]hooks.Plan, error) {
			g, err := wire.AllocGroup(req.GetAlloc())
			if err != nil {
				return nil, err
			}
			return a.Allocs.Prepare(ctx, call, g)
		})
	return &pb.PrepareReply{Answer: at, Plans: wire.PlansProto(plans)}, err
}

func (s *allocs) Release(ctx context.Context, req *pb.ReleaseAllocRequest) (*pb.ReleaseAllocReply, error) {
	at, err := do(ctx, s.s, "Allocs.Release", req, func(ctx context.Context, a *Active, call registry.Call) error {
		id, err := registry.ParseAllocID(req.GetAlloc())
		if err != nil {
			return err
		}
		return a.Allocs.Release(ctx, call, id, req.GetKeepVolumes())
	})
	return &pb.ReleaseAllocReply{Answer: at}, err
}

func (s *allocs) Feasible(ctx context.Context, req *pb.FeasibleRequest) (*pb.FeasibleReply, error) {
	reply := &pb.FeasibleReply{}
	reasons, answer, err := query(ctx, s.s, req, func(ctx context.Context, a *Active) ([]registry.Infeasible, error) {
		g, err := wire.AllocGroup(req.GetAlloc())
		if err != nil {
			return nil, err
		}
		reasons, at, err := a.Allocs.Feasible(ctx, g)
		reply.Index = uint64(at)
		return reasons, err
	})
	if err != nil {
		return nil, err
	}
	reply.Answer = answer
	for _, r := range reasons {
		reply.Reasons = append(reply.Reasons, wire.InfeasibleProto(r))
	}
	return reply, nil
}

// useBuckets have the records from which the status of allocs and volumes is made.
var useBuckets = []registry.Bucket{
	registry.BucketAllocs, registry.BucketClaims, registry.BucketRefs, registry.BucketVolumes,
	registry.BucketInlineVolumes, registry.BucketAttachments, registry.BucketStagings, registry.BucketIntents,
	registry.BucketNodeIntents,
}

func (s *allocs) List(ctx context.Context, req *pb.ListAllocsRequest) (*pb.ListAllocsReply, error) {
	key := func(al registry.AllocStatus) string { return al.Key().Path }
	part, next, at, err := list(ctx, s.s, req, useBuckets, key, wire.AllocProto,
		func(ctx context.Context, a *Active) ([]registry.AllocStatus, registry.Seq, error) {
			only := registry.AllocID(req.GetAlloc())
			if err := checkOptional(only, registry.ParseAllocID); err != nil {
				return nil, 0, err
			}
			return a.Allocs.Status(ctx, only)
		})
	return &pb.ListAllocsReply{Answer: at, Allocs: part, NextToken: next}, err
}
