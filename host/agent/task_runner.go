package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// taskRunner runs the attempts of one task of an alloc.
type taskRunner struct {
	*runner
	spec            taskSpec
	driver          taskdriver.Driver
	begun           bool // runTasks has recorded the first attempt
	operatorRestart bool // an operator has requested the next attempt, so the restart policy does not count it
}

func (t *taskRunner) state() TaskRecord { return *t.record().Tasks[t.spec.Name] }

func (t *taskRunner) key() host.TaskKey { return host.TaskKey{Alloc: t.id, Task: t.spec.Name} }

func (t *taskRunner) isPlugin() bool { return len(t.spec.Sealed) > 0 }

// set changes the task's record, and adds a note unless the text is empty.
func (t *taskRunner) set(note string, change func(*TaskRecord)) error {
	return t.update(t.setChange(note, change))
}

// setLater is set without a commit of its own: the next commit of the alloc writes the change.
func (t *taskRunner) setLater(note string, change func(*TaskRecord)) error {
	return t.a.updateLater(t.id, t.setChange(note, change))
}

// setChange returns the change that set and setLater make. The end of the alloc's last task also begins the release.
func (t *taskRunner) setChange(note string, change func(*TaskRecord)) func(*AllocRecord) {
	return func(r *AllocRecord) {
		rec := r.Tasks[t.spec.Name]
		was := rec.State
		change(rec)
		if rec.State != was {
			rec.Since = time.Now().UTC()
		}
		if note != "" {
			r.note(t.spec.Name, "%s", note)
		}
		if r.allTasksDead() && r.UsesVolumes() && r.State != AllocReleasing {
			r.beginRelease()
		}
	}
}

// setDead records the exit of a task that has ended as intended: it completed, or its alloc was stopped. If it was the
// alloc's last task, the exit is written by the commit that ends the alloc. An agent that dies before that commit
// leaves the task recorded as running. The next agent reads the exit in the task's directory and decides the same. It
// releases the volumes again, which changes nothing.
func (t *taskRunner) setDead(note string, change func(*TaskRecord)) error {
	for name, other := range t.record().Tasks {
		if name != t.spec.Name && other.State != TaskDead {
			return t.set(note, change)
		}
	}
	return t.setLater(note, change)
}

