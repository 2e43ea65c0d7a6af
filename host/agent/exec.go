package agent

import (
	"context"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// Exec returns a function that runs a program in a task, as taskdriver.Executor describes it. The task must be running.
func (a *Agent) Exec(id host.AllocID, task host.TaskName) (
	run func(context.Context, taskdriver.ExecOptions) (code int, err error), err error) {
	r := a.record(id)
	if r == nil {
		return nil, registry.Errorf(registry.ErrNotFound, "alloc %q not found", id)
	}
	rec, known := r.Tasks[task]
	if !known {
		return nil, unknownTask(r, task)
	}
	if rec.State != TaskRunning || rec.Handle == nil {
		return nil, registry.Errorf(registry.ErrConflict,
			"task %q of alloc %s is %s; a command runs only in a running task; see holdfast alloc status %s", task,
			short(id), rec.State, short(id))
	}
	driver := a.drivers[r.task(task).Driver]
	executor, able := driver.(taskdriver.Executor)
	if !able {
		return nil, registry.Errorf(registry.ErrUnsupported, "driver %s cannot run commands in a task",
			r.task(task).Driver)
	}
	return func(ctx context.Context, o taskdriver.ExecOptions) (int, error) {
		return executor.Exec(ctx, *rec.Handle, o)
	}, nil
}
