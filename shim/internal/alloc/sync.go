package alloc

import (
	"context"
	"fmt"

	"holdfast/hooks"
	"holdfast/registry"
)

// LivingTask is a plugin task that the host runs or is about to run.
type LivingTask struct {
	Task    hooks.AllocTask
	Running bool
	Started registry.BootTime // if running
}

// Refused is a living task that cannot be taken over, and why. It is left alone.
type Refused struct {
	Task registry.TaskKey
	Why  string
}

// Synced is what Sync has found.
type Synced struct {
	Removed []registry.TaskKey // were known, do not live, and are forgotten
	Refused []Refused
}

// Sync makes the records agree with the tasks that live. One that cannot be taken over does not hold up the others.
func (t *Tasks) Sync(ctx context.Context, living []LivingTask) (Synced, error) {
	var out Synced
	lives := map[registry.TaskKey]bool{}
	for _, l := range living {
		lives[l.Task.Key()] = true
		if err := t.adopt(ctx, l); err != nil {
			if ctx.Err() != nil {
				return out, context.Cause(ctx)
			}
			t.logger.Error("a living task cannot be taken over", "task", l.Task.Key(), "error", err)
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
		if err := t.Exited(ctx, registry.Call{}, task.TaskKey, task.Attempt, Exit{Code: -1, Final: true}); err != nil {
			return out, err
		}
		out.Removed = append(out.Removed, task.TaskKey)
	}
	return out, nil
}

// adopt records a living task that this shim may not know, or knows otherwise.
func (t *Tasks) adopt(ctx context.Context, l LivingTask) error {
	leave, err := t.turn(ctx, l.Task.Key(), "its adoption")
	if err != nil {
		return err
	}
	defer leave()
	known, running, err := t.attempt(ctx, l.Task)
	switch {
	case err != nil:
		return err
	case known != nil && running == l.Running:
		return nil
	case known != nil && known.Phase == registry.TaskStopping && l.Running:
		return nil // it runs until it has ended; what it is about to do, the list does not tell
	case known != nil && !l.Running:
		return t.exited(ctx, registry.Call{}, l.Task.Key(), l.Task.Attempt, Exit{Code: -1})
	case known == nil:
		prep, err := t.prepare(l.Task)
		if err != nil {
			return err
		}
		if err := t.begin(ctx, l.Task, prep, nil); err != nil {
			return err
		}
	}
	if !l.Running {
		return nil
	}
	return t.started(ctx, registry.Call{}, l.Task.Key(), l.Task.Attempt, l.Started)
}

func (t *Tasks) all(ctx context.Context) (tasks []registry.Task, err error) {
	err = t.log.View(ctx, func(v registry.View) error { tasks = v.Tasks(); return nil })
	if err != nil {
		return nil, fmt.Errorf("list plugin tasks: %w", err)
	}
	return tasks, nil
}

// Sweep removes the directories of sockets whose task nobody knows: a shim may have died between forgetting a task and removing its
// directory. It comes before any task starts.
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
