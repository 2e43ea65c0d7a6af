package task

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/hashicorp/go-hclog"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Tasks keeps a record of each task that runs a plugin, and supervises the tasks that run.
type Tasks struct {
	state      registry.State
	supervisor *Supervisor
	disk       Disk
	layout     hooks.Layout
	operations []hooks.Operation // plan operations that the host supports
	clock      Clock
	logger     hclog.Logger
	locks      intent.Locks // per task

	// supervise is the supervisor's Run.
	supervise func(context.Context, registry.Task, hooks.PluginSpec) error

	mu      sync.Mutex // guards what follows; held for no longer than a look-up
	ctx     context.Context
	ended   bool // no run starts after this is set
	runs    map[registry.TaskKey]*run
	running sync.WaitGroup
}

// Disk makes and removes what a plugin task needs on the host.
type Disk interface {
	MakeDirs(dirs []hooks.HostDir) error
	// ClearSocket removes a socket without a listener. It reports whether the socket has a listener.
	ClearSocket(ctx context.Context, path string) (answers bool, err error)
	// RemoveSocketDir removes the directory of a task's socket, and nothing below a mount.
	RemoveSocketDir(path string) error
	// SweepSocketDirs removes the directories of sockets that have no listener, except those in keep.
	SweepSocketDirs(keep map[string]bool) error
}

// NewTasks returns the tasks of a host that can apply the given plan operations. It starts nothing; Run does.
func NewTasks(s *Supervisor, d Disk, l hooks.Layout, operations []hooks.Operation) *Tasks {
	return &Tasks{
		state: s.state, supervisor: s, disk: d, layout: l, operations: operations, clock: s.clock, logger: s.logger,
		supervise: s.Run, runs: map[registry.TaskKey]*run{},
	}
}

// Starting returns the plan that the host applies before this attempt of a task starts. The host may call it repeatedly
// for one attempt; a repetition gets the recorded plan. Starting refuses an attempt older than the newest.
func (t *Tasks) Starting(ctx context.Context, call registry.Call, at hooks.AllocTask) (hooks.Plan, error) {
	prep, err := t.prepare(at)
	if err != nil {
		return hooks.Plan{}, err
	}
	unlock, err := t.locks.Lock(ctx, at.Key(), "a start")
	if err != nil {
		return hooks.Plan{}, err
	}
	defer unlock()
	known, err := t.attemptRecord(ctx, at)
	if err != nil {
		return hooks.Plan{}, err
	}
	running := known != nil && known.Phase == registry.TaskRunning
	// A repeated start in another run directory is a new start, unless the attempt runs already.
	repeated := known != nil && (running || known.Endpoint == prep.Endpoint)
	if repeated {
		if prep, err = withRecordedPlan(prep, *known); err != nil {
			return hooks.Plan{}, err
		}
	}
	if !running {
		if err := t.makeDirs(ctx, at, prep); err != nil {
			return hooks.Plan{}, err
		}
	}
	if repeated {
		return prep.Plan, t.storeAnswer(ctx, call, prep.Plan)
	}
	if err := t.recordStart(ctx, at, prep, call.Answered(prep.Plan)); err != nil {
		return hooks.Plan{}, fmt.Errorf("record the start of %s: %w", at.Key(), err)
	}
	return prep.Plan, nil
}

// storeAnswer stores the answer of a call that changes nothing else.
func (t *Tasks) storeAnswer(ctx context.Context, call registry.Call, answer any) error {
	_, err := t.state.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Put: call.Answered(answer)}, nil
	})
	return err
}

