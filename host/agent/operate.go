package agent

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// causeOperator is the cause of restarts that an operator requests. The shim never sends it.
const causeOperator registry.Cause = "operator"

// RestartAlloc restarts a task of an alloc in place, or all its running tasks if task is empty. It returns the names of
// the tasks. The volumes stay, and the restart policy does not count the restart. Without force it refuses to restart a
// plugin whose process serves mounts.
func (a *Agent) RestartAlloc(
	ctx context.Context, id host.AllocID, task host.TaskName, s Lister, force bool,
) (restarted []host.TaskName, err error) {
	r, err := a.findAlloc(id)
	if err == nil && task != "" {
		r, _, err = a.findTask(id, task)
	}
	if err != nil {
		return nil, err
	}
	for _, t := range r.Group.Tasks {
		if r.Tasks[t.Name].State == TaskRunning && (task == "" || task == t.Name) {
			restarted = append(restarted, t.Name)
		}
	}
	switch {
	case r.State != AllocRunning:
		return nil, registry.Errorf(registry.ErrConflict, "alloc %s is %s; only a running alloc can be restarted",
			short(id), r.State)
	case !a.restartable(r):
		return nil, registry.Errorf(registry.ErrConflict, "a roll of its plugin starts or replaces alloc %s; "+
			"see holdfast job status %s", short(id), r.Job)
	case len(restarted) == 0 && task != "":
		return nil, registry.Errorf(registry.ErrConflict, "task %q is not running; see holdfast alloc status %s", task,
			short(id))
	case len(restarted) == 0:
		return nil, registry.Errorf(registry.ErrConflict, "no task of alloc %s is running", short(id))
	}
	if !force {
		if err := a.checkServesNothing(ctx, r, restarted, s); err != nil {
			return nil, err
		}
	}
	for _, name := range restarted {
		a.requestRestart(r.taskKey(name),
			registry.RestartRequest{Attempt: r.Tasks[name].Attempt, Cause: causeOperator})
	}
	return restarted, nil
}

// StopAlloc stops an alloc. Its job then places another one, unless the job is stopped too. Without force it refuses
// to stop a plugin whose volumes are in use.
func (a *Agent) StopAlloc(ctx context.Context, id host.AllocID, s Lister, force bool) error {
	r, err := a.findAlloc(id)
	if err != nil {
		return err
	}
	if r.State.Ended() {
		return registry.Errorf(registry.ErrConflict, "alloc %s is %s already", short(id), r.State)
	}
	if !force {
		err := a.checkHolders(ctx, r.Plugins(), s,
			"the volume cannot be released without this alloc (holdfast plugin roll replaces the alloc)",
			func(_ host.VolumeStatus, h registry.Holder) bool { return h.Claim.Alloc != id })
		if err != nil {
			return err
		}
	}
	a.writing.Lock()
	defer a.writing.Unlock()
	if a.allocs[id] == nil {
		return nil // pruned meanwhile
	}
	err = a.stopLocked(id)
	a.wakeRun()
	return err
}

// checkServesNothing returns an error if a process of one of the tasks serves mounts.
func (a *Agent) checkServesNothing(ctx context.Context, r *AllocRecord, names []host.TaskName, s Lister) error {
	if len(r.Plugins()) == 0 {
		return nil
	}
	tasks, err := listPluginTasks(ctx, s, r.Plugins())
	if err != nil {
		return err
	}
	for _, name := range names {
		if served := tasks[r.taskKey(name)].Volumes; len(served) > 0 {
			return registry.Errorf(registry.ErrConflict, "a process of task %q serves %s; to replace it, use "+
				"holdfast plugin roll; to restart it all the same, use --force", name, a.describeServed(served))
		}
	}
	return nil
}

func (a *Agent) findAlloc(id host.AllocID) (*AllocRecord, error) {
	if r := a.record(id); r != nil {
		return r, nil
	}
	return nil, registry.Errorf(registry.ErrNotFound, "alloc %q not found", id)
}

func (a *Agent) findTask(id host.AllocID, task host.TaskName) (*AllocRecord, *TaskRecord, error) {
	r, err := a.findAlloc(id)
	if err != nil {
		return nil, nil, err
	}
	if rec := r.Tasks[task]; rec != nil {
		return r, rec, nil
	}
	var names []string
	for _, name := range slices.Sorted(maps.Keys(r.Tasks)) {
		names = append(names, string(name))
	}
	return nil, nil, registry.Errorf(registry.ErrNotFound, "alloc %s has no task %q; its tasks: %s", short(id), task,
		strings.Join(names, ", "))
}

