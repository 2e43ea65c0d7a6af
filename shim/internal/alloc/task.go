package alloc

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
)

// Tasks knows every task that runs a plugin, and has each watched while it runs.
type Tasks struct {
	log        registry.Log
	supervisor Supervisor
	disk       Disk
	layout     hooks.Layout
	operations []hooks.Operation // that the host can apply
	clock      Clock
	logger     hclog.Logger

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
func NewTasks(log registry.Log, s Supervisor, d Disk, l hooks.Layout, h Host, c Clock, logger hclog.Logger) *Tasks {
	return &Tasks{
		log: log, supervisor: s, disk: d, layout: l, operations: h.Operations, clock: c, logger: logger,
		watches: map[registry.TaskKey]*watch{},
	}
}

// Run watches the tasks that were running when the last shim ended, and those that start, until ctx ends.
func (t *Tasks) Run(ctx context.Context) error {
	var tasks []registry.Task
	if err := t.log.View(ctx, func(v registry.View) error { tasks = v.Tasks(); return nil }); err != nil {
		return fmt.Errorf("load plugin tasks: %w", err)
	}
	for _, task := range tasks {
		if task.Phase != registry.TaskRunning {
			continue
		}
		if err := t.watch(task); err != nil {
			t.logger.Error("a stored plugin task cannot be watched", "task", task.TaskKey, "error", err)
		}
	}
	return t.crew.run(ctx)
}

// Starting says what has to be done before this attempt of a task starts. It may be called any number of times for one attempt; an
// older attempt than the newest is refused.
func (t *Tasks) Starting(ctx context.Context, call registry.Call, at hooks.AllocTask) (hooks.Plan, error) {
	spec, prep, err := t.prepare(at)
	if err != nil {
		return hooks.Plan{}, err
	}
	known, running, err := t.attempt(ctx, at)
	if err != nil {
		return hooks.Plan{}, err
	}
	if !running {
		if err := t.clear(ctx, at, prep); err != nil {
			return hooks.Plan{}, err
		}
	}
	if known {
		return prep.Plan, nil
	}
	if err := t.begin(ctx, at, call.Answered(prep.Plan)); err != nil {
		return hooks.Plan{}, fmt.Errorf("record the start of %s running %s: %w", at.Key(), spec.Plugin.ID, err)
	}
	return prep.Plan, nil
}

// begin records a new attempt. What an earlier one has registered is gone, whoever failed to tell us.
func (t *Tasks) begin(ctx context.Context, at hooks.AllocTask, more []registry.Record) error {
	t.unwatch(at.Key(), errNewAttempt)
	_, err := t.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		change := registry.Change{Put: append(more, registry.Task{
			TaskKey: at.Key(), Job: at.Job, Attempt: at.Attempt, Phase: registry.TaskStarting, Isolated: at.Isolated, Sealed: at.Sealed, Digest: at.Digest,
		})}
		if old, known := v.Task(at.Key()); known {
			change = t.deregistered(v, old, "a newer attempt starts").And(change)
		}
		return change, nil
	})
	return err
}

