package host

import (
	"context"
	"errors"
	"slices"

	"holdfast/internal/proc"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// TaskStarting returns the plan to apply to a task that runs a plugin, before this attempt of the task starts. After an
// error there is nothing to apply, but the shim may know of the attempt: it ends with a newer one, or with TaskExited.
func (h *Host) TaskStarting(ctx context.Context, t AllocTask) (Plan, error) {
	req := &pb.TaskStartingRequest{Call: mutating(), Task: wire.AllocTaskProto(t)}
	if _, err := wire.AllocTask(req.GetTask()); err != nil {
		return Plan{}, err // not added to the workload: no shim could start with it
	}
	undo := h.workload.putTask(t)
	reply, err := call(ctx, h, writes, pb.NewTasksClient, pb.TasksClient.Starting, req)
	if err != nil {
		if !mayBeDone(err) {
			undo()
		}
		return Plan{}, err
	}
	return wire.Plan(reply.GetPlan())
}

// mayBeDone reports whether a failed call may have taken effect nevertheless, or may still do so.
func mayBeDone(err error) bool {
	kinds := []error{ErrUnavailable, ErrUncertain, ErrInternal, context.Canceled, context.DeadlineExceeded}
	return slices.ContainsFunc(kinds, func(kind error) bool { return errors.Is(err, kind) })
}

// TaskStarted reports that the attempt has just started.
func (h *Host) TaskStarted(ctx context.Context, k TaskKey, attempt uint64) error {
	boot, err := proc.BootID()
	if err != nil {
		return err
	}
	at := BootTime{Boot: boot, At: proc.BootTime()}
	h.workload.taskStarted(k, attempt, at)
	_, err = call(ctx, h, writes, pb.NewTasksClient, pb.TasksClient.Started, &pb.TaskStartedRequest{
		Call: mutating(), Task: wire.TaskKeyProto(k), Attempt: attempt, At: wire.BootTimeProto(at),
	})
	return err
}

// TaskStopping reports that the attempt is about to be ended on purpose, so that its plugin is not reported as
// unhealthy when it stops answering.
func (h *Host) TaskStopping(ctx context.Context, k TaskKey, attempt uint64) error {
	_, err := call(ctx, h, writes, pb.NewTasksClient, pb.TasksClient.Stopping, &pb.TaskStoppingRequest{
		Call: mutating(), Task: wire.TaskKeyProto(k), Attempt: attempt,
	})
	return err
}

// PreferTask makes the instances of a plugin task the newest of their plugin. As long as they are healthy, they get all
// calls that need not go to another instance. An orchestrator calls it if a newer task has to go and an older one has
// to serve again. It also calls it after a loss of the shim's records, which hold the order of instances. ErrNotFound:
// no instance of the attempt is registered.
func (h *Host) PreferTask(ctx context.Context, k TaskKey, attempt uint64) error {
	_, err := call(ctx, h, writes, pb.NewTasksClient, pb.TasksClient.Prefer, &pb.PreferTaskRequest{
		Call: mutating(), Task: wire.TaskKeyProto(k), Attempt: attempt,
	})
	return err
}

// TaskExited reports that the attempt has ended. If final, the task will not be started again. With a code below 0, the
// status is not known.
func (h *Host) TaskExited(ctx context.Context, k TaskKey, attempt uint64, code, signal int, final bool) error {
	h.workload.taskExited(k, attempt, final)
	_, err := call(ctx, h, writes, pb.NewTasksClient, pb.TasksClient.Exited, &pb.TaskExitedRequest{
		Call: mutating(), Task: wire.TaskKeyProto(k), Attempt: attempt,
		Code: int32(code), Signal: int32(signal), Final: final,
	})
	return err
}
