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
	plugins    Plugins
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
func NewTasks(log registry.Log, p Plugins, s Supervisor, d Disk, l hooks.Layout, h Host, c Clock, logger hclog.Logger) *Tasks {
	return &Tasks{
		log: log, plugins: p, supervisor: s, disk: d, layout: l, operations: h.Operations, clock: c, logger: logger,
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
	t.unwatch(at.Key(), errNewAttempt)
	record := registry.Task{
		TaskKey: at.Key(), Job: at.Job, Attempt: at.Attempt, Phase: registry.TaskStarting, Isolated: at.Isolated, Sealed: at.Sealed, Digest: at.Digest,
	}
	if err := t.plugins.RemoveTask(ctx, at.Key()); err != nil {
		return hooks.Plan{}, fmt.Errorf("deregister %s, whose attempt has ended: %w", at.Key(), err)
	}
	_, err = t.log.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Put: append(call.Answered(prep.Plan), record)}, nil
	})
	if err != nil {
		return hooks.Plan{}, fmt.Errorf("record the start of %s running %s: %w", at.Key(), spec.Plugin.ID, err)
	}
	return prep.Plan, nil
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

// Exited records that the attempt has ended. Its instances are gone. With final the task will not be started again, and is forgotten.
func (t *Tasks) Exited(ctx context.Context, call registry.Call, k registry.TaskKey, attempt uint64, final bool) error {
	if stale, err := t.stale(ctx, k, attempt); err != nil || stale {
		return err
	}
	t.unwatch(k, errExited)
	if err := t.plugins.RemoveTask(ctx, k); err != nil {
		return fmt.Errorf("deregister %s: %w", k, err)
	}
	_, err := t.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		task, ok := v.Task(k)
		if !ok || task.Attempt > attempt {
			return registry.Change{}, nil
		}
		if final {
			return registry.Change{Put: call.Answered(struct{}{}), Delete: []registry.Key{k.Key()}}, nil
		}
		task.Phase = registry.TaskExited
		return registry.Change{Put: append(call.Answered(struct{}{}), task)}, nil
	})
	if err != nil {
		return fmt.Errorf("record that %s has exited: %w", k, err)
	}
	if final {
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
		if err := t.Exited(ctx, registry.Call{}, task.TaskKey, task.Attempt, true); err != nil {
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
		t.unwatch(l.Task.Key(), errNewAttempt)
		if err := t.plugins.RemoveTask(ctx, l.Task.Key()); err != nil {
			return err
		}
		at := l.Task
		record := registry.Task{
			TaskKey: at.Key(), Job: at.Job, Attempt: at.Attempt, Phase: registry.TaskStarting, Isolated: at.Isolated, Sealed: at.Sealed, Digest: at.Digest,
		}
		if _, err := t.log.Commit(ctx, func(registry.View) (registry.Change, error) {
			return registry.Change{Put: []registry.Record{record}}, nil
		}); err != nil {
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
