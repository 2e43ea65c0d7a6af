package rpc

import (
	"context"

	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/task"
)

type tasks struct {
	pb.UnimplementedTasksServer
	s *Server
}

func (t *tasks) Starting(ctx context.Context, req *pb.TaskStartingRequest) (*pb.TaskStartingReply, error) {
	plan, at, err := change(ctx, t.s, "Tasks.Starting", req,
		func(ctx context.Context, a *Active, call registry.Call) (hooks.Plan, error) {
			starting, err := wire.AllocTask(req.GetTask())
			if err != nil {
				return hooks.Plan{}, err
			}
			return a.Tasks.Starting(ctx, call, starting)
		})
	return &pb.TaskStartingReply{Answer: at, Plan: wire.PlanProto(plan)}, err
}

func (t *tasks) Started(ctx context.Context, req *pb.TaskStartedRequest) (*pb.TaskStartedReply, error) {
	at, err := t.report(ctx, "Tasks.Started", req,
		func(ctx context.Context, a *Active, call registry.Call, k registry.TaskKey) error {
			return a.Tasks.Started(ctx, call, k, req.GetAttempt(), wire.BootTime(req.GetAt()))
		})
	return &pb.TaskStartedReply{Answer: at}, err
}

func (t *tasks) Stopping(ctx context.Context, req *pb.TaskStoppingRequest) (*pb.TaskStoppingReply, error) {
	at, err := t.report(ctx, "Tasks.Stopping", req,
		func(ctx context.Context, a *Active, call registry.Call, k registry.TaskKey) error {
			return a.Tasks.Stopping(ctx, call, k, req.GetAttempt())
		})
	return &pb.TaskStoppingReply{Answer: at}, err
}

func (t *tasks) Prefer(ctx context.Context, req *pb.PreferTaskRequest) (*pb.PreferTaskReply, error) {
	at, err := t.report(ctx, "Tasks.Prefer", req,
		func(ctx context.Context, a *Active, call registry.Call, k registry.TaskKey) error {
			return a.Tasks.Prefer(ctx, call, k, req.GetAttempt())
		})
	return &pb.PreferTaskReply{Answer: at}, err
}

func (t *tasks) Exited(ctx context.Context, req *pb.TaskExitedRequest) (*pb.TaskExitedReply, error) {
	at, err := t.report(ctx, "Tasks.Exited", req,
		func(ctx context.Context, a *Active, call registry.Call, k registry.TaskKey) error {
			how := task.Exit{Code: int(req.GetCode()), Signal: int(req.GetSignal()), Final: req.GetFinal()}
			return a.Tasks.Exited(ctx, call, k, req.GetAttempt(), how)
		})
	return &pb.TaskExitedReply{Answer: at}, err
}

// report records an event of the task that a request names.
func (t *tasks) report(
	ctx context.Context, method string, req interface {
		request
		GetTask() *pb.TaskKey
	}, record func(context.Context, *Active, registry.Call, registry.TaskKey) error,
) (*pb.Answer, error) {
	return do(ctx, t.s, method, req, func(ctx context.Context, a *Active, call registry.Call) error {
		k, err := taskKey(req.GetTask())
		if err != nil {
			return err
		}
		return record(ctx, a, call, k)
	})
}
