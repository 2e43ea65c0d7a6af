package alloc

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/lane"
)

// Tasks knows every task that runs a plugin, and has each watched while it runs.
type Tasks struct {
	// Calm is how long Run waits before it has tasks watched, one after the other: the shim before may have done so until now, and calls may wait. Set
	// before Run.
	Calm time.Duration

	log        registry.State
	supervisor Supervisor
	disk       Disk
	layout     hooks.Layout
	operations []hooks.Operation // that the host can apply
	clock      Clock
	logger     hclog.Logger
	lanes      lane.Lanes // of tasks

	crew crew
	mu   sync.Mutex // guards watches; held for no longer than a look-up
	// watches are the tasks that are watched now: one watch a task.
	watches map[registry.TaskKey]*watch
}

// Clock is the time as records keep it.
type Clock struct {
	Now  func() time.Time         // wall time, for people
	Boot func() registry.BootTime // for deadlines that outlive the process
}

type watch struct {
	attempt uint64
	cancel  context.CancelCauseFunc
	done    chan struct{}
}

// Host is what Hello told of the host.
type Host struct {
	Node       registry.NodeName
	Operations []hooks.Operation
}

// NewTasks starts nothing; Run does.
func NewTasks(log registry.State, s Supervisor, d Disk, l hooks.Layout, h Host, c Clock, logger hclog.Logger) *Tasks {
	return &Tasks{
		log: log, supervisor: s, disk: d, layout: l, operations: h.Operations, clock: c, logger: logger,
		watches: map[registry.TaskKey]*watch{},
	}
}

// Run watches the tasks that were running when the last shim ended, and those that start, until ctx ends.
func (t *Tasks) Run(ctx context.Context) error {
	select {
	case <-time.After(t.Calm):
	case <-ctx.Done():
	}
	var tasks []registry.Task
	err := t.log.View(ctx, func(v registry.View) error { tasks = v.Tasks(); return nil })
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("load plugin tasks: %w", err)
	}
	tasks = slices.DeleteFunc(tasks, func(task registry.Task) bool { return task.Phase != registry.TaskRunning })
	t.crew.start(func(ctx context.Context) {
		for _, task := range tasks {
			if err := t.watch(task); err != nil {
				t.logger.Error("a stored plugin task cannot be watched", "task", task.TaskKey, "error", err)
			}
			if !passed(ctx, between(t.Calm, len(tasks))) {
				return
			}
		}
	})
	return t.crew.run(ctx)
}

// Starting says what has to be done before this attempt of a task starts. It may be called any number of times for one attempt; an
// older attempt than the newest is refused.
func (t *Tasks) Starting(ctx context.Context, call registry.Call, at hooks.AllocTask) (hooks.Plan, error) {
	prep, err := t.prepare(at)
	if err != nil {
		return hooks.Plan{}, err
	}
	leave, err := t.turn(ctx, at.Key(), "a start")
	if err != nil {
		return hooks.Plan{}, err
	}
	defer leave()
	known, running, err := t.attempt(ctx, at)
	if err != nil {
		return hooks.Plan{}, err
	}
	if known != nil && (running || known.Endpoint == prep.Endpoint) {
		if prep, err = t.told(*known); err != nil {
			return hooks.Plan{}, err
		}
	} else {
		known = nil // is to start in another run directory than it was told
	}
	if !running {
		if err := t.clear(ctx, at, prep); err != nil {
			return hooks.Plan{}, err
		}
	}
	if known != nil {
		return prep.Plan, t.answered(ctx, call, prep.Plan)
	}
	if err := t.begin(ctx, at, prep, call.Answered(prep.Plan)); err != nil {
		return hooks.Plan{}, fmt.Errorf("record the start of %s: %w", at.Key(), err)
	}
	return prep.Plan, nil
}

// turn waits for whatever else is under way for the task: its starts and ends are one at a time.
func (t *Tasks) turn(ctx context.Context, k registry.TaskKey, what string) (leave func(), err error) {
	return t.lanes.Enter(ctx, k, what)
}

// answered stores the answer of a call that changes nothing else.
func (t *Tasks) answered(ctx context.Context, call registry.Call, answer any) error {
	_, err := t.log.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Put: call.Answered(answer)}, nil
	})
	return err
}

