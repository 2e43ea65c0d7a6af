package alloc

import (
	"context"
	"errors"

	"holdfast/config"
	"holdfast/registry"
)

// Why a watch ended.
var (
	errNewAttempt = errors.New("a newer attempt of the task starts")
	errStopping   = errors.New("the task is being stopped")
	errExited     = errors.New("the task has exited")
)

// watch has one start of a task supervised, unless it is already.
func (t *Tasks) watch(task registry.Task) error {
	spec, err := config.OpenRunning(task.Sealed)
	if err != nil {
		return err
	}
	prep, err := t.told(task)
	if err != nil {
		return err
	}
	w, earlier := t.replace(task)
	if w == nil {
		return nil
	}
	started := t.crew.start(func(ctx context.Context) {
		defer close(w.done)
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		if !t.adoptCancel(task.TaskKey, w, cancel) {
			return
		}
		if earlier != nil {
			<-earlier.done
		}
		if !t.stillRuns(ctx, task) { // it has ended since its record was read
			return
		}
		if err := t.supervisor.Run(ctx, task, spec.Plugin, prep); err != nil && ctx.Err() == nil {
			t.logger.Error("a plugin task is no longer watched", "task", task.TaskKey, "error", err)
		}
	})
	if !started {
		close(w.done)
	}
	return nil
}

// stillRuns says whether this start of the task is recorded to run. One that cannot be read is watched.
func (t *Tasks) stillRuns(ctx context.Context, task registry.Task) (runs bool) {
	err := t.log.View(ctx, func(v registry.View) error {
		now, known := v.Task(task.TaskKey)
		runs = known && now.Phase == registry.TaskRunning && now.Attempt == task.Attempt
		return nil
	})
	return runs || err != nil
}

// replace puts a new watch in place of one of an earlier attempt, which it ends; nil if this attempt is watched already. Who has been told
// to end waits for nobody: the new watch begins when the earlier one is done.
func (t *Tasks) replace(task registry.Task) (fresh, earlier *watch) {
	t.mu.Lock()
	defer t.mu.Unlock()
	earlier = t.watches[task.TaskKey]
	if earlier != nil && earlier.attempt >= task.Attempt {
		return nil, nil
	}
	fresh = &watch{attempt: task.Attempt, cancel: func(error) {}, done: make(chan struct{})}
	t.watches[task.TaskKey] = fresh
	if earlier != nil {
		earlier.cancel(errNewAttempt)
	}
	return fresh, earlier
}

// adoptCancel gives the watch its cancel once it runs. It reports whether the watch is still wanted.
func (t *Tasks) adoptCancel(k registry.TaskKey, w *watch, cancel context.CancelCauseFunc) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	w.cancel = cancel
	return t.watches[k] == w
}

// unwatch ends the watch of a task, if there is one, and waits for its end.
func (t *Tasks) unwatch(k registry.TaskKey, why error) {
	t.mu.Lock()
	w := t.watches[k]
	delete(t.watches, k)
	var cancel context.CancelCauseFunc
	if w != nil {
		cancel = w.cancel
	}
	t.mu.Unlock()
	if w == nil {
		return
	}
	cancel(why)
	<-w.done
}