// recordStart records a new attempt together with more records. It ends the supervision of the earlier attempt, removes
// its instances and closes its connection.
func (t *Tasks) recordStart(
	ctx context.Context, at hooks.AllocTask, prep hooks.Preparation, more []registry.Record,
) error {
	plan, err := json.Marshal(prep.Plan)
	if err != nil {
		return registry.Errorf(registry.ErrInternal, "encode the plan of %s: %w", at.Key(), err)
	}
	t.stop(at.Key(), errNewAttempt)
	_, err = t.state.Commit(ctx, func(v registry.View) (registry.Change, error) {
		change := registry.Change{Put: append(more, registry.Task{
			TaskKey: at.Key(), Job: at.Job, Attempt: at.Attempt, Phase: registry.TaskStarting, Isolated: at.Isolated,
			Sealed: at.Sealed, Digest: at.Digest, Endpoint: prep.Endpoint, Volumes: prep.Volumes, Plan: plan,
		})}
		if old, known := v.Task(at.Key()); known {
			change = t.deregister(v, old, "a newer attempt starts").And(change)
		}
		return change, nil
	})
	if err != nil {
		return err
	}
	t.supervisor.fleet.Close(at.Key())
	return nil
}

// deregister returns the change that removes all instances of a task. If the task's stanza cannot be read, the plugin
// is not known, and the change has no event.
func (t *Tasks) deregister(v registry.View, task registry.Task, detail string) registry.Change {
	spec, err := config.OpenRunning(task.Sealed)
	if err != nil {
		return registry.RemoveTaskChange(v, t.clock.Now(), task.TaskKey)
	}
	var keys []registry.InstanceKey
	for _, role := range spec.Plugin.Type.Roles() {
		keys = append(keys, registry.InstanceKey{
			Role: role, Plugin: spec.Plugin.ID, Alloc: task.Alloc, Task: task.Task,
		})
	}
	change := registry.RemoveChange(v, t.clock.Now(), keys...)
	if !change.Empty() {
		change.Events = append(change.Events, registry.Event{
			Kind: registry.EventTaskRemoved, Plugin: spec.Plugin.ID, Alloc: task.Alloc, Task: task.Task,
			Cause: registry.CauseExited, Detail: detail, At: t.clock.Now(),
		})
	}
	return change
}

// prepare returns the preparation that the task's stanza asks for. It fails if the host does not support the plan.
func (t *Tasks) prepare(at hooks.AllocTask) (hooks.Preparation, error) {
	if at.Attempt == 0 {
		return hooks.Preparation{}, registry.Invalid("task %s: attempts are numbered from 1", at.Key())
	}
	spec, err := config.OpenTask(at.Sealed)
	if err != nil {
		return hooks.Preparation{}, fmt.Errorf("task %s: %w", at.Key(), err)
	}
	prep, err := hooks.Starting(t.layout, at, spec)
	if err != nil {
		return hooks.Preparation{}, fmt.Errorf("task %s: %w", at.Key(), err)
	}
	return prep, prep.Plan.Supported(t.operations)
}

// withRecordedPlan returns prep with the paths and the plan from the task's record. A new run directory or a new shim
// does not move a running task.
func withRecordedPlan(prep hooks.Preparation, task registry.Task) (hooks.Preparation, error) {
	prep.Endpoint, prep.Volumes, prep.Socket = task.Endpoint, task.Volumes, task.Endpoint.Host
	prep.Plan = hooks.Plan{}
	if err := json.Unmarshal(task.Plan, &prep.Plan); err != nil {
		return prep, registry.Errorf(registry.ErrDamaged, "the plan stored for %s: %w", task.TaskKey, err)
	}
	return prep, nil
}

// attemptRecord returns the task's record if it is of this attempt, else nil. If the record is of a newer attempt, it
// returns an ErrConflict.
func (t *Tasks) attemptRecord(ctx context.Context, at hooks.AllocTask) (known *registry.Task, err error) {
	err = t.state.View(ctx, func(v registry.View) error {
		task, ok := v.Task(at.Key())
		switch {
		case ok && task.Attempt > at.Attempt:
			return registry.Errorf(registry.ErrConflict, "attempt %d of %s has ended: attempt %d is known already",
				at.Attempt, at.Key(), task.Attempt)
		case ok && task.Attempt == at.Attempt:
			known = &task
		}
		return nil
	})
	return known, err
}