// Exec returns a function that runs a program in a task, as taskdriver.Executor describes it. The task must be running.
func (a *Agent) Exec(id host.AllocID, task host.TaskName) (
	run func(context.Context, taskdriver.ExecOptions) (code int, err error), err error) {
	r, rec, err := a.findTask(id, task)
	if err != nil {
		return nil, err
	}
	if rec.State != TaskRunning || rec.Handle == nil {
		return nil, registry.Errorf(registry.ErrConflict,
			"task %q of alloc %s is %s; a command runs only in a running task; see holdfast alloc status %s", task,
			short(id), rec.State, short(id))
	}
	executor, able := a.drivers[r.task(task).Driver].(taskdriver.Executor)
	if !able {
		return nil, registry.Errorf(registry.ErrUnsupported, "driver %s cannot run commands in a task",
			r.task(task).Driver)
	}
	return func(ctx context.Context, o taskdriver.ExecOptions) (int, error) {
		return executor.Exec(ctx, *rec.Handle, o)
	}, nil
}

// LogOptions say which part of a task's output Logs copies.
type LogOptions struct {
	Stream taskdriver.Stream
	Follow bool // also copy what the running attempt writes from now on
	Tail   int  // copy only the last lines of the present output; 0: all
}

// Logs copies the kept output of all attempts of a task. With Follow it copies until the running attempt has ended. If
// no attempt has started, it returns ErrConflict.
func (a *Agent) Logs(ctx context.Context, id host.AllocID, task host.TaskName, o LogOptions, to io.Writer) error {
	r, rec, err := a.findTask(id, task)
	if err != nil {
		return err
	}
	if r.Pruned {
		return registry.Errorf(registry.ErrNotFound,
			"logs of alloc %s were removed: a job keeps those of its last %d ended allocs", short(id), maxEnded)
	}
	if rec.Handle == nil && !taskdriver.HasOutput(a.dirs(id).task(task)) {
		return registry.Errorf(registry.ErrConflict, "task %q of alloc %s has not started: %s", task, short(id),
			cmp.Or(rec.Reason, r.Reason, "it is "+string(rec.State)))
	}
	d := a.drivers[r.task(task).Driver]
	if d == nil {
		return nil
	}
	h := taskdriver.Handle{ID: attemptID(id, task, rec.Attempt), Dir: a.dirs(id).task(task)}
	if rec.Handle != nil {
		h = *rec.Handle
	}
	if o.Tail > 0 {
		var present lineCounter
		if err := d.Logs(ctx, h, o.Stream, false, &present); err != nil {
			return err
		}
		to = &lineSkipper{to, present.lines() - o.Tail}
	}
	return d.Logs(ctx, h, o.Stream, o.Follow && rec.State == TaskRunning, to)
}

// lineCounter counts the lines that are written to it. The last one may have no line break.
type lineCounter struct {
	breaks     int
	incomplete bool // the last line has no line break yet
}

func (c *lineCounter) Write(p []byte) (int, error) {
	c.breaks += bytes.Count(p, []byte("\n"))
	if len(p) > 0 {
		c.incomplete = p[len(p)-1] != '\n'
	}
	return len(p), nil
}

func (c *lineCounter) lines() int {
	if c.incomplete {
		return c.breaks + 1
	}
	return c.breaks
}

// lineSkipper passes on what is written to it, without the first lines.
type lineSkipper struct {
	to   io.Writer
	skip int // lines to drop
}

func (w *lineSkipper) Write(p []byte) (int, error) {
	rest := p
	for ; w.skip > 0; w.skip-- {
		_, after, found := bytes.Cut(rest, []byte("\n"))
		if !found {
			return len(p), nil
		}
		rest = after
	}
	n, err := w.to.Write(rest)
	return len(p) - len(rest) + n, err
}

// Job returns the record of a job. Callers must not change it.
func (a *Agent) Job(id string) (*JobRecord, error) {
	if job := a.job(id); job != nil {
		return job, nil
	}
	return nil, registry.Errorf(registry.ErrNotFound, "job %q not found (see holdfast job status)", id)
}

// ambiguous is the error for a prefix of several alloc IDs.
func ambiguous(prefix string, found []*AllocRecord) error {
	const listed = 10
	text := ""
	for _, r := range found[:min(listed, len(found))] {
		text += fmt.Sprintf("\n  %s  %s of job %s, %s", r.ID, r.Group.Name, r.Job, r.State)
	}
	if more := len(found) - listed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return registry.Invalid("several allocs have IDs that start with %q:%s", prefix, text)
}
