package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// errStop cancels the work of an alloc that must end, because it was stopped or a task of it ended.
var errStop = errors.New("the alloc is being stopped")

// runner takes one alloc from the state of its record to its end.
type runner struct {
	a      *Agent
	s      Storage
	id     host.AllocID
	al     *alloc
	runCtx context.Context         // the context of run
	halt   context.CancelCauseFunc // makes the alloc end
}

// preparedVolumes is the result of PrepareAlloc. The commit that starts the tasks records it.
type preparedVolumes struct {
	plans map[string]host.Plan // by task
	boot  string               // boot ID at which they were made
}

func (r *runner) record() *AllocRecord { return r.a.record(r.id) }

// update changes the alloc's record. It waits while the disk is full, because the runner takes no step before it is
// recorded.
func (r *runner) update(change func(*AllocRecord)) error {
	return r.a.retryWhileFull(r.runCtx, func() error { return r.a.update(r.id, change) })
}

// run returns when the alloc has ended. If ctx ends first, its tasks keep running.
func (r *runner) run(ctx context.Context) {
	stop, halt := context.WithCancelCause(ctx)
	r.runCtx, r.halt = ctx, halt
	if rec := r.record(); rec.Stop || rec.Failed != "" {
		halt(errStop)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer halt(nil)
	wg.Go(func() {
		select {
		case <-r.al.stop:
			halt(errStop)
		case <-stop.Done():
		}
	})
	if err := r.runToEnd(ctx, stop); err != nil && ctx.Err() == nil {
		r.a.log.Error("running the alloc failed", "alloc", r.id, "error", err)
	}
}

// runToEnd takes the alloc through all steps. The stop context ends when the alloc must end. Errors come from the
// ledger or ctx.
func (r *runner) runToEnd(ctx, stop context.Context) error {
	if r.record().State != AllocReleasing {
		if err := r.runToTaskEnd(ctx, stop); err != nil {
			return err
		}
	}
	if err := r.removeFailed(ctx); err != nil {
		return err
	}
	if err := r.releaseVolumes(ctx); err != nil {
		return err
	}
	err := r.update(func(rec *AllocRecord) {
		rec.State, rec.Reason = rec.outcome()
		rec.Ended, rec.Plans = time.Now().UTC(), nil
		if rec.State == AllocFailed && rec.Failed != "" { // else a note of the failed task has the reason
			rec.note("", "failed: %s", rec.Reason)
		} else {
			rec.note("", "%s", rec.State)
		}
	})
	r.a.Retry() // other allocs may wait for the volumes
	return err
}

// runToTaskEnd takes the alloc through all steps until its tasks have ended.
func (r *runner) runToTaskEnd(ctx, stop context.Context) error {
	if err := r.makeDirs(stop); err != nil {
		return err
	}
	prepared, err := r.prepareVolumes(ctx, stop)
	if err != nil {
		return err
	}
	if err := r.saveCopy(stop); err != nil {
		return err
	}
	return r.runTasks(ctx, stop, prepared)
}

// fail records why the alloc fails, unless a reason is recorded already, and makes the alloc end.
func (r *runner) fail(why string) error {
	err := r.update(func(rec *AllocRecord) {
		if rec.Failed == "" {
			rec.Failed = why
		}
	})
	r.halt(errStop)
	return err
}

// retry calls do until it succeeds, its error is permanent, or ctx ends. Between attempts, the alloc's record has the
// described error as the reason for waiting. retry returns errors of do, of the ledger and of ctx.
func (r *runner) retry(ctx context.Context, do func() error, describe func(error) string) error {
	for b := newBackoff(); ; {
		retried := r.a.retryRequested() // before the call, so that a change during it is not missed
		err := do()
		if err == nil || ctx.Err() != nil || isPermanent(err) {
			return err
		}
		pause := b.NextBackOff()
		if err := r.setReason(describe(err), pause); err != nil {
			return err
		}
		sleep(ctx, pause, retried)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// isPermanent reports whether a repeated request would fail again.
func isPermanent(err error) bool {
	return errors.Is(err, registry.ErrInvalid) || errors.Is(err, registry.ErrUnsupported)
}

// failIfPermanent fails the alloc because of a permanent error, and returns any other error. It ignores an error after
// stop has ended, because the alloc ends anyway.
func (r *runner) failIfPermanent(stop context.Context, err error, describe func(error) string) error {
	switch {
	case err == nil || stop.Err() != nil:
		return nil
	case isPermanent(err):
		return r.fail(describe(err))
	}
	return err
}

// makeDirs makes the alloc's directories. It waits while the disk is full, and fails the alloc on any other error.
func (r *runner) makeDirs(stop context.Context) error {
	err := r.retry(stop, func() error {
		err := os.MkdirAll(r.a.dirs(r.id).tasks(), 0o700)
		switch {
		case taskdriver.OutOfSpace(err):
			return fmt.Errorf("make the alloc directory: %w; free space there", err)
		case err != nil:
			return registry.Invalid("make the alloc directory: %w", err)
		}
		return nil
	}, error.Error)
	return r.failIfPermanent(stop, err, error.Error)
}

// saveCopy saves the first copy of the record, and waits until that succeeds. No task starts without a copy, because
// an agent that lost its ledger would not know the task. If an earlier agent has started a task, a copy exists, and
// saveCopy does nothing.
func (r *runner) saveCopy(stop context.Context) error {
	for _, t := range r.record().Tasks {
		if t.Attempt > 0 {
			return nil
		}
	}
	describe := func(err error) string { return fmt.Sprintf("cannot write a copy of the alloc's record: %v", err) }
	err := r.retry(stop, func() error { return r.a.saveCurrent(r.id) }, describe)
	if rec := r.record(); err == nil && rec.Reason != "" { // the alloc waits no longer
		return r.update(func(rec *AllocRecord) { rec.Reason, rec.Next = "", time.Time{} })
	}
	return r.failIfPermanent(stop, err, describe)
}

// prepareVolumes prepares the volumes until that succeeds or the alloc must end. A permanent error fails the alloc. The
// result is nil if there is nothing to record.
func (r *runner) prepareVolumes(ctx, stop context.Context) (*preparedVolumes, error) {
	rec := r.record()
	boot, err := proc.BootID()
	if err != nil {
		return nil, r.fail(err.Error())
	}
	alreadyPrepared := rec.Plans != nil && rec.Boot == boot
	if alreadyPrepared || !rec.UsesVolumes() || rec.allTasksDead() || stop.Err() != nil {
		return nil, nil
	}
	prepared := &preparedVolumes{boot: boot}
	prepare := func() (err error) {
		prepared.plans, err = r.s.PrepareAlloc(stop, rec.allocGroup(r.a.isolated))
		return err
	}
	err = r.retry(stop, func() error { return r.reportWaits(stop, prepare) },
		func(err error) string { return r.describeError(stop, err) })
	if err == nil {
		return prepared, nil
	}
	err = r.failIfPermanent(stop, err, func(err error) string {
		why := err.Error()
		if waits := r.waits(stop); len(waits) > 0 { // not DescribeWaits: the alloc waits for no holder of a claim
			why = registry.Waits(waits)
			for _, w := range waits {
				if w.Advice != "" {
					why += "; " + w.Advice
				}
			}
		}
		return "volumes cannot be prepared: " + why
	})
	return nil, errors.Join(err, ctx.Err())
}

// removeFailed returns when no failed start can start a task any more. Until then the alloc keeps its volumes.
// removeFailed treats no error as permanent.
func (r *runner) removeFailed(ctx context.Context) error {
	return r.retry(ctx, func() error {
		for _, t := range r.record().Group.Tasks {
			remover, able := r.a.drivers[t.Driver].(taskdriver.Remover)
			if !able {
				continue
			}
			if err := remover.RemoveFailed(ctx, r.a.dirs(r.id).task(t.Name)); err != nil {
				return fmt.Errorf("task %q: %v", t.Name, err) // %v drops its kind: retry repeats it
			}
		}
		return nil
	}, error.Error)
}

// releaseVolumes returns when the volumes are released. It treats no error as permanent.
func (r *runner) releaseVolumes(ctx context.Context) error {
	if !r.record().UsesVolumes() {
		return nil
	}
	if r.record().State != AllocReleasing {
		if err := r.update((*AllocRecord).beginRelease); err != nil {
			return err
		}
	}
	return r.retry(ctx, func() error {
		err := r.reportWaits(ctx, func() error { return r.release(ctx) })
		if isPermanent(err) {
			err = errors.New(err.Error()) // this drops its kind: retry repeats it
		}
		return err
	}, func(err error) string { return "volumes not released yet: " + r.describeError(ctx, err) })
}

// release releases the volumes. ReleaseAlloc also deletes those with on_stop = "delete". ReplaceAlloc keeps them for
// another alloc that will follow in the slot. If meanwhile none will follow any more, release cancels ReplaceAlloc and
// calls ReleaseAlloc.
func (r *runner) release(ctx context.Context) error {
	hasSuccessor := func() bool { rec := r.record(); return r.a.job(rec.Job).refillsSlot(rec) }
	if !hasSuccessor() {
		return r.s.ReleaseAlloc(ctx, r.id)
	}
	replacing, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		if r.a.Await(replacing, func([]*AllocRecord) bool { return !hasSuccessor() }) == nil {
			cancel()
		}
	})
	err := r.s.ReplaceAlloc(replacing, r.id)
	if replacing.Err() != nil && ctx.Err() == nil {
		err = r.s.ReleaseAlloc(ctx, r.id)
	}
	return err
}

// runTasks runs all tasks to their ends, prestart tasks first. It stops the others when a task fails, when the
// leader ends, or when the last task that is not a sidecar ends.
func (r *runner) runTasks(ctx, stop context.Context, prepared *preparedVolumes) error {
	specs, err := r.specs()
	if err != nil {
		return r.fail(err.Error())
	}
	begun := map[host.TaskName]bool{}
	if stop.Err() == nil {
		begun = r.record().firstTasks(specs)
		if err := r.update(func(rec *AllocRecord) { rec.beginTasks(begun, prepared) }); err != nil {
			return err
		}
	}
	var all sync.WaitGroup
	var main []chan struct{} // of each task that is no sidecar; closed when the task has ended
	for _, prestart := range []bool{true, false} {
		for _, s := range specs {
			if s.prestart != prestart {
				continue
			}
			ended := make(chan struct{})
			all.Go(func() {
				defer close(ended)
				r.runTask(ctx, stop, s, begun[s.Name])
			})
			if !s.sidecar {
				main = append(main, ended)
			}
		}
		for _, ended := range main {
			<-ended
		}
	}
	if ctx.Err() == nil {
		r.halt(errStop)
	}
	all.Wait()
	return errors.Join(ctx.Err(), r.a.failure())
}

// firstTasks returns the tasks that have not started and wait for no other task.
func (r *AllocRecord) firstTasks(specs []taskSpec) map[host.TaskName]bool {
	prestart := slices.ContainsFunc(specs, func(s taskSpec) bool { return s.prestart })
	first := map[host.TaskName]bool{}
	for _, s := range specs {
		if s.prestart == prestart && r.Tasks[s.Name].State == TaskPending {
			first[s.Name] = true
		}
	}
	return first
}

// beginTasks records that the volumes are ready, that the alloc runs, and that the tasks begin their first attempts.
func (r *AllocRecord) beginTasks(tasks map[host.TaskName]bool, prepared *preparedVolumes) {
	if prepared != nil {
		r.Plans, r.Boot, r.Reason, r.Next = prepared.plans, prepared.boot, "", time.Time{}
		r.note("", "volumes ready: %s", strings.Join(r.Group.Volumes, ", "))
	}
	if !r.Stop {
		r.State = AllocRunning
	}
	for name := range tasks {
		t := r.Tasks[name]
		t.beginAttempt()
		t.Since = time.Now().UTC()
	}
}

// runTask runs a task to its end. It halts the alloc if the task is the leader or has failed.
func (r *runner) runTask(ctx, stop context.Context, s taskSpec, begun bool) {
	t := &taskRunner{runner: r, spec: s, driver: r.a.drivers[s.Driver], begun: begun}
	err := t.run(ctx, stop)
	if err != nil && ctx.Err() == nil {
		r.a.log.Error("running the task failed", "alloc", r.id, "task", s.Name, "error", err)
	}
	if ctx.Err() == nil && (s.leader || r.record().Tasks[s.Name].Failed) {
		r.halt(errStop)
	}
}

// specs returns the decoded tasks of the alloc. Its error has all problems of all tasks.
func (r *runner) specs() (out []taskSpec, err error) {
	rec := r.record()
	var wrong Problems
	for _, t := range rec.Group.Tasks {
		out = append(out, newTaskSpec(rec.JobType, rec.Group, t, &wrong))
		if r.a.drivers[t.Driver] == nil {
			wrong.add(t, "", registry.Errorf(registry.ErrUnsupported, "this agent has no driver %q", t.Driver))
		}
	}
	return out, wrong.err()
}

// pollTimeout bounds a question to the shim about what an alloc waits for.
const pollTimeout = 2 * time.Second

// reportWaits calls do. While do runs, it records what the alloc waits for.
func (r *runner) reportWaits(ctx context.Context, do func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for b := newBackoff(); ; {
			sleep(ctx, b.NextBackOff(), nil)
			waits := r.waits(ctx)
			if ctx.Err() != nil {
				return
			}
			if len(waits) > 0 && r.setReason(r.a.DescribeWaits(ctx, r.s, waits), 0) != nil {
				return // the agent ends
			}
		}
	})
	defer wg.Wait()
	defer cancel()
	return do()
}

// waits asks the shim what the alloc waits for. It returns nil if the shim does not answer.
func (r *runner) waits(ctx context.Context) []registry.Wait {
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	list, _, err := r.s.Allocs(ctx, host.AllocQuery{ID: r.id})
	if err != nil || len(list) == 0 {
		return nil
	}
	return list[0].Waiting
}

// describeError says why the volumes are not ready: what the alloc waits for, or else err.
func (r *runner) describeError(ctx context.Context, err error) string {
	if waits := r.waits(ctx); len(waits) > 0 {
		return r.a.DescribeWaits(ctx, r.s, waits)
	}
	return err.Error()
}

// setReason records what the alloc waits for, and when the next attempt is due. Pause 0 means that an attempt is in
// progress.
func (r *runner) setReason(why string, pause time.Duration) error {
	next := time.Time{}
	if pause > 0 {
		next = time.Now().UTC().Add(pause)
	}
	if rec := r.record(); rec.Reason == why && rec.Next.Equal(next) {
		return nil
	}
	return r.update(func(rec *AllocRecord) {
		if rec.Reason != why {
			rec.note("", "waiting: %s", why)
		}
		rec.Reason, rec.Next = why, next
	})
}
