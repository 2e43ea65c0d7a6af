package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// errStop is why a runner ends what it does: somebody asked for the alloc's end, or one of its tasks has failed.
var errStop = errors.New("the alloc is to end")

// runner takes one alloc through its life, from wherever its record says that it is.
type runner struct {
	a    *Agent
	s    Storage
	id   host.AllocID
	al   *alloc
	life context.Context // run's
	halt context.CancelCauseFunc
}

func (a *Agent) runner(id host.AllocID, s Storage) *runner {
	a.mu.Lock()
	defer a.mu.Unlock()
	return &runner{a: a, s: s, id: id, al: a.allocs[id]}
}

func (r *runner) record() *AllocRecord { return r.a.record(r.id) }

// update changes the alloc's record, and then its copy. It waits for room on the disk if there is none: what is not written down has not
// happened.
func (r *runner) update(change func(*AllocRecord)) error {
	err := r.a.untilWritten(r.life, func() error { return r.a.update(r.id, change) })
	if err == nil {
		r.a.saveChange(r.id)
	}
	return err
}

// run returns when the alloc has ended, or when ctx has: then its tasks go on.
func (r *runner) run(ctx context.Context) {
	stop, halt := context.WithCancelCause(ctx)
	r.life, r.halt = ctx, halt
	if rec := r.record(); rec.Stop || rec.Failed != "" {
		halt(errStop)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer halt(nil)
	wg.Go(func() { r.listen(stop) })
	if err := r.live(ctx, stop); err != nil && ctx.Err() == nil {
		r.a.log.Error("an alloc cannot go on", "alloc", r.id, "error", err)
	}
}

// listen turns a closed channel into a finished context; it ends with the runner.
func (r *runner) listen(stop context.Context) {
	select {
	case <-r.al.stop:
		r.halt(errStop)
		r.a.saveChange(r.id)
	case <-stop.Done():
	}
}

// live is the whole story: up, run, down. Its error is the ledger's or ctx's.
func (r *runner) live(ctx, stop context.Context) error {
	if r.record().State != AllocReleasing {
		if err := r.up(ctx, stop); err != nil {
			return err
		}
	}
	if err := r.release(ctx); err != nil {
		return err
	}
	return r.end()
}

// up prepares the alloc and runs its tasks to their ends.
func (r *runner) up(ctx, stop context.Context) error {
	if err := r.makeDirs(stop); err != nil {
		return err
	}
	if err := r.prepare(ctx, stop); err != nil {
		return err
	}
	if err := r.save(stop); err != nil {
		return err
	}
	return r.tasks(ctx, stop)
}

// makeDirs makes the alloc's directories, or dooms it. It waits for room on the disk.
func (r *runner) makeDirs(stop context.Context) error {
	for wait := newPause(r.a.config.Backoff); stop.Err() == nil; {
		err := os.MkdirAll(r.a.dirs(r.id).tasks(), 0o700)
		if err == nil {
			return nil
		}
		why := fmt.Sprintf("make its directory: %v", err)
		if !taskdriver.OutOfSpace(err) {
			return r.doom(why)
		}
		if err := r.waits(why+"; free space there", wait.next); err != nil {
			return err
		}
		wait.sleep(stop, nil)
	}
	return nil
}

// save writes the alloc's file. No task starts without it: an agent that has lost its ledger could not know what the task is. Tasks that were
// started have an older one, and are not left alone for a newer.
func (r *runner) save(stop context.Context) error {
	for _, t := range r.record().Tasks {
		if t.Attempt > 0 {
			r.a.saveChange(r.id)
			return nil
		}
	}
	wait, waited := newPause(r.a.config.Backoff), false
	for ; stop.Err() == nil; waited = true {
		again := r.a.whenRetried()
		err := r.a.saveAlloc(r.id)
		switch {
		case err == nil && waited:
			return r.update(func(rec *AllocRecord) { rec.Reason, rec.Next = "", time.Time{} })
		case err == nil:
			return nil
		}
		if err := r.waits(fmt.Sprintf("the copy of its record cannot be written: %v", err), wait.next); err != nil {
			return err
		}
		wait.sleep(stop, again)
	}
	return nil
}

// doom notes why the alloc will have failed, and has it end.
func (r *runner) doom(why string) error {
	err := r.update(func(rec *AllocRecord) {
		if rec.Failed == "" {
			rec.Failed = why
		}
	})
	r.halt(errStop)
	return err
}

// prepare has the alloc's volumes ready, or the alloc doomed or stopped. It waits for as long as it takes.
func (r *runner) prepare(ctx, stop context.Context) error {
	rec := r.record()
	boot, err := proc.BootID()
	if err != nil {
		return r.doom(err.Error())
	}
	if !rec.UsesVolumes() || r.allDead() || rec.Plans != nil && rec.Boot == boot {
		return nil
	}
	wait := newPause(r.a.config.Backoff)
	for stop.Err() == nil {
		again := r.a.whenRetried() // before the try: a change during it is not missed
		var plans map[string]host.Plan
		err := r.followed(stop, func() (err error) {
			plans, err = r.s.PrepareAlloc(stop, rec.allocGroup(r.a.isolated))
			return err
		})
		switch {
		case err == nil:
			return r.update(func(rec *AllocRecord) {
				rec.Plans, rec.Boot, rec.Reason, rec.Next = plans, boot, "", time.Time{}
				rec.note("", "has its volumes: %s", strings.Join(rec.Group.Volumes, ", "))
			})
		case stop.Err() != nil:
		case hopeless(err):
			return r.doom("its volumes cannot be prepared: " + r.advised(stop, err))
		default:
			if err := r.waits(r.told(stop, err), wait.next); err != nil {
				return err
			}
			wait.sleep(stop, again)
		}
	}
	return ctx.Err()
}

// hopeless says whether the same request would fail again.
func hopeless(err error) bool {
	return errors.Is(err, registry.ErrInvalid) || errors.Is(err, registry.ErrUnsupported)
}

func (r *runner) allDead() bool {
	for _, t := range r.record().Tasks {
		if t.State != TaskDead {
			return false
		}
	}
	return true
}

// tasks runs all tasks to their ends: those of the prestart hook first. When one fails for good, or the leader ends, or the last one that
// is no sidecar, the others are stopped.
func (r *runner) tasks(ctx, stop context.Context) error {
	specs, err := r.specs()
	if err != nil {
		return r.doom(err.Error())
	}
	if stop.Err() == nil {
		err = r.update(func(rec *AllocRecord) { rec.State = AllocRunning })
	}
	if err != nil {
		return err
	}
	all, main := &group{}, &group{}
	for _, early := range []bool{true, false} {
		first := &group{}
		for _, s := range specs {
			if s.prestart != early {
				continue
			}
			in := []*group{all}
			if !s.sidecar {
				in = append(in, main)
				if early {
					in = append(in, first)
				}
			}
			r.launch(ctx, stop, s, in)
		}
		first.wait()
	}
	main.wait()
	if ctx.Err() == nil {
		r.halt(errStop)
	}
	all.wait()
	return errors.Join(ctx.Err(), r.a.broken())
}

// group is tasks that are waited for together.
type group struct{ wg sync.WaitGroup }

func (g *group) wait() { g.wg.Wait() }

// launch runs a task on a goroutine that the groups wait for.
func (r *runner) launch(ctx, stop context.Context, s taskSpec, in []*group) {
	for _, g := range in {
		g.wg.Add(1)
	}
	go func() {
		defer func() {
			for _, g := range in {
				g.wg.Done()
			}
		}()
		t := &taskRunner{runner: r, spec: s, driver: r.a.drivers[s.Driver]}
		err := t.run(ctx, stop)
		if err != nil && ctx.Err() == nil {
			r.a.log.Error("a task cannot go on", "alloc", r.id, "task", s.Name, "error", err)
		}
		if ctx.Err() == nil && (s.leader || r.record().Tasks[s.Name].Failed) {
			r.halt(errStop)
		}
	}()
}

func (r *runner) specs() ([]taskSpec, error) {
	rec := r.record()
	var out []taskSpec
	for _, t := range rec.Group.Tasks {
		s, err := readTask(rec.JobType, rec.Group, t)
		if err != nil {
			return nil, err
		}
		if r.a.drivers[t.Driver] == nil {
			return nil, registry.Errorf(registry.ErrUnsupported, "task %q: this agent has no driver %q", t.Name, t.Driver)
		}
		out = append(out, s)
	}
	return out, nil
}

// release gives the volumes back. It is tried until it is done: nothing later may happen before.
func (r *runner) release(ctx context.Context) error {
	if !r.record().UsesVolumes() {
		return nil
	}
	err := r.update(func(rec *AllocRecord) {
		rec.State, rec.Reason, rec.Next = AllocReleasing, "its volumes are being given back", time.Time{}
	})
	if err != nil {
		return err
	}
	wait := newPause(r.a.config.Backoff)
	for {
		again := r.a.whenRetried()
		err := r.followed(ctx, func() error { return r.s.ReleaseAlloc(ctx, r.id) })
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		}
		if err := r.waits("its volumes are not given back yet: "+r.told(ctx, err), wait.next); err != nil {
			return err
		}
		wait.sleep(ctx, again)
	}
}

