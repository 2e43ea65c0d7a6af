package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// taskRunner takes one task of an alloc through its attempts.
type taskRunner struct {
	*runner
	spec   taskSpec
	driver taskdriver.Driver
}

func (t *taskRunner) state() TaskRecord { return *t.record().Tasks[t.spec.Name] }

func (t *taskRunner) key() host.TaskKey { return host.TaskKey{Alloc: t.id, Task: t.spec.Name} }

func (t *taskRunner) isPlugin() bool { return len(t.spec.Sealed) > 0 }

// note changes the task's record, and says something if there is something to say.
func (t *taskRunner) note(text string, change func(*TaskRecord)) error {
	return t.update(func(r *AllocRecord) {
		rec := r.Tasks[t.spec.Name]
		was := rec.State
		change(rec)
		if rec.State != was {
			rec.Since = time.Now().UTC()
		}
		if text != "" {
			r.note(t.spec.Name, "%s", text)
		}
	})
}

// run returns nil when the task will not be started again. Another error is ctx's, or the ledger's.
func (t *taskRunner) run(ctx, stop context.Context) error {
	handle, found, err := t.adopt(ctx)
	if err == nil && found {
		err = t.note(fmt.Sprintf("goes on (process %d)", handle.TaskPID), func(r *TaskRecord) {
			if r.State == TaskStarting { // its agent died before it could note the start
				r.State, r.Handle = TaskRunning, &handle
			}
		})
	}
	if err != nil {
		return err
	}
	for {
		switch state := t.state(); {
		case state.State == TaskDead:
			return nil
		case found:
			err = t.follow(ctx, stop, handle)
		case stop.Err() != nil && ctx.Err() == nil:
			err = t.never(ctx)
		default:
			if err = t.turn(stop); err == nil {
				handle, found, err = t.start(ctx, stop)
				if found && err == nil {
					continue
				}
			}
		}
		found = false
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil && !errors.Is(err, errStop) {
			return err
		}
	}
}

// adopt finds an attempt that an earlier agent has begun.
func (t *taskRunner) adopt(ctx context.Context) (taskdriver.Handle, bool, error) {
	rec := t.state()
	switch rec.State {
	case TaskRunning:
		return *rec.Handle, true, nil // if it has ended meanwhile, Wait says how
	case TaskStarting:
		h, found, err := t.a.config.Find(ctx, t.a.dirs(t.id).task(t.spec.Name))
		return h, found && h.ID == attemptID(t.id, t.spec.Name, rec.Attempt) && err == nil, err
	}
	return taskdriver.Handle{}, false, nil
}

// turn waits until the next attempt is due.
func (t *taskRunner) turn(stop context.Context) error {
	p := t.spec.policy
	// A clock that was set back delays nothing for longer than the policy would.
	timer := time.NewTimer(min(time.Until(t.state().Next), max(p.Delay, p.Interval)))
	defer timer.Stop()
	select {
	case <-stop.Done():
		return context.Cause(stop)
	case <-timer.C:
		return nil
	}
}

// never ends a task that does not run, and whose next attempt will not come.
func (t *taskRunner) never(ctx context.Context) error {
	rec := t.state()
	if rec.Attempt > 0 {
		t.tellExit(ctx, rec.Attempt, rec.Exit, true)
	}
	return t.note("", func(r *TaskRecord) { r.State = TaskDead })
}

// start begins an attempt. Not found, without an error: it could not, and the record says what comes next.
func (t *taskRunner) start(ctx, stop context.Context) (taskdriver.Handle, bool, error) {
	attempt := t.state().Attempt + 1
	err := t.note("", func(r *TaskRecord) { r.State, r.Attempt, r.Handle, r.Next = TaskStarting, attempt, nil, time.Time{} })
	if err != nil {
		return taskdriver.Handle{}, false, err
	}
	plan, err := t.plan(stop, attempt)
	if err == nil {
		rec := t.record()
		isolated := t.driver.Isolated()
		var h taskdriver.Handle
		h, err = t.driver.Start(ctx, t.a.node.attempt(rec, t.spec, attempt, plan, t.a.dirs(t.id).root, isolated))
		if err == nil {
			return h, true, t.started(ctx, attempt, h)
		}
	}
	if ctx.Err() != nil || errors.Is(err, errStop) {
		return taskdriver.Handle{}, false, err
	}
	if errors.Is(err, registry.ErrExhausted) {
		return taskdriver.Handle{}, false, t.lacksRoom(ctx, attempt, err)
	}
	return taskdriver.Handle{}, false, t.ended(ctx, taskdriver.Exit{Code: -1, At: time.Now().UTC(), Err: err.Error()}, hopelessStart(err), "could not be started: "+err.Error())
}

