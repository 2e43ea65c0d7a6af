package intent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"time"

	"holdfast/registry"
)

// Grace is how long an outcome may take to be stored after its caller has gone, and what Renew waits for before the last known has to do.
const Grace = 5 * time.Second

// Waits for another try from which on it is stored that the last one has failed: if what it said is news, and anyway. Of a try that comes sooner
// nobody would see that.
const (
	notable = 100 * time.Millisecond
	evident = 500 * time.Millisecond
)

// Call is one CSI call to drive.
type Call struct {
	// Intent says which: Volume, Name, RPC and Hash; Alloc, Request and Operation where there are any. Drive fills in the rest.
	Intent registry.Intent
	// Before is part of the commit that opens the intent: marks become Sent here. Its error is returned and nothing is sent. It
	// may be nil. Of a call that is open already it is asked without a commit first, so it changes nothing else.
	Before func(registry.View) (registry.Change, error)
	// Do sends the call. Its context ends with the policy's deadline.
	Do func(context.Context) error
	// Renew makes anew what may have changed since the last try, such as a secret, before each further one. Its context ends after Grace. It
	// may be nil.
	Renew func(context.Context)
	// Done is part of the commit that closes the intent after Do returned nil. It may be nil.
	Done func(registry.View) registry.Change
	// Failed is part of the commit that closes the intent after the call failed for certain; clean: no earlier try of it may have
	// had an effect either. It may be nil.
	Failed func(view registry.View, err *registry.CallError, clean bool) registry.Change
	// Again is after how long whoever drives the call sends it again by itself if this drive leaves it without a certain answer: for people.
	// 0: that is not known.
	Again time.Duration
	// Policy of its retries. The zero value is the one that Policies has for the RPC.
	Policy Policy
}

// Drive opens the intent, sends the call, tries it again as its policy says until ctx or its Round ends, and stores what became of it. It
// returns nil when the call is done and its outcome is stored. Any error that is not ErrUncertain means that the call does not run any more or
// never ran.
func Drive(ctx context.Context, log registry.State, now func() time.Time, c Call) error {
	if why := resumed(ctx); why != nil {
		return fmt.Errorf("%s of %s was not sent: %w", c.Intent.RPC, c.Intent.Name, why)
	}
	if c.Policy.Deadline == 0 {
		c.Policy = PolicyOf(c.Intent.RPC)
	}
	d := drive{Call: c, log: log, now: now}
	if err := d.open(ctx); err != nil {
		return err
	}
	answered := map[string]int{} // so often, by code
	for first := true; ; first = false {
		if !first {
			d.renew(ctx)
			if !d.stands(ctx) {
				return d.forgotten()
			}
		}
		err := d.send(ctx)
		if err == nil {
			return d.store(ctx, d.done)
		}
		row := d.Policy.Row(err.Code)
		answered[err.Code]++
		if ctx.Err() != nil || answered[err.Code] >= row.Tries {
			return d.giveUp(ctx, err)
		}
		delay := d.delay(row, err.Code)
		if over(ctx, delay) {
			return d.giveUp(ctx, err)
		}
		if delay >= evident || delay >= notable && !d.told(err) {
			if store := d.keep(ctx, err, now().Add(delay)); store != nil {
				return errors.Join(err, store)
			}
		}
		if !sleep(ctx, delay) || resumed(ctx) != nil {
			return d.giveUp(ctx, err)
		}
		d.Intent.Attempt++
	}
}

// drive is one run of Drive.
type drive struct {
	Call
	log   registry.State
	now   func() time.Time
	doubt bool // an earlier try, or the call that this one undoes, has had no certain answer
	again bool // there was a call before this drive that may still run at the plugin: this one repeats it, or undoes it
}

