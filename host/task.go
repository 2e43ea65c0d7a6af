package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// TaskStarting says what to apply to a task that runs a plugin, before this attempt of it starts. Nothing has been applied when it fails.
func (h *Host) TaskStarting(ctx context.Context, t AllocTask) (Plan, error) {
	req := &pb.TaskStartingRequest{Call: &pb.Call{OperationId: newOperation()}, Task: wire.AllocTaskProto(t)}
	if _, err := wire.AllocTask(req.GetTask()); err != nil {
		return Plan{}, err // before it is noted: no shim could start that is told of it
	}
	var reply *pb.TaskStartingReply
	undo := h.living.putTask(t)
	err := h.call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		reply, err = pb.NewTasksClient(conn).Starting(ctx, req)
		return err
	})
	if err != nil {
		if !open(err) {
			undo()
		}
		return Plan{}, err
	}
	return wire.Plan(reply.GetPlan())
}

// open says whether a call that failed so may have been done nevertheless, or may still be.
func open(err error) bool {
	for _, kind := range []error{ErrUnavailable, ErrUncertain, ErrInternal, context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}

// TaskStarted tells that the attempt runs, since now.
func (h *Host) TaskStarted(ctx context.Context, k TaskKey, attempt uint64) error {
	at, err := bootTime()
	if err != nil {
		return err
	}
	req := &pb.TaskStartedRequest{Call: &pb.Call{OperationId: newOperation()}, Task: wire.TaskKeyProto(k), Attempt: attempt, At: wire.BootTimeProto(at)}
	h.living.started(k, attempt, at)
	return h.call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		_, err := pb.NewTasksClient(conn).Started(ctx, req)
		return err
	})
}

// TaskStopping tells that the attempt is about to be ended on purpose: that its plugin falls silent is then no illness. Without it the plugin
// is told to be gone, and then to be deregistered.
func (h *Host) TaskStopping(ctx context.Context, k TaskKey, attempt uint64) error {
	req := &pb.TaskStoppingRequest{Call: &pb.Call{OperationId: newOperation()}, Task: wire.TaskKeyProto(k), Attempt: attempt}
	return h.call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		_, err := pb.NewTasksClient(conn).Stopping(ctx, req)
		return err
	})
}

// TaskExited tells that the attempt has ended. Final: the task will not be started again.
func (h *Host) TaskExited(ctx context.Context, k TaskKey, attempt uint64, code, signal int, final bool) error {
	req := &pb.TaskExitedRequest{
		Call: &pb.Call{OperationId: newOperation()}, Task: wire.TaskKeyProto(k), Attempt: attempt, Code: int32(code), Signal: int32(signal), Final: final,
	}
	h.living.exited(k, attempt, final)
	return h.call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		_, err := pb.NewTasksClient(conn).Exited(ctx, req)
		return err
	})
}

// bootTime is CLOCK_BOOTTIME of this boot.
func bootTime() (BootTime, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return BootTime{}, fmt.Errorf("boot id: %w", err)
	}
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return BootTime{}, fmt.Errorf("boot time: %w", err)
	}
	return BootTime{Boot: strings.TrimSpace(string(boot)), At: time.Duration(ts.Nano())}, nil
}

// PrepareAlloc claims, attaches, stages and publishes the alloc's volumes, and says what to apply to its tasks, by name. No task of the
// alloc starts before it has answered. It may be called again after an error; ReleaseAlloc undoes it in any case, and ends it with ErrConflict
// if it is under way.
func (h *Host) PrepareAlloc(ctx context.Context, g AllocGroup) (map[string]Plan, error) {
	req := &pb.PrepareRequest{Call: &pb.Call{OperationId: newOperation()}, Alloc: wire.AllocGroupProto(g)}
	if _, err := wire.AllocGroup(req.GetAlloc()); err != nil {
		return nil, err // before it is noted: no shim could start that is told of it
	}
	var reply *pb.PrepareReply
	limited, done := h.preparing.begin(ctx, g.Alloc)
	undo := h.living.putAlloc(g)
	err := h.call(limited, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		reply, err = pb.NewAllocsClient(conn).Prepare(ctx, req)
		return err
	})
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		h.living.dropAlloc(g.Alloc)
		err = context.Cause(limited)
	}
	if errors.Is(err, ErrInvalid) { // of all else, part may be done
		undo()
	}
	done()
	if err != nil {
		return nil, h.explained(ctx, g.Alloc, err)
	}
	return wire.Plans(reply.GetPlans())
}

// explainLimit is how long an error whose caller's time is up may take to be explained.
const explainLimit = 250 * time.Millisecond

// explained adds what the alloc waits for to an error that says only that the time is up: the answer came too late to say so.
func (h *Host) explained(ctx context.Context, id AllocID, err error) error {
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), explainLimit)
	defer cancel()
	list, _, failed := h.Allocs(ctx, id)
	if failed != nil || len(list) == 0 || len(list[0].Waiting) == 0 {
		return err
	}
	return fmt.Errorf("alloc %s: %s: %w", id, registry.Waits(list[0].Waiting), err)
}

// ReleaseAlloc takes back what the alloc holds, once all its tasks have ended. It is legal in any state and any number of times. An error
// means that it is not done yet; the shim goes on by itself.
func (h *Host) ReleaseAlloc(ctx context.Context, id AllocID) error {
	req := &pb.ReleaseAllocRequest{Call: &pb.Call{OperationId: newOperation()}, Alloc: string(id)}
	h.preparing.stop(ctx, id)
	h.living.dropAlloc(id)
	err := h.call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		_, err := pb.NewAllocsClient(conn).Release(ctx, req)
		return err
	})
	return h.explained(ctx, id, err)
}

// Sync tells the shim the complete list of what runs. What it does not name is taken down. Open has done so with Config.Living, and each
// new shim is told what the calls since then add up to, so this is for hosts that keep a better account. A task that the shim cannot take
// over is left alone, and logged.
func (h *Host) Sync(ctx context.Context, all Workload) error {
	if err := all.check(); err != nil {
		return err
	}
	h.living.replace(all)
	return h.call(ctx, h.sync)
}

// sync tells the shim behind conn what lives.
func (h *Host) sync(ctx context.Context, conn grpc.ClientConnInterface) error {
	reply, err := pb.NewAllocsClient(conn).Sync(ctx, h.living.request())
	for _, r := range reply.GetRefused() {
		h.config.Logger.Error("the shim cannot take over a task that lives; it is left alone", "task", wire.TaskKey(r.GetTask()), "reason", r.GetReason())
	}
	return err
}