// end notes how the alloc has ended. Others may wait for what it held.
func (r *runner) end() error {
	err := r.update(func(rec *AllocRecord) {
		rec.State, rec.Reason = rec.outcome()
		rec.Ended, rec.Plans = time.Now().UTC(), nil
		text := map[AllocState]string{AllocComplete: "is complete", AllocStopped: "is stopped", AllocFailed: "has failed: " + rec.Reason}
		rec.note("", "%s", text[rec.State])
	})
	r.a.Retry()
	return err
}

// outcome is how an alloc whose tasks have all ended has done.
func (r *AllocRecord) outcome() (AllocState, string) {
	if r.Failed != "" {
		return AllocFailed, r.Failed
	}
	complete := true
	for _, t := range r.Group.Tasks {
		rec := r.Tasks[t.Name]
		if rec.Failed {
			return AllocFailed, fmt.Sprintf("task %q: %s", t.Name, rec.Reason)
		}
		complete = complete && rec.Exit != nil && rec.Exit.Code == 0 && rec.Attempt > 0
	}
	if r.Stop && !(r.batch() && complete) {
		return AllocStopped, ""
	}
	return AllocComplete, ""
}

// pause is a back-off that something else may cut short.
type pause struct{ next, most time.Duration }

func newPause(limits [2]time.Duration) *pause { return &pause{limits[0], limits[1]} }

func (p *pause) sleep(ctx context.Context, cut <-chan struct{}) {
	timer := time.NewTimer(p.next)
	defer timer.Stop()
	p.next = min(2*p.next, p.most)
	select {
	case <-timer.C:
	case <-cut:
	case <-ctx.Done():
	}
}