// open stores the intent, unless it is stored.
func (d *drive) open(ctx context.Context) error {
	if joined, err := d.join(ctx); joined || err != nil {
		return err
	}
	_, err := d.log.Commit(ctx, func(view registry.View) (registry.Change, error) {
		next := d.Intent
		next.Attempt, next.Outcome, next.Since = 1, registry.OutcomePending, d.now()
		if open, found := view.Intent(next.Volume); found {
			if err := Legal(open, next); err != nil {
				return registry.Change{}, err
			}
			d.doubt, d.again = true, MayRun(open)
			if same(open, next) {
				next.Attempt, next.Since, next.Code, next.Detail = open.Attempt+1, open.Since, open.Code, open.Detail
			}
		}
		var change registry.Change
		if d.Before != nil {
			var err error
			if change, err = d.Before(view); err != nil {
				return registry.Change{}, err
			}
		}
		d.Intent = next
		return change.And(registry.Change{Put: []registry.Record{next}}), nil
	})
	return err
}

// join goes on with the call where all that has to be known of it before it is sent is stored: an earlier drive has left it so, maybe an earlier
// shim's. After a swap that is so of all calls that were under way, and nobody has to wait until it is written once more. How often it was tried,
// and what was answered last, is as it was stored last.
func (d *drive) join(ctx context.Context) (joined bool, err error) {
	err = d.log.View(ctx, func(view registry.View) error {
		open, found := view.Intent(d.Intent.Volume)
		if !found || asked(open) != d.Intent || d.Before != nil && !d.begun(view) {
			return nil
		}
		joined, d.doubt, d.again = true, true, MayRun(open)
		d.Intent = open
		d.Intent.Attempt++
		return nil
	})
	return joined, err
}

// asked is an intent as Drive was asked to open it.
func asked(open registry.Intent) registry.Intent {
	return registry.Intent{
		Volume: open.Volume, Name: open.Name, RPC: open.RPC, Alloc: open.Alloc, Request: open.Request, Operation: open.Operation, Answers: open.Answers,
		Hash: open.Hash,
	}
}

// begun says whether what Before puts is there.
func (d *drive) begun(view registry.View) bool {
	change, err := d.Before(view)
	if err != nil || len(change.Delete)+len(change.Events) > 0 {
		return false
	}
	return !slices.ContainsFunc(change.Put, func(r registry.Record) bool { return !stored(view, r) })
}

// stored says whether a record is there as it is. Of other kinds than these nobody can tell.
func stored(view registry.View, r registry.Record) bool {
	switch r := r.(type) {
	case registry.Placement:
		is, found := view.Placement(r.Volume)
		return found && reflect.DeepEqual(is, r)
	case registry.Ref:
		return slices.ContainsFunc(view.Refs(r.Volume), func(is registry.Ref) bool { return reflect.DeepEqual(is, r) })
	case registry.Volume:
		is, found := view.Volume(r.VolumeName())
		return found && reflect.DeepEqual(is, r)
	}
	return false
}

// send sends the call once. A nil result means that it is done.
func (d *drive) send(ctx context.Context) *registry.CallError {
	ctx, done := lingering(ctx)
	defer done()
	ctx, cancel := context.WithTimeout(ctx, d.Policy.Deadline)
	defer cancel()
	err := judge(d.Intent.RPC, d.Do(ctx))
	if err != nil && d.doubt && !answers(err.Code) {
		err.Outcome = registry.OutcomeUncertain // this try may not even have left: that says nothing of the earlier ones
	}
	d.doubt = d.doubt || err != nil && err.Outcome != registry.OutcomeFailed
	return err
}

// patience is which part of the time that a call has run at a plugin passes until it is asked for again: its end is learnt late by no more than that.
const patience = 3

// delay is the wait after a try that was answered so. A plugin that says ABORTED because the call before this drive still runs
// there, as one does that a swap has called off, is asked again soon, as most calls are short; but one that has turned out to be long is not
// asked for as if it were young, by each drive and each shim anew.
func (d *drive) delay(row Row, code string) time.Duration {
	if d.again && code == "ABORTED" {
		wait := min(max(2*Linger, d.now().Sub(d.Intent.Since)/patience), row.Backoff.Max)
		return Backoff{First: wait, Max: wait}.Delay(1, rand.Float64())
	}
	return row.Backoff.Delay(d.Intent.Attempt, rand.Float64())
}

func (d *drive) renew(ctx context.Context) {
	if d.Renew == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, Grace)
	defer cancel()
	d.Renew(ctx)
}