// deregistered is the change by which all that a task serves leaves the table.
func (t *Tasks) deregistered(v registry.View, task registry.Task, detail string) registry.Change {
	spec, err := config.OpenTask(task.Sealed)
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
func (t *Tasks) prepare(at hooks.AllocTask) (hooks.TaskSpec, hooks.Preparation, error) {
	if at.Attempt == 0 {
		return hooks.TaskSpec{}, hooks.Preparation{}, registry.Invalid("task %s: attempts are numbered from 1", at.Key())
	}
	spec, err := config.OpenTask(at.Sealed)
	if err != nil {
		return hooks.TaskSpec{}, hooks.Preparation{}, fmt.Errorf("task %s: %w", at.Key(), err)
	}
	prep, err := hooks.Starting(t.layout, at, spec)
	if err != nil {
		return hooks.TaskSpec{}, hooks.Preparation{}, fmt.Errorf("task %s: %w", at.Key(), err)
	}
	return spec, prep, prep.Plan.Supported(t.operations)
}

// attempt says whether this attempt is recorded already, and whether it runs.
func (t *Tasks) attempt(ctx context.Context, at hooks.AllocTask) (known, running bool, err error) {
	err = t.log.View(ctx, func(v registry.View) error {
		task, ok := v.Task(at.Key())
		if ok && task.Attempt > at.Attempt {
			return registry.Errorf(registry.ErrConflict, "attempt %d of %s has ended: attempt %d is known already", at.Attempt, at.Key(), task.Attempt)
		}
		known = ok && task.Attempt == at.Attempt
		running = known && task.Phase == registry.TaskRunning
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
	var task registry.Task
	_, err := t.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		var err error
		if task, err = current(v, k, attempt); err != nil {
			return registry.Change{}, err
		}
		if task.Phase == registry.TaskRunning {
			return registry.Change{}, nil
		}
		task.Phase, task.Started = registry.TaskRunning, at
		return registry.Change{Put: append(call.Answered(struct{}{}), task)}, nil
	})
	if err != nil {
		return fmt.Errorf("record that %s has started: %w", k, err)
	}
	return t.watch(task)
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
// forgotten.
func (t *Tasks) Exited(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64, how Exit) error {
	if stale, err := t.stale(ctx, k, attempt); err != nil || stale {
		return err
	}
	t.unwatch(k, errExited)
	_, err := t.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		task, ok := v.Task(k)
		if !ok || task.Attempt > attempt {
			return registry.Change{}, nil
		}
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
	if how.Final {
		return t.disk.RemoveSocketDir(t.layout.SocketDir(k))
	}
	return nil
}

// stale says whether a newer attempt than this one is known, or none at all: then its end is no news.
func (t *Tasks) stale(ctx context.Context, k registry.TaskKey, attempt uint64) (stale bool, err error) {
	err = t.log.View(ctx, func(v registry.View) error {
		task, ok := v.Task(k)
		stale = !ok || task.Attempt > attempt
		return nil
	})
	return stale, err
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

// Sync makes the records agree with the tasks that live. It returns those that were forgotten.
func (t *Tasks) Sync(ctx context.Context, living []LivingTask) ([]registry.TaskKey, error) {
	lives := map[registry.TaskKey]bool{}
	for _, l := range living {
		lives[l.Task.Key()] = true
		if err := t.adopt(ctx, l); err != nil {
			return nil, err
		}
	}
	var removed []registry.TaskKey
	for _, task := range t.all(ctx) {
		if lives[task.TaskKey] {
			continue
		}
		if err := t.Exited(ctx, registry.Call{}, task.TaskKey, task.Attempt, Exit{Code: -1, Final: true}); err != nil {
			return removed, err
		}
		removed = append(removed, task.TaskKey)
	}
	return removed, nil
}

// LivingTask is a plugin task that the host runs or is about to run.
type LivingTask struct {
	Task    hooks.AllocTask
	Running bool
	Started registry.BootTime // if running
}

// adopt records a living task that this shim may not know.
func (t *Tasks) adopt(ctx context.Context, l LivingTask) error {
	known, running, err := t.attempt(ctx, l.Task)
	if err != nil || running || known && !l.Running {
		return err
	}
	if !known {
		if _, _, err := t.prepare(l.Task); err != nil {
			return err
		}
		if err := t.begin(ctx, l.Task, nil); err != nil {
			return err
		}
	}
	if !l.Running {
		return nil
	}
	return t.Started(ctx, registry.Call{}, l.Task.Key(), l.Task.Attempt, l.Started)
}

func (t *Tasks) all(ctx context.Context) (tasks []registry.Task) {
	_ = t.log.View(ctx, func(v registry.View) error { tasks = v.Tasks(); return nil })
	return tasks
}
