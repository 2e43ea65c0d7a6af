package rpc

import (
	"context"

	"google.golang.org/grpc"

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
	at, err := wire.AllocTask(req.GetTask())
	if err != nil {
		return nil, wire.Status(err)
	}
	var answer *pb.Answer
	plan, err := mutate(ctx, t.s, "Tasks.Starting", req,
		func(ctx context.Context, a *Active, call registry.Call) (hooks.Plan, error) {
			plan, err := a.Tasks.Starting(ctx, call, at)
			answer = a.latest(ctx)
			return plan, err
		})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.TaskStartingReply{Answer: t.s.answerOrLatest(ctx, answer), Plan: wire.PlanProto(plan)}, nil
}

func (t *tasks) Started(ctx context.Context, req *pb.TaskStartedRequest) (*pb.TaskStartedReply, error) {
	k, err := taskKey(req.GetTask())
	if err != nil {
		return nil, wire.Status(err)
	}
	_, err = mutate(ctx, t.s, "Tasks.Started", req,
		func(ctx context.Context, a *Active, call registry.Call) (struct{}, error) {
			return struct{}{}, a.Tasks.Started(ctx, call, k, req.GetAttempt(), wire.BootTime(req.GetAt()))
		})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.TaskStartedReply{Answer: t.s.answerOrLatest(ctx, nil)}, nil
}

func (t *tasks) Stopping(ctx context.Context, req *pb.TaskStoppingRequest) (*pb.TaskStoppingReply, error) {
	k, err := taskKey(req.GetTask())
	if err != nil {
		return nil, wire.Status(err)
	}
	_, err = mutate(ctx, t.s, "Tasks.Stopping", req,
		func(ctx context.Context, a *Active, call registry.Call) (struct{}, error) {
			return struct{}{}, a.Tasks.Stopping(ctx, call, k, req.GetAttempt())
		})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.TaskStoppingReply{Answer: t.s.answerOrLatest(ctx, nil)}, nil
}

func (t *tasks) Exited(ctx context.Context, req *pb.TaskExitedRequest) (*pb.TaskExitedReply, error) {
	k, err := taskKey(req.GetTask())
	if err != nil {
		return nil, wire.Status(err)
	}
	_, err = mutate(ctx, t.s, "Tasks.Exited", req,
		func(ctx context.Context, a *Active, call registry.Call) (struct{}, error) {
			how := task.Exit{Code: int(req.GetCode()), Signal: int(req.GetSignal()), Final: req.GetFinal()}
			return struct{}{}, a.Tasks.Exited(ctx, call, k, req.GetAttempt(), how)
		})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.TaskExitedReply{Answer: t.s.answerOrLatest(ctx, nil)}, nil
}

// Restarts sends the list, and again whenever it has changed.
func (t *tasks) Restarts(req *pb.RestartsRequest, stream grpc.ServerStreamingServer[pb.RestartsReply]) error {
	a, err := t.s.activeFor(req)
	if err != nil {
		return err
	}
	ctx, cancel := a.whileActive(stream.Context())
	defer cancel()
	var last []registry.PendingRestart
	for first := true; ; first = false {
		seen := a.Notifier.Count()
		list, at, err := a.Tasks.Restarts(ctx)
		if err != nil {
			return wire.Status(err)
		}
		if first || !sameRestarts(last, list) {
			last = list
			reply := &pb.RestartsReply{Answer: a.answer(at)}
			for _, r := range list {
				reply.Requests = append(reply.Requests, wire.RestartProto(r))
			}
			if err := stream.Send(reply); err != nil {
				return err
			}
		}
		if err := a.Notifier.Wait(ctx, seen); err != nil {
			return wire.Status(err)
		}
	}
}

func sameRestarts(x, y []registry.PendingRestart) bool {
	if len(x) != len(y) {
		return false
	}
	for i := range x {
		if x[i].TaskKey != y[i].TaskKey || x[i].Attempt != y[i].Attempt {
			return false
		}
	}
	return true
}

// answerOrLatest is answer, or one true for now.
func (s *Server) answerOrLatest(ctx context.Context, answer *pb.Answer) *pb.Answer {
	if answer != nil {
		return answer
	}
	if a := s.active.Load(); a != nil {
		return a.latest(ctx)
	}
	return statusAnswer(s.life.Status())
}