// stands says whether the intent is open as this drive has opened it. What cannot be read is not known to have changed.
func (d *drive) stands(ctx context.Context) (stands bool) {
	err := d.log.View(ctx, func(view registry.View) error {
		stands = d.mine(view)
		return nil
	})
	return stands || err != nil
}

func (d *drive) mine(view registry.View) bool {
	open, found := view.Intent(d.Intent.Volume)
	return found && same(open, d.Intent) && open.Name == d.Intent.Name && open.Since.Equal(d.Intent.Since)
}

// forgotten is the end of a call whose intent was closed by somebody else: it is not sent again, and what it did is not recorded.
func (d *drive) forgotten() error {
	return registry.Errorf(registry.ErrConflict, "%s of %s was under way, and the volume was forgotten meanwhile: the call is not sent again, and what it may have done is not recorded",
		d.Intent.RPC, d.Intent.Name)
}

// done is the change that closes the intent of a call that is done.
func (d *drive) done(view registry.View) registry.Change {
	change := registry.Change{Delete: []registry.Key{d.Intent.Key()}}
	if d.Done != nil {
		change = change.And(d.Done(view))
	}
	return change
}

// giveUp stores the last error and returns it, with what a person may do. The intent of a call that failed is closed, that of an uncertain one stays.
func (d *drive) giveUp(ctx context.Context, err *registry.CallError) error {
	var store error
	err.Attempt = d.Intent.Attempt
	said := advised{err, d.Policy.Row(err.Code).Advice}
	switch {
	case err.Outcome == registry.OutcomeFailed:
		store = d.store(ctx, func(view registry.View) registry.Change {
			change := registry.Change{Delete: []registry.Key{d.Intent.Key()}, Events: d.failed(err)}
			if d.Failed != nil {
				change = change.And(d.Failed(view, err, !d.doubt))
			}
			return change
		})
	case !LetGo(ctx):
		next := time.Time{}
		if d.Again > 0 {
			next = d.now().Add(d.Again)
		}
		store = d.keep(ctx, err, next)
	}
	if ctx.Err() != nil {
		return errors.Join(fmt.Errorf("%w (given up: %w)", said, context.Cause(ctx)), store)
	}
	return errors.Join(said, store)
}

// advised is a call's error with what a person may do about it.
type advised struct {
	*registry.CallError
	advice string
}

func (e advised) Error() string { return e.CallError.Error() + "; " + e.advice }
func (e advised) Unwrap() error { return e.CallError }

// keep stores that the call has no certain answer, or is tried again at next.
func (d *drive) keep(ctx context.Context, err *registry.CallError, next time.Time) error {
	events := d.failed(err)
	d.Intent.Outcome, d.Intent.Code, d.Intent.Detail, d.Intent.Next = err.Outcome, err.Code, err.Detail, next
	intent := d.Intent
	return d.store(ctx, func(registry.View) registry.Change {
		return registry.Change{Put: []registry.Record{intent}, Events: events}
	})
}

// failed is the event of a failed try: only the first of several that failed alike is told.
func (d *drive) failed(err *registry.CallError) []registry.Event {
	if d.told(err) {
		return nil
	}
	e := Event(registry.EventStepFailed, d.Intent, d.now())
	e.Detail = err.Code + ": " + err.Detail
	if err.Code == "" {
		e.Detail = "no answer: " + err.Detail
	}
	return []registry.Event{e}
}

// told says whether it is stored that the last try failed so.
func (d *drive) told(err *registry.CallError) bool {
	return d.Intent.Outcome == err.Outcome && d.Intent.Code == err.Code
}

// store commits even if ctx has ended: what became of a call must not be lost because nobody waits for it any more. Nothing is stored of a
// call whose intent is not open any more.
func (d *drive) store(ctx context.Context, change func(registry.View) registry.Change) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), Grace)
	defer cancel()
	mine := true
	_, err := d.log.Commit(ctx, func(view registry.View) (registry.Change, error) {
		if mine = d.mine(view); !mine {
			return registry.Change{}, nil
		}
		return change(view), nil
	})
	switch {
	case err == nil && !mine:
		return d.forgotten()
	case err != nil:
		return fmt.Errorf("store what became of %s of %s: %w", d.Intent.RPC, d.Intent.Name, err)
	}
	return nil
}

// sleep says whether it slept to the end.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