// begin records a new attempt. What an earlier one has registered is gone, whoever failed to tell us.
func (t *Tasks) begin(ctx context.Context, at hooks.AllocTask, prep hooks.Preparation, more []registry.Record) error {
	plan, err := json.Marshal(prep.Plan)
	if err != nil {
		return registry.Errorf(registry.ErrInternal, "encode the plan of %s: %w", at.Key(), err)
	}
	t.unwatch(at.Key(), errNewAttempt)
	_, err = t.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		change := registry.Change{Put: append(more, registry.Task{
			TaskKey: at.Key(), Job: at.Job, Attempt: at.Attempt, Phase: registry.TaskStarting, Isolated: at.Isolated, Sealed: at.Sealed,
			Digest: at.Digest, Endpoint: prep.Endpoint, Volumes: prep.Volumes, Plan: plan,
		})}
		if old, known := v.Task(at.Key()); known {
			change = t.deregistered(v, old, "a newer attempt starts").And(change)
		}
		return change, nil
	})
	if err != nil {
		return err
	}
	t.supervisor.Exited(at.Key())
	return nil
}

// deregistered is the change by which all that a task serves leaves the table.
func (t *Tasks) deregistered(v registry.View, task registry.Task, detail string) registry.Change {
	spec, err := config.OpenRunning(task.Sealed)
	if err != nil {
		return registry.RemoveTaskChange(v, t.clock.Now(), task.TaskKey)
	}
	var keys []registry.InstanceKey
	for _, role := range spec.Plugin.Type.Roles() {
		keys = append(keys, registry.InstanceKey{Role: role, Plugin: spec.Plugin.ID, Alloc: task.Alloc, Task: task.Task})
	}
	change := registry.RemoveChange(v, t.clock.Now(), keys...)
	if !change.Empty() {
		change.Events = append(change.Events, registry.Event{
			Kind: registry.EventTaskRemoved, Plugin: spec.Plugin.ID, Alloc: task.Alloc, Task: task.Task, Cause: registry.CauseExited,
			Detail: detail, At: t.clock.Now(),
		})
	}
	return change
}

// prepare is what the task's stanza asks for, checked against what the host can do.
func (t *Tasks) prepare(at hooks.AllocTask) (hooks.Preparation, error) {
	if at.Attempt == 0 {
		return hooks.Preparation{}, registry.Invalid("task %s: attempts are numbered from 1", at.Key())
	}
	spec, err := config.OpenTask(at.Sealed)
	if err != nil {
		return hooks.Preparation{}, fmt.Errorf("task %s: %w", at.Key(), err)
	}
	return t.preparation(at, spec)
}

func (t *Tasks) preparation(at hooks.AllocTask, spec hooks.TaskSpec) (hooks.Preparation, error) {
	prep, err := hooks.Starting(t.layout, at, spec)
	if err != nil {
		return hooks.Preparation{}, fmt.Errorf("task %s: %w", at.Key(), err)
	}
	return prep, prep.Plan.Supported(t.operations)
}

// told is the preparation as this attempt was told it: another run directory, or another shim, does not move what runs.
func (t *Tasks) told(task registry.Task) (hooks.Preparation, error) {
	spec, err := config.OpenRunning(task.Sealed)
	if err != nil {
		return hooks.Preparation{}, fmt.Errorf("task %s: %w", task.TaskKey, err)
	}
	prep, err := t.preparation(hooks.AllocTask{
		Alloc: task.Alloc, Task: task.Task, Job: task.Job, Digest: task.Digest, Attempt: task.Attempt, Isolated: task.Isolated, Sealed: task.Sealed,
	}, spec)
	if err != nil || task.Endpoint == (registry.Endpoint{}) {
		return prep, err
	}
	prep.Endpoint, prep.Volumes, prep.Socket = task.Endpoint, task.Volumes, task.Endpoint.Host
	prep.Plan = hooks.Plan{}
	if err := json.Unmarshal(task.Plan, &prep.Plan); err != nil {
		return prep, registry.Errorf(registry.ErrDamaged, "the plan stored for %s: %w", task.TaskKey, err)
	}
	return prep, nil
}

// attempt is the record of this attempt, nil if there is none, and whether it runs.
func (t *Tasks) attempt(ctx context.Context, at hooks.AllocTask) (known *registry.Task, running bool, err error) {
	err = t.log.View(ctx, func(v registry.View) error {
		task, ok := v.Task(at.Key())
		switch {
		case ok && task.Attempt > at.Attempt:
			return registry.Errorf(registry.ErrConflict, "attempt %d of %s has ended: attempt %d is known already", at.Attempt, at.Key(), task.Attempt)
		case ok && task.Attempt == at.Attempt:
			known, running = &task, task.Phase == registry.TaskRunning
		}
		return nil
	})
	return known, running, err
}