// makeDirs makes the directories and removes a stale socket. If the socket has a listener, an earlier process still
// lives, and makeDirs fails.
func (t *Tasks) makeDirs(ctx context.Context, at hooks.AllocTask, prep hooks.Preparation) error {
	if err := t.disk.MakeDirs(prep.Dirs); err != nil {
		return fmt.Errorf("prepare %s: %w", at.Key(), err)
	}
	answers, err := t.disk.ClearSocket(ctx, prep.Socket)
	switch {
	case err != nil:
		return fmt.Errorf("clear the socket of %s: %w", at.Key(), err)
	case answers:
		return registry.Errorf(registry.ErrConflict,
			"an earlier process of %s still answers at %s; end it, then start the task again", at.Key(), prep.Socket)
	}
	return nil
}

// Started records that the attempt has run since at, and starts its supervision.
func (t *Tasks) Started(
	ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64, at registry.BootTime,
) error {
	unlock, err := t.locks.Lock(ctx, k, "the report of its start")
	if err != nil {
		return err
	}
	defer unlock()
	return t.started(ctx, call, k, attempt, at)
}

// started is Started for a caller that holds the lock of the task.
func (t *Tasks) started(
	ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64, at registry.BootTime,
) error {
	var task registry.Task
	_, err := t.state.Commit(ctx, func(v registry.View) (registry.Change, error) {
		var ok bool
		switch task, ok = v.Task(k); {
		case !ok:
			return registry.Change{}, registry.Errorf(registry.ErrNotFound,
				"task %s is not known; report that it is starting first", k)
		case task.Attempt != attempt:
			return registry.Change{}, registry.Errorf(registry.ErrConflict,
				"attempt %d of %s is not its newest, which is %d", attempt, k, task.Attempt)
		}
		change := registry.Change{Put: call.Answered(struct{}{})}
		if task.Phase != registry.TaskRunning {
			task.Phase, task.Started = registry.TaskRunning, at
			change.Put = append(change.Put, task)
		}
		return change, nil
	})
	if err != nil {
		return fmt.Errorf("record that %s has started: %w", k, err)
	}
	return t.start(task)
}

// Stopping records that the host is about to end the attempt, and ends its supervision. From then on a plugin that does
// not answer is no failure. The instances and the connection stay until Exited, so that calls in flight can end. If the
// attempt is not recorded as running, Stopping only stores the answer.
func (t *Tasks) Stopping(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64) error {
	unlock, err := t.locks.Lock(ctx, k, "its stop")
	if err != nil {
		return err
	}
	defer unlock()
	task, found, err := t.recordUpTo(ctx, k, attempt)
	if err != nil {
		return err
	}
	if !found || task.Attempt != attempt || task.Phase != registry.TaskRunning {
		return t.storeAnswer(ctx, call, struct{}{})
	}
	t.stop(k, errStopping)
	_, err = t.state.Commit(ctx, func(registry.View) (registry.Change, error) {
		task.Phase, task.Problem = registry.TaskStopping, ""
		return registry.Change{Put: append(call.Answered(struct{}{}), task)}, nil
	})
	if err != nil {
		return fmt.Errorf("record that %s is being stopped: %w", k, err)
	}
	return nil
}

// Prefer makes the instances of the attempt the newest of their plugin. ErrNotFound: the attempt has no instances.
func (t *Tasks) Prefer(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64) error {
	_, err := t.state.Commit(ctx, func(v registry.View) (registry.Change, error) {
		var keys []registry.InstanceKey
		for _, i := range v.AllInstances() {
			if i.TaskKey() == k && i.Attempt == attempt {
				keys = append(keys, i.InstanceKey)
			}
		}
		if len(keys) == 0 {
			return registry.Change{}, registry.Errorf(registry.ErrNotFound, "attempt %d of %s has no instances",
				attempt, k)
		}
		change := registry.PreferChange(v, t.clock.Now(), keys...)
		change.Put = append(change.Put, call.Answered(struct{}{})...)
		return change, nil
	})
	return err
}