// lacksRoom has the start tried again later. A full disk is no failure of the task.
func (t *taskRunner) lacksRoom(ctx context.Context, attempt uint64, err error) error {
	why := "could not be started: " + err.Error()
	exit := taskdriver.Exit{Code: -1, At: time.Now().UTC(), Err: why}
	t.tellExit(ctx, attempt, &exit, false)
	text := why + "; free space there"
	if t.state().Reason == why {
		text = "" // it is said already
	}
	return t.note(text, func(r *TaskRecord) {
		r.State, r.Exit, r.Next, r.Reason = TaskWaiting, &exit, time.Now().Add(t.a.config.Backoff[1]), why
	})
}

// hopelessStart says whether a start would fail again.
func hopelessStart(err error) bool { return hopeless(err) || errors.Is(err, registry.ErrNotFound) }

// plan is what to apply to the attempt: the alloc's volumes, and for a plugin what the shim says of this start. It waits for the shim.
func (t *taskRunner) plan(stop context.Context, attempt uint64) (hooks.Plan, error) {
	rec := t.record()
	plan := rec.Plans[string(t.spec.Name)]
	if !t.isPlugin() {
		return plan, nil
	}
	wait := newPause(t.a.config.Backoff)
	for {
		more, err := t.s.TaskStarting(stop, rec.allocTask(t.spec.Task, attempt, t.driver.Isolated()))
		if err == nil {
			return plan.And(more), nil
		}
		if hopeless(err) {
			return plan, err
		}
		if stop.Err() != nil {
			return plan, context.Cause(stop)
		}
		if t.state().Reason != err.Error() {
			if err := t.note("waits to be started: "+err.Error(), func(r *TaskRecord) { r.Reason = err.Error() }); err != nil {
				return plan, err
			}
		}
		wait.sleep(stop, t.a.whenRetried())
	}
}

// started notes a running attempt, and tells the shim.
func (t *taskRunner) started(ctx context.Context, attempt uint64, h taskdriver.Handle) error {
	boot, err := proc.BootID()
	if err != nil {
		return err
	}
	text := fmt.Sprintf("is running (process %d)", h.TaskPID)
	if attempt > 1 {
		text += fmt.Sprintf(", attempt %d", attempt)
	}
	err = t.note(text, func(r *TaskRecord) {
		r.State, r.Handle, r.Started, r.Reason = TaskRunning, &h, host.BootTime{Boot: boot, At: proc.BootTime()}, ""
	})
	if err == nil && t.isPlugin() {
		t.insist(ctx, "that a plugin's task runs", func(ctx context.Context) error { return t.s.TaskStarted(ctx, t.key(), attempt) })
	}
	return err
}

// tellTimeout bounds one telling: what the shim was not told now it learns from the next Sync.
const tellTimeout = 45 * time.Second