// clear makes the directories and removes the stale socket. If the old socket still answers, the earlier process still lives.
func (t *Tasks) clear(ctx context.Context, at hooks.AllocTask, prep hooks.Preparation) error {
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

// Started records that the attempt runs since at, and has it watched.
func (t *Tasks) Started(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64, at registry.BootTime) error {
	leave, err := t.turn(ctx, k, "the report of its start")
	if err != nil {
		return err
	}
	defer leave()
	return t.started(ctx, call, k, attempt, at)
}

func (t *Tasks) started(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64, at registry.BootTime) error {
	var task registry.Task
	_, err := t.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		var err error
		if task, err = current(v, k, attempt); err != nil {
			return registry.Change{}, err
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
	return t.watch(task)
}

// Stopping records that the attempt is about to be ended on purpose, and ends its watch: that its plugin falls silent is no illness. Its
// instances stay until it has exited, and so does the connection: calls that are at the plugin have its kill grace to end.
func (t *Tasks) Stopping(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64) error {
	leave, err := t.turn(ctx, k, "its stop")
	if err != nil {
		return err
	}
	defer leave()
	task, news, err := t.newest(ctx, k, attempt)
	if err != nil {
		return err
	}
	if !news || task.Attempt != attempt || task.Phase != registry.TaskRunning {
		return t.answered(ctx, call, struct{}{})
	}
	t.unwatch(k, errStopping)
	_, err = t.log.Commit(ctx, func(registry.View) (registry.Change, error) {
		task.Phase = registry.TaskStopping
		return registry.Change{Put: append(call.Answered(struct{}{}), task)}, nil
	})
	if err != nil {
		return fmt.Errorf("record that %s is being stopped: %w", k, err)
	}
	return nil
}

// Exit is how an attempt of a task ended.
type Exit struct {
	Code   int
	Signal int  // 0: none
	Final  bool // the task will not be started again
}

func (e Exit) String() string {
	if e.Signal != 0 {
		return fmt.Sprintf("ended by signal %d", e.Signal)
	}
	return fmt.Sprintf("ended with code %d", e.Code)
}

// Exited records that the attempt has ended. In the same transaction its instances leave the table. A task that will not be started again is
// forgotten. The end of an attempt that is not the newest is no news.
func (t *Tasks) Exited(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64, how Exit) error {
	leave, err := t.turn(ctx, k, "the report of its end")
	if err != nil {
		return err
	}
	defer leave()
	return t.exited(ctx, call, k, attempt, how)
}

func (t *Tasks) exited(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64, how Exit) error {
	task, news, err := t.newest(ctx, k, attempt)
	if err != nil {
		return err
	}
	if !news {
		return t.answered(ctx, call, struct{}{})
	}
	t.unwatch(k, errExited)
	// Whoever called it off would not know whether it is recorded, and its directory would stay.
	_, err = t.log.Commit(context.WithoutCancel(ctx), func(v registry.View) (registry.Change, error) {
		change := t.deregistered(v, task, how.String())
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
	t.supervisor.Exited(k)
	if how.Final {
		t.removeSocketDir(task)
	}
	return nil
}

// removeSocketDir removes the directory of a task's socket. What cannot be removed now is swept by the next shim.
func (t *Tasks) removeSocketDir(task registry.Task) {
	dir := t.layout.SocketDir(task.TaskKey)
	if task.Endpoint.Host != "" {
		dir = filepath.Dir(task.Endpoint.Host)
	}
	if err := t.disk.RemoveSocketDir(dir); err != nil {
		t.logger.Warn("the directory of a task's socket stays", "task", task.TaskKey, "path", dir, "error", err)
	}
}

// newest is the task's record, and whether this attempt is its newest.
func (t *Tasks) newest(ctx context.Context, k registry.TaskKey, attempt uint64) (task registry.Task, is bool, err error) {
	err = t.log.View(ctx, func(v registry.View) error {
		var ok bool
		task, ok = v.Task(k)
		is = ok && task.Attempt <= attempt
		return nil
	})
	return task, is, err
}

// current is the task's record if attempt is its newest.
func current(v registry.View, k registry.TaskKey, attempt uint64) (registry.Task, error) {
	task, ok := v.Task(k)
	switch {
	case !ok:
		return task, registry.Errorf(registry.ErrNotFound, "task %s is not known; report that it is starting first", k)
	case task.Attempt != attempt:
		return task, registry.Errorf(registry.ErrConflict, "attempt %d of %s is not its newest, which is %d", attempt, k, task.Attempt)
	}
	return task, nil
}