// run returns nil when the task will not be started again. Errors come from ctx or the ledger.
func (t *taskRunner) run(ctx, stop context.Context) error {
	var running *taskdriver.Handle
	if !t.begun {
		var err error
		if running, err = t.resume(ctx, stop); err != nil {
			return err
		}
	}
	for t.state().State != TaskDead {
		var err error
		switch {
		case running != nil:
			err = t.watch(ctx, stop, *running)
			running = nil
		case stop.Err() != nil && ctx.Err() == nil:
			err = t.giveUp(ctx)
		default:
			if err = t.awaitNext(stop); err == nil {
				running, err = t.start(ctx, stop)
			}
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil && !errors.Is(err, errStop) {
			return err
		}
	}
	return nil
}

// whyOperator is the reason of a task that an operator restarts, until the next attempt runs.
const whyOperator = "restarted by an operator"

// resume continues what an earlier agent has recorded. It returns the attempt that the earlier agent started, if there
// is one. If that attempt has ended since, Wait returns its exit. If the earlier agent was restarting it for an
// operator, resume requests the restart again.
func (t *taskRunner) resume(ctx, stop context.Context) (*taskdriver.Handle, error) {
	rec := t.state()
	handle := rec.Handle
	switch rec.State {
	case TaskRunning:
		if rec.Reason == whyOperator {
			t.operatorRestart = true // also if the attempt has ended
			t.a.requestRestart(t.key(), registry.RestartRequest{Attempt: rec.Attempt, Cause: causeOperator})
		}
	case TaskStarting:
		var err error
		if handle, err = t.a.findStarted(ctx, t.id, t.spec.Name, rec.Attempt); err != nil {
			return nil, err
		}
		if handle == nil {
			return nil, t.handleReboot(ctx, stop)
		}
	default:
		return nil, nil
	}
	return handle, t.update(func(r *AllocRecord) {
		rec := r.Tasks[t.spec.Name]
		if rec.State == TaskStarting { // the earlier agent died before it recorded the start
			rec.State, rec.Handle, rec.Reason = TaskRunning, handle, "" // Since stays: the attempt began then
		}
		pid := ""
		if handle.TaskPID != 0 {
			pid = fmt.Sprintf(" (pid %d)", handle.TaskPID)
		}
		r.note(t.spec.Name, "adopted%s", pid)
	})
}

// handleReboot handles an attempt that is recorded as starting and that left nothing behind. If the attempt began
// before a reboot, it counts as exited: it may have run, because the agent records that only with the next commit.
// Without a reboot the attempt has never run, and handleReboot does nothing.
func (t *taskRunner) handleReboot(ctx, stop context.Context) error {
	const lost = "exit status unknown: the node rebooted while the task started or ran"
	boot, err := proc.BootID()
	if began := t.state().Started.Boot; err != nil || began == "" || began == boot {
		return nil
	}
	return t.handleExit(ctx, stop, taskdriver.Exit{Code: -1, At: time.Now().UTC(), Err: lost}, "")
}

// awaitNext waits until the next attempt is due. If the clock was set back, it still waits no longer than the policy or
// retryStart may have meant.
func (t *taskRunner) awaitNext(stop context.Context) error {
	p := t.spec.policy
	sleep(stop, min(time.Until(t.state().Next), max(p.Delay, p.Interval, maxPause)), nil)
	return context.Cause(stop)
}

// giveUp marks a waiting task as dead, because its next attempt will not come, and reports that to the shim.
func (t *taskRunner) giveUp(ctx context.Context) error {
	rec := t.state()
	if rec.Attempt > 0 {
		t.reportExit(ctx, rec.Attempt, rec.Exit, true)
	}
	return t.set("", func(r *TaskRecord) { r.State = TaskDead })
}

// start starts an attempt. If it returns neither a handle nor an error, the start has failed, and the record has the
// next step.
func (t *taskRunner) start(ctx, stop context.Context) (*taskdriver.Handle, error) {
	if !t.begun {
		if err := t.set("", (*TaskRecord).beginAttempt); err != nil {
			return nil, err
		}
	}
	t.begun = false
	attempt := t.state().Attempt
	h, err := t.tryStart(ctx, stop, attempt)
	if err == nil {
		return &h, t.handleStart(ctx, attempt, h)
	}
	if ctx.Err() != nil || errors.Is(err, errStop) {
		return nil, err
	}
	text := strings.Join(strings.Fields(err.Error()), " ") // an engine's error may have several lines
	why, exit := "start failed: "+text, taskdriver.Exit{Code: -1, At: time.Now().UTC(), Err: text}
	switch {
	case errors.Is(err, registry.ErrExhausted):
		return nil, t.retryStart(ctx, attempt, exit, why, why+"; free space there")
	case errors.Is(err, registry.ErrUnavailable):
		return nil, t.retryStart(ctx, attempt, exit, why, why)
	}
	return nil, t.applyRestartPolicy(ctx, exit, isPermanent(err) || errors.Is(err, registry.ErrNotFound), why)
}

// tryStart prepares and starts an attempt. When stop ends, it ends the preparation, but not a start that has begun.
func (t *taskRunner) tryStart(ctx, stop context.Context, attempt uint64) (h taskdriver.Handle, err error) {
	plan, err := t.plan(stop, attempt)
	if err != nil {
		return h, err
	}
	task, err := t.a.node.driverTask(stop, t.record(), t.spec, attempt, plan, t.a.dirs(t.id), t.driver)
	if err == nil {
		err = t.prepare(stop, task)
	}
	if err != nil && stop.Err() != nil {
		return h, context.Cause(stop)
	}
	if err != nil {
		return h, err
	}
	return t.driver.Start(ctx, task)
}

// prepare makes the driver's preparations for a start. It shows their progress as the task's reason, and puts the first
// line into a note.
func (t *taskRunner) prepare(stop context.Context, task taskdriver.Task) error {
	driver, needed := t.driver.(taskdriver.Preparer)
	if !needed {
		return nil
	}
	var setErr error
	isFirst := true
	err := driver.Prepare(stop, task, func(text string) {
		note := ""
		if isFirst {
			note = text
		}
		isFirst = false
		setErr = errors.Join(setErr, t.set(note, func(r *TaskRecord) { r.Reason = text }))
	})
	return errors.Join(err, setErr)
}

// retryStart schedules another attempt after a full disk or an engine that does not answer. Neither is a failure of the
// task.
func (t *taskRunner) retryStart(
	ctx context.Context, attempt uint64, exit taskdriver.Exit, why, note string,
) error {
	t.reportExit(ctx, attempt, &exit, false)
	if t.state().Reason == why {
		note = "" // the task has this note already
	}
	return t.set(note, func(r *TaskRecord) {
		r.State, r.Exit, r.Next, r.Reason = TaskWaiting, &exit, time.Now().Add(maxPause), why
	})
}

// plan returns what the driver applies to the attempt: the alloc's volumes, and for a plugin the plan of the shim.
// It waits until the shim lets the plugin start.
func (t *taskRunner) plan(stop context.Context, attempt uint64) (hooks.Plan, error) {
	rec := t.record()
	plan := rec.Plans[string(t.spec.Name)]
	if !t.isPlugin() {
		return plan, nil
	}
	for b := newBackoff(); ; {
		retried := t.a.retryRequested()
		more, err := t.s.TaskStarting(stop, rec.allocTask(t.spec.Task, attempt, t.driver.Isolated()))
		if err == nil {
			return plan.And(more), nil
		}
		if isPermanent(err) {
			return plan, err
		}
		if stop.Err() != nil {
			return plan, context.Cause(stop)
		}
		if why := err.Error(); t.state().Reason != why {
			if err := t.set("waiting to start: "+why, func(r *TaskRecord) { r.Reason = why }); err != nil {
				return plan, err
			}
		}
		sleep(stop, b.NextBackOff(), retried)
	}
}

// handleStart records a running attempt, and reports it to the shim if the task runs a plugin.
func (t *taskRunner) handleStart(ctx context.Context, attempt uint64, h taskdriver.Handle) error {
	boot, err := proc.BootID()
	if err != nil {
		return err
	}
	var details []string
	if h.TaskPID != 0 { // else the container has ended already
		details = append(details, fmt.Sprintf("pid %d", h.TaskPID))
	}
	if attempt > 1 {
		details = append(details, fmt.Sprintf("attempt %d", attempt))
	}
	note := "started"
	if len(details) > 0 {
		note += " (" + strings.Join(details, ", ") + ")"
	}
	running := func(r *TaskRecord) {
		r.State, r.Handle, r.Started, r.Reason = TaskRunning, &h, host.BootTime{Boot: boot, At: proc.BootTime()}, ""
	}
	if !t.isPlugin() {
		return t.setLater(note, running) // the handle is also in the task's directory, where resume finds it
	}
	if err := t.set(note, running); err != nil {
		return err
	}
	t.report(ctx, "start", func(ctx context.Context) error { return t.s.TaskStarted(ctx, t.key(), attempt) })
	return nil
}

// reportTimeout bounds all attempts of one report. If they fail, the shim learns of the change at the next Sync.
const reportTimeout = 45 * time.Second

// report tells the shim about a plugin task, in up to three attempts.
func (t *taskRunner) report(ctx context.Context, what string, send func(context.Context) error) {
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	b := newBackoff()
	for range 3 {
		err := send(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		t.a.log.Warn("could not report the "+what+" of a plugin task to the shim", "alloc", t.id, "task", t.spec.Name,
			"error", err)
		sleep(ctx, b.NextBackOff(), nil)
	}
}

func (t *taskRunner) reportExit(ctx context.Context, attempt uint64, exit *taskdriver.Exit, final bool) {
	if !t.isPlugin() {
		return
	}
	code, signal := -1, 0
	if exit != nil {
		code, signal = exit.Code, exit.Signal
	}
	t.report(ctx, "exit", func(ctx context.Context) error {
		return t.s.TaskExited(ctx, t.key(), attempt, code, signal, final)
	})
}

// watch waits for the end of a running attempt. It stops the attempt if the alloc must end or the shim requests a
// restart.
func (t *taskRunner) watch(ctx, stop context.Context, h taskdriver.Handle) error {
	watching, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	ended := make(chan taskdriver.Exit, 1)
	wg.Go(func() {
		exit, err := t.driver.Wait(watching, h)
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
			return t.handleExit(ctx, stop, exit, "")
		case <-stop.Done():
			return t.stopAndHandleExit(ctx, stop, h, ended, "")
		case p := <-t.al.restartRequests[t.spec.Name]:
			if p.Attempt != t.state().Attempt {
				continue
			}
			if p.Cause == causeOperator {
				t.operatorRestart = true
				return t.stopAndHandleExit(ctx, stop, h, ended, whyOperator)
			}
			why := "the shim requested a restart: " + string(p.Cause)
			if p.Detail != "" {
				why += " (" + p.Detail + ")"
			}
			return t.stopAndHandleExit(ctx, stop, h, ended, why)
		}
	}
}

// stopAndHandleExit stops a running attempt and handles its exit.
func (t *taskRunner) stopAndHandleExit(
	ctx, stop context.Context, h taskdriver.Handle, ended <-chan taskdriver.Exit, why string,
) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := t.stopAttempt(ctx, h, why); err != nil {
		return err
	}
	exit := <-ended
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return t.handleExit(ctx, stop, exit, why)
}

// handleExit handles the exit of an attempt that ran. If the shim requested a restart, requested is the reason, and the
// exit counts as a failure whatever its code is.
func (t *taskRunner) handleExit(ctx, stop context.Context, exit taskdriver.Exit, requested string) error {
	if stop.Err() != nil {
		t.reportExit(ctx, t.state().Attempt, &exit, true)
		set := t.set
		if t.record().Stop { // recorded, so that the next agent decides the same
			set = t.setDead
		}
		return set("exited: "+describeExit(exit),
			func(r *TaskRecord) { r.State, r.Exit, r.Reason = TaskDead, &exit, "stopped" })
	}
	exit.Err = cmp.Or(requested, exit.Err)
	return t.applyRestartPolicy(ctx, exit, false, describeExit(exit))
}

// applyRestartPolicy decides what follows an attempt that has ended or could not start. After a restart by an operator,
// the next attempt follows. A task that is expected to end is dead after a success. Otherwise the restart policy
// decides, and a permanent failure is never retried.
func (t *taskRunner) applyRestartPolicy(ctx context.Context, exit taskdriver.Exit, permanent bool, why string) error {
	rec, now := t.state(), time.Now()
	if t.operatorRestart {
		t.operatorRestart = false
		t.reportExit(ctx, rec.Attempt, &exit, false)
		return t.set(why, func(r *TaskRecord) {
			r.State, r.Exit, r.Next, r.Reason, r.Restarts.Total = TaskWaiting, &exit, now, why, r.Restarts.Total+1
		})
	}
	if t.spec.ends && succeeded(exit) {
		t.reportExit(ctx, rec.Attempt, &exit, true)
		return t.setDead("complete", func(r *TaskRecord) { r.State, r.Exit, r.Reason = TaskDead, &exit, "" })
	}
	restarts, delay, again, refusal := t.spec.policy.next(rec.Restarts, now)
	again = again && !permanent && t.a.restartable(t.record())
	t.reportExit(ctx, rec.Attempt, &exit, !again)
	if again {
		return t.set(fmt.Sprintf("%s; restarting in %v", why, delay.Round(time.Millisecond)), func(r *TaskRecord) {
			r.State, r.Exit, r.Restarts, r.Next, r.Reason = TaskWaiting, &exit, restarts, now.Add(delay), why
		})
	}
	if refusal != "" && !permanent {
		why += "; " + refusal
	}
	return t.set("failed: "+why, func(r *TaskRecord) {
		r.State, r.Exit, r.Failed, r.Reason = TaskDead, &exit, true, why
	})
}