// Exit describes how an attempt of a task ended.
type Exit struct {
	Code   int  // below 0: not known
	Signal int  // 0: none
	Final  bool // the task will not be started again
}

func (e Exit) String() string {
	switch {
	case e.Signal != 0:
		return fmt.Sprintf("ended by signal %d", e.Signal)
	case e.Code < 0:
		return "ended with an unknown status"
	}
	return fmt.Sprintf("ended with code %d", e.Code)
}

// Exited records that the attempt has ended, and removes its instances in the same commit. The record of a task that
// will not be started again is deleted, and then the directory of its socket. Exited ignores an attempt older than the
// newest, and a task without a record.
func (t *Tasks) Exited(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64, how Exit) error {
	unlock, err := t.locks.Lock(ctx, k, "the report of its end")
	if err != nil {
		return err
	}
	defer unlock()
	return t.exited(ctx, call, k, attempt, how)
}

// exited is Exited for a caller that holds the lock of the task.
func (t *Tasks) exited(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64, how Exit) error {
	task, found, err := t.recordUpTo(ctx, k, attempt)
	if err != nil {
		return err
	}
	if !found {
		return t.storeAnswer(ctx, call, struct{}{})
	}
	t.stop(k, errExited)
	// The commit ignores cancellation: its outcome must be known, because the socket's directory is removed after it.
	_, err = t.state.Commit(context.WithoutCancel(ctx), func(v registry.View) (registry.Change, error) {
		change := t.deregister(v, task, how.String())
		change.Put = append(change.Put, call.Answered(struct{}{})...)
		if how.Final {
			change.Delete = append(change.Delete, k.Key())
			return change, nil
		}
		task.Phase = registry.TaskExited
		change.Put = append(change.Put, task)
		return change, nil
	})
	if err != nil {
		return fmt.Errorf("record that %s has exited: %w", k, err)
	}
	t.supervisor.fleet.Close(k)
	if how.Final {
		t.removeSocketDir(task)
	}
	return nil
}

// removeSocketDir removes the directory of a task's socket. If that fails, the next shim removes it (Sweep).
func (t *Tasks) removeSocketDir(task registry.Task) {
	dir := t.layout.SocketDir(task.TaskKey)
	if task.Endpoint.Host != "" {
		dir = filepath.Dir(task.Endpoint.Host)
	}
	if err := t.disk.RemoveSocketDir(dir); err != nil {
		t.logger.Warn("cannot remove the directory of a task's socket", "task", task.TaskKey, "path", dir, "error", err)
	}
}

// recordUpTo returns the task's record. found reports whether there is one and it is not of a newer attempt.
func (t *Tasks) recordUpTo(
	ctx context.Context, k registry.TaskKey, attempt uint64,
) (task registry.Task, found bool, err error) {
	err = t.state.View(ctx, func(v registry.View) error {
		var ok bool
		task, ok = v.Task(k)
		found = ok && task.Attempt <= attempt
		return nil
	})
	return task, found, err
}

// Plugins lists the tasks that run the plugin, or all plugin tasks if id is empty. It leaves out tasks whose stanza
// this shim cannot read. at is the index of the answer.
func (t *Tasks) Plugins(
	ctx context.Context, id registry.PluginID,
) (list []registry.PluginTask, at registry.Seq, err error) {
	err = t.state.View(ctx, func(v registry.View) error {
		at = v.Index()
		for _, task := range v.Tasks() {
			if !bytes.Contains(task.Sealed, []byte(id)) {
				continue // do not open the sealed parts of other plugins' tasks
			}
			spec, err := config.OpenRunning(task.Sealed)
			if err != nil || id != "" && spec.Plugin.ID != id {
				continue // start has logged the error
			}
			list = append(list, registry.PluginTask{
				TaskKey: task.TaskKey, Plugin: spec.Plugin.ID, Type: string(spec.Plugin.Type), Job: task.Job,
				Phase: task.Phase, Attempt: task.Attempt, Restart: task.Restart, Problem: task.Problem,
			})
		}
		return nil
	})
	return list, at, err
}