// insist tells the shim something, a few times if need be.
func (t *taskRunner) insist(ctx context.Context, what string, tell func(context.Context) error) {
	ctx, cancel := context.WithTimeout(ctx, tellTimeout)
	defer cancel()
	wait := newPause(t.a.config.Backoff)
	for range 3 {
		err := tell(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		t.a.log.Warn("the shim could not be told "+what, "alloc", t.id, "task", t.spec.Name, "error", err)
		wait.sleep(ctx, nil)
	}
}

func (t *taskRunner) tellExit(ctx context.Context, attempt uint64, exit *taskdriver.Exit, final bool) {
	if !t.isPlugin() {
		return
	}
	code, signal := -1, 0
	if exit != nil {
		code, signal = exit.Code, exit.Signal
	}
	t.insist(ctx, "that a plugin's task has ended", func(ctx context.Context) error {
		return t.s.TaskExited(ctx, t.key(), attempt, code, signal, final)
	})
}

// follow waits for the end of a running attempt, and brings it about if the alloc is to end or the shim asks for a restart.
func (t *taskRunner) follow(ctx, stop context.Context, h taskdriver.Handle) error {
	watch, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	ended := make(chan taskdriver.Exit, 1)
	wg.Go(func() {
		exit, err := t.driver.Wait(watch, h)
		if err != nil {
			exit = taskdriver.Exit{Code: -1, At: time.Now().UTC(), Err: err.Error()}
		}
		ended <- exit
	})
	for {
		select {
		case exit := <-ended:
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return t.exited(ctx, stop, exit, "")
		case <-stop.Done():
			return t.end(ctx, stop, h, ended, "")
		case p := <-t.al.restarts[t.spec.Name]:
			if p.Attempt == t.state().Attempt {
				return t.end(ctx, stop, h, ended, "the shim asked for a restart: "+describe(p))
			}
		}
	}
}

// end stops a running attempt for a reason.
func (t *taskRunner) end(ctx, stop context.Context, h taskdriver.Handle, ended <-chan taskdriver.Exit, why string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := t.halted(ctx, h, why); err != nil {
		return err
	}
	exit := <-ended
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return t.exited(ctx, stop, exit, why)
}

func describe(p host.PendingRestart) string {
	if p.Detail == "" {
		return string(p.Cause)
	}
	return fmt.Sprintf("%s (%s)", p.Cause, p.Detail)
}

// halted ends the attempt's processes.
func (t *taskRunner) halted(ctx context.Context, h taskdriver.Handle, why string) error {
	text := "is being stopped"
	if why != "" {
		text += ": " + why
	}
	if err := t.note(text, func(r *TaskRecord) { r.Reason = why }); err != nil {
		return err
	}
	t.tellStop(ctx)
	err := t.patientStop(ctx, h)
	for wait := newPause(t.a.config.Backoff); err != nil && ctx.Err() == nil; err = t.driver.Stop(ctx, h, 0) {
		if errors.Is(err, errHurry) {
			continue
		}
		t.a.log.Error("a task cannot be stopped; it is tried again", "alloc", t.id, "task", t.spec.Name, "error", err)
		wait.sleep(ctx, nil)
	}
	return context.Cause(ctx)
}

// stopTimeout bounds the telling of a stop: without it the plugin counts as ill for a moment, no more.
const stopTimeout = 2 * time.Second

// tellStop tells the shim that a plugin falls silent on purpose.
func (t *taskRunner) tellStop(ctx context.Context) {
	if !t.isPlugin() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if err := t.s.TaskStopping(ctx, t.key(), t.state().Attempt); err != nil {
		t.a.log.Debug("the shim could not be told of a stop", "alloc", t.id, "task", t.spec.Name, "error", err)
	}
}

// errHurry is why a task's time to end by itself is over before it is.
var errHurry = errors.New("everything is ended at once")

// patientStop gives the task its time, unless everything is to end at once.
func (t *taskRunner) patientStop(ctx context.Context, h taskdriver.Handle) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		select {
		case <-t.a.forced:
			cancel(errHurry)
		case <-ctx.Done():
		}
	})
	return t.driver.Stop(ctx, h, t.spec.grace)
}

// exited judges the end of an attempt that ran. Asked is why the shim wanted it, if it did: that is a failure, however it ended.
func (t *taskRunner) exited(ctx, stop context.Context, exit taskdriver.Exit, asked string) error {
	if asked != "" {
		return t.ended(ctx, exit, false, asked)
	}
	if stop.Err() != nil {
		t.tellExit(ctx, t.state().Attempt, &exit, true)
		return t.note("has ended: "+how(exit), func(r *TaskRecord) { r.State, r.Exit, r.Reason = TaskDead, &exit, "stopped" })
	}
	return t.ended(ctx, exit, false, how(exit))
}

// ended decides, under the restart policy, what comes after an attempt.
func (t *taskRunner) ended(ctx context.Context, exit taskdriver.Exit, hopeless bool, text string) error {
	rec, now := t.state(), time.Now()
	well := exit.Code == 0 && exit.Err == "" && (isBatch(t.record().JobType) || t.spec.prestart && !t.spec.sidecar)
	tally, delay, again, why := t.spec.policy.next(rec.Tally, well, now)
	again = again && !hopeless
	t.tellExit(ctx, rec.Attempt, &exit, !again)
	switch {
	case well:
		return t.note("is complete", func(r *TaskRecord) { r.State, r.Exit, r.Reason = TaskDead, &exit, "" })
	case again:
		return t.note(fmt.Sprintf("%s; it is started again in %v", text, delay.Round(time.Millisecond)), func(r *TaskRecord) {
			r.State, r.Exit, r.Tally, r.Next, r.Reason = TaskWaiting, &exit, tally, now.Add(delay), text
		})
	case why != "" && !hopeless:
		text += "; " + why
	}
	return t.note("has failed: "+text, func(r *TaskRecord) { r.State, r.Exit, r.Failed, r.Reason = TaskDead, &exit, true, text })
}

func how(e taskdriver.Exit) string {
	switch {
	case e.Err != "":
		return e.Err
	case e.Signal != 0:
		return fmt.Sprintf("ended by signal %d", e.Signal)
	}
	return fmt.Sprintf("exit code %d", e.Code)
}
