package task

import (
	"context"
	"errors"
	"fmt"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
)

// Causes for the end of a run.
var (
	errNewAttempt = errors.New("a newer attempt of the task starts")
	errStopping   = errors.New("the task is being stopped")
	errExited     = errors.New("the task has exited")
)

// run is the supervision of one attempt of a task.
type run struct {
	attempt uint64
	cancel  context.CancelCauseFunc
	done    chan struct{}
}

// Run supervises the tasks that are recorded as running, and those that start later, until ctx ends. It returns when
// all supervision has ended.
func (t *Tasks) Run(ctx context.Context) error {
	t.mu.Lock()
	t.ctx = ctx
	t.mu.Unlock()
	tasks, err := t.all(ctx)
	if err != nil && ctx.Err() == nil {
		return err
	}
	for _, task := range tasks {
		if task.Phase != registry.TaskRunning {
			continue
		}
		if err := t.start(task); err != nil {
			t.logger.Error("cannot supervise a stored plugin task", "task", task.TaskKey, "error", err)
		}
	}
	<-ctx.Done()
	t.mu.Lock()
	t.ended = true
	t.mu.Unlock()
	t.running.Wait()
	return context.Cause(ctx)
}

// start supervises one attempt of a task, unless its supervision or that of a newer attempt runs already. Before Run,
// start does nothing, because Run starts the recorded attempts. After Run, it does nothing either.
func (t *Tasks) start(task registry.Task) error {
	spec, err := config.OpenRunning(task.Sealed)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	earlier := t.runs[task.TaskKey]
	if t.ctx == nil || t.ended || earlier != nil && earlier.attempt >= task.Attempt {
		return nil
	}
	if earlier != nil {
		earlier.cancel(errNewAttempt)
	}
	ctx, cancel := context.WithCancelCause(t.ctx)
	r := &run{attempt: task.Attempt, cancel: cancel, done: make(chan struct{})}
	t.runs[task.TaskKey] = r
	t.running.Go(func() {
		defer close(r.done)
		defer cancel(nil)
		if earlier != nil {
			<-earlier.done
		}
		if !t.stillRuns(ctx, task) { // the attempt has ended since its record was read
			return
		}
		if err := t.supervise(ctx, task, spec.Plugin); err != nil && ctx.Err() == nil {
			t.logger.Error("the supervision of a plugin task has failed", "task", task.TaskKey, "error", err)
		}
	})
	return nil
}

// stillRuns reports whether this attempt of the task is recorded as running. It also returns true if the state cannot
// be read.
func (t *Tasks) stillRuns(ctx context.Context, task registry.Task) (runs bool) {
	err := t.state.View(ctx, func(v registry.View) error {
		now, known := v.Task(task.TaskKey)
		runs = known && now.Phase == registry.TaskRunning && now.Attempt == task.Attempt
		return nil
	})
	return runs || err != nil
}

// stop ends the supervision of a task, if there is one, and waits for its end.
func (t *Tasks) stop(k registry.TaskKey, why error) {
	t.mu.Lock()
	r := t.runs[k]
	delete(t.runs, k)
	t.mu.Unlock()
	if r != nil {
		r.cancel(why)
		<-r.done
	}
}

// LivingTask is a plugin task that the host runs or is about to run.
type LivingTask struct {
	Task    hooks.AllocTask
	Running bool
	Started registry.BootTime // if running
}

// Refused is a living task that the shim cannot adopt. The shim leaves the task alone.
type Refused struct {
	Task registry.TaskKey
	Why  string
}

// Synced is the result of Sync.
type Synced struct {
	Removed []registry.TaskKey // tasks that had a record but do not live
	Refused []Refused
}

// Sync makes the records agree with the living tasks. If one task cannot be adopted, the others still are.
func (t *Tasks) Sync(ctx context.Context, living []LivingTask) (Synced, error) {
	var out Synced
	lives := map[registry.TaskKey]bool{}
	for _, l := range living {
		lives[l.Task.Key()] = true
		if err := t.adopt(ctx, l); err != nil {
			if ctx.Err() != nil {
				return out, context.Cause(ctx)
			}
			t.logger.Error("cannot adopt a living plugin task", "task", l.Task.Key(), "error", err)
			out.Refused = append(out.Refused, Refused{l.Task.Key(), err.Error()})
		}
	}
	tasks, err := t.all(ctx)
	if err != nil {
		return out, err
	}
	for _, task := range tasks {
		if lives[task.TaskKey] {
			continue
		}
		exit := Exit{Code: -1, Final: true}
		if err := t.Exited(ctx, registry.Call{}, task.TaskKey, task.Attempt, exit); err != nil {
			return out, err
		}
		out.Removed = append(out.Removed, task.TaskKey)
	}
	return out, nil
}

// adopt makes the record of a task agree with the living task.
func (t *Tasks) adopt(ctx context.Context, l LivingTask) error {
	unlock, err := t.locks.Lock(ctx, l.Task.Key(), "its adoption")
	if err != nil {
		return err
	}
	defer unlock()
	recorded, err := t.attemptRecord(ctx, l.Task)
	switch {
	case err != nil:
		return err
	case recorded != nil && l.Running == (recorded.Phase == registry.TaskRunning):
		return nil // both say that it runs, or neither does
	case recorded != nil && recorded.Phase == registry.TaskStopping && l.Running:
		return nil // the host's list does not say that the task is being stopped
	case recorded != nil && !l.Running: // recorded as running, but the host has yet to start it
		return t.exited(ctx, registry.Call{}, l.Task.Key(), l.Task.Attempt, Exit{Code: -1})
	case recorded == nil:
		prep, err := t.prepare(l.Task)
		if err != nil {
			return err
		}
		if err := t.recordStart(ctx, l.Task, prep, nil); err != nil {
			return err
		}
	}
	// the record now says that the attempt is starting, or still that it has exited
	if !l.Running {
		return nil
	}
	return t.started(ctx, registry.Call{}, l.Task.Key(), l.Task.Attempt, l.Started)
}

func (t *Tasks) all(ctx context.Context) (tasks []registry.Task, err error) {
	err = t.state.View(ctx, func(v registry.View) error { tasks = v.Tasks(); return nil })
	if err != nil {
		return nil, fmt.Errorf("list plugin tasks: %w", err)
	}
	return tasks, nil
}

// Sweep removes the socket directories of tasks without a record: an earlier shim may have died after it deleted the
// record and before it removed the directory. Call Sweep before any task starts.
func (t *Tasks) Sweep(ctx context.Context) error {
	tasks, err := t.all(ctx)
	if err != nil {
		return err
	}
	keep := map[string]bool{}
	for _, task := range tasks {
		keep[t.layout.SocketDir(task.TaskKey)] = true
	}
	return t.disk.SweepSocketDirs(keep)
}
