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

// A failed try is stored if the next try begins later than recordNew (for a new answer) or recordAlways (for any). An
// operator would not see a shorter wait.
const (
	recordNew    = 100 * time.Millisecond
	recordAlways = 500 * time.Millisecond
)

// delivery is one of the calls that Send sends.
type delivery struct {
	Sender
	Call
	doubt  bool                 // an earlier try, or the call that this one undoes, had no certain answer
	mayRun bool                 // an earlier call, which this one repeats or undoes, may still run at the plugin
	by     registry.ExecutorKey // of the executor that has to send the call; zero: any node may send it
	sender registry.NodeName    // this node, if it sends the call as the executor; else empty
}

// open stores the intent, in the same commit as the outcome of the call before. If there is no call before, open joins
// the intent if it is stored already.
func (d *delivery) open(ctx context.Context, before *delivery) error {
	if before == nil {
		if joined, err := d.join(ctx); joined || err != nil {
			return err
		}
		_, err := d.State.Commit(ctx, d.openChange)
		return err
	}
	var refused error
	err := before.store(ctx, before.doneChange, func(view registry.View) (change registry.Change, err error) {
		change, refused = d.openChange(view)
		return change, refused
	})
	if refused != nil && errors.Is(err, refused) {
		return refused // without the text of store, because the outcome of the call before is stored
	}
	return err
}

// openChange returns the change that opens the intent, and makes that intent the delivery's own. It fails if the call
// is not legal now, if this node must not send it, or if Before fails.
func (d *delivery) openChange(view registry.View) (change registry.Change, err error) {
	d.doubt, d.mayRun = false, false // the decision may be made more than once
	next := requested(d.Intent, d.Intent.At)
	next.Attempt, next.Outcome, next.Since = 1, registry.OutcomePending, d.Now()
	executor, err := d.executor(view)
	if err != nil {
		return registry.Change{}, err
	}
	next.Senders = WithSender(nil, executor.Holder)
	if err := view.Blocks(executor, next); err != nil {
		return registry.Change{}, err
	}
	if open, found := d.OpenCall(view, next); found {
		if err := checkLegal(executor, open, next); err != nil {
			return registry.Change{}, err
		}
		next.Senders = WithSender(open.Senders, executor.Holder)
		d.doubt, d.mayRun = true, MayRun(open)
		if repeats(open, next) {
			next.Attempt, next.Since, next.Code, next.Detail = open.Attempt+1, open.Since, open.Code, open.Detail
		}
	}
	if d.Before != nil {
		if change, err = d.Before(view); err != nil {
			return registry.Change{}, err
		}
	}
	d.Intent, d.sender = next, executor.Holder
	return change.And(registry.Change{Put: []registry.Record{next}}), nil
}

// join continues an open call without a commit if everything that must be stored before the call is stored already.
// After a swap this holds for all calls that were under way, so none of them waits for a commit.
func (d *delivery) join(ctx context.Context) (joined bool, err error) {
	err = d.State.View(ctx, func(view registry.View) error {
		open, found := d.OpenCall(view, d.Intent)
		if !found || !reflect.DeepEqual(requested(open, d.Intent.At), d.Intent) ||
			d.Before != nil && !d.prepared(view) {
			return nil
		}
		executor, err := d.executor(view)
		if err != nil || executor.Holder != "" && !slices.Contains(open.Senders, executor.Holder) {
			return err
		}
		joined, d.doubt, d.mayRun = true, true, MayRun(open)
		d.Intent, d.sender = open, executor.Holder
		d.Intent.Attempt++
		return nil
	})
	return joined, err
}

// executor returns the executor of the call's plugin, and sets d.by. It returns an error if another node is the
// executor. The executor is zero if this node may send the call without being one: see Executors.Check.
func (d *delivery) executor(view registry.View) (registry.Executor, error) {
	if d.Executors == nil || d.Intent.RPC.OnNode() {
		return registry.Executor{}, nil
	}
	v, _ := view.Volume(d.Intent.Name)
	d.by = registry.ExecutorKey{Plugin: d.Intent.Volume.Plugin, Node: v.Node}
	return d.Executors.Check(view, d.by)
}

// requested returns open with only the fields that a caller of Send sets. If at is zero, the caller does not know the
// instance, and the result has no At.
func requested(open registry.Intent, at registry.TaskKey) registry.Intent {
	if at != (registry.TaskKey{}) {
		at = open.At
	}
	return registry.Intent{
		At:     at,
		Volume: open.Volume, Name: open.Name, RPC: open.RPC, Alloc: open.Alloc, Request: open.Request,
		Node: open.Node, Operation: open.Operation, Hash: open.Hash,
	}
}

// prepared reports whether the records that Before would write are stored already.
func (d *delivery) prepared(view registry.View) bool {
	change, err := d.Before(view)
	if err != nil || len(change.Delete)+len(change.Events) > 0 {
		return false
	}
	return !slices.ContainsFunc(change.Put, func(r registry.Record) bool {
		return !reflect.DeepEqual(view.Get(r.Key()), r)
	})
}

// retry sends the call until it is done or given up.
func (d *delivery) retry(ctx context.Context) error {
	answers := map[string]int{} // how often each code was answered
	for {
		err := d.try(ctx)
		if err == nil {
			return nil
		}
		answers[err.Code]++
		delay := d.delay(err.Code)
		tooLate := !d.RetryUntil.IsZero() && time.Now().Add(delay).After(d.RetryUntil)
		if ctx.Err() != nil || tooLate || answers[err.Code] >= d.Policy.Row(err.Code).Tries {
			return d.giveUp(ctx, err)
		}
		if delay >= recordAlways || delay >= recordNew && !d.isRecorded(err) {
			if storeErr := d.keepOpen(ctx, err, d.Now().Add(delay)); storeErr != nil {
				return errors.Join(err, storeErr)
			}
		}
		if !Sleep(ctx, delay) {
			return d.giveUp(ctx, err)
		}
		d.Intent.Attempt++
		d.renew(ctx)
		if !d.stillOpen(ctx) {
			return d.errClosed()
		}
	}
}

// try sends the call once. It returns nil if the call is done.
func (d *delivery) try(ctx context.Context) *registry.CallError {
	ctx, end := callContext(ctx, d.Drain, d.Policy.Deadline)
	defer end()
	err := callError(d.Intent.RPC, d.send(ctx))
	if err != nil && d.doubt && !Answers(err.Code) {
		// this try may never have reached the plugin, so it says nothing about earlier ones
		err.Outcome = registry.OutcomeUncertain
	}
	d.doubt = d.doubt || err != nil && err.Outcome != registry.OutcomeFailed
	return err
}

// send sends the call to the selected task.
func (d *delivery) send(ctx context.Context) (err error) {
	at := d.Intent.At
	if d.Select != nil {
		if at, err = d.Select(ctx); err != nil {
			return err
		}
	}
	if at != d.Intent.At || d.sender != "" && !slices.Contains(d.Intent.Senders, d.sender) {
		if err := d.storeTry(ctx, at); err != nil {
			return err
		}
	}
	return d.callAsExecutor(ctx, d.by, func(ctx context.Context) error {
		if err := d.checkSend(ctx); err != nil {
			return err
		}
		return d.Do(ctx)
	})
}

// storeTry stores the task and the sender of the next try in the open intent, and then in d.Intent.
func (d *delivery) storeTry(ctx context.Context, at registry.TaskKey) error {
	next := d.Intent
	next.At = at
	err := d.store(ctx, func(view registry.View) registry.Change {
		open, _ := d.OpenCall(view, d.Intent) // another node may have sent the call since
		next.Senders = WithSender(open.Senders, d.sender)
		return registry.Change{Put: []registry.Record{next}}
	})
	if err == nil {
		d.Intent = next
	}
	return err
}

// checkSend returns an error if the call must not be sent. While this node was not the executor, another node may have
// begun a call for the volume.
func (d *delivery) checkSend(ctx context.Context) error {
	if d.sender == "" {
		return nil
	}
	return d.State.View(ctx, func(view registry.View) error {
		if !d.isOpen(view) {
			return d.errClosed()
		}
		executor, err := d.executor(view)
		if err != nil {
			return err
		}
		if open, _ := d.OpenCall(view, d.Intent); !slices.Contains(open.Senders, d.sender) {
			d.Intent.Senders = open.Senders // a commit of unknown outcome has removed this node; the next try adds it
			return registry.Errorf(registry.ErrUnavailable, "the record of %s of %s has changed", open.RPC, open.Name)
		}
		return view.Blocks(executor, d.Intent)
	})
}

// retryDivisor divides the time that a call has run at a plugin. The quotient is the wait before the call is repeated,
// and so bounds how late the end of the call is noticed.
const retryDivisor = 3

// delay returns the wait after a try with the code. After ABORTED for an earlier call that still runs, the first wait
// is short, because most calls are short. Later waits grow with the time that the call has run.
func (d *delivery) delay(code string) time.Duration {
	if d.mayRun && code == "ABORTED" {
		wait := min(max(2*DrainTime, d.Now().Sub(d.Intent.Since)/retryDivisor), d.Policy.Backoff.Max)
		return Backoff{First: wait, Max: wait}.Delay(1, rand.Float64())
	}
	return d.Policy.Backoff.Delay(d.Intent.Attempt, rand.Float64())
}

// renew calls Call.Renew, if it is set, for at most Grace.
func (d *delivery) renew(ctx context.Context) {
	if d.Renew == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, Grace)
	defer cancel()
	d.Renew(ctx)
}

// stillOpen is isOpen for the last committed state. If the state cannot be read, it returns true.
func (d *delivery) stillOpen(ctx context.Context) (open bool) {
	err := d.State.View(ctx, func(view registry.View) error {
		open = d.isOpen(view)
		return nil
	})
	return open || err != nil
}

// isOpen reports whether the intent that this delivery has opened or joined is still open.
func (d *delivery) isOpen(view registry.View) bool {
	open, found := d.OpenCall(view, d.Intent)
	return found && repeats(open, d.Intent) && open.Name == d.Intent.Name && open.Since.Equal(d.Intent.Since)
}

// errClosed returns the error of a call whose intent another operation has closed.
func (d *delivery) errClosed() error {
	return registry.Errorf(registry.ErrConflict, "%s of %s was running when its record was closed, for "+
		"example by a deregistration: the call is not sent again, and what it may have done is not recorded",
		d.Intent.RPC, d.Intent.Name)
}

// doneChange returns the change that closes the intent of a call that is done.
func (d *delivery) doneChange(view registry.View) registry.Change {
	change := registry.Change{Delete: []registry.Key{d.Intent.Key()}}.And(d.endedChange(view, false))
	if d.Done != nil {
		change = change.And(d.Done(view))
	}
	return change
}

// endedChange returns the change for a call with a certain outcome. The call may still run at former executors that
// have sent it: the change adds a LateCall for each of them.
func (d *delivery) endedChange(view registry.View, failed bool) registry.Change {
	open, _ := d.OpenCall(view, d.Intent)
	if len(open.Senders) == 0 {
		return registry.Change{}
	}
	late := view.LateCallOf(open)
	late.Failed = failed
	return view.Ended(late, open.Senders)
}

// giveUp stores the last error and returns it with advice. It closes the intent of a failed call. The intent of an
// uncertain call stays open. If the shim releases the state, the next shim repeats that call, or one that was not sent,
// so nothing is stored.
func (d *delivery) giveUp(ctx context.Context, err *registry.CallError) error {
	var storeErr error
	err.Attempt = d.Intent.Attempt
	if Released(ctx) && !Answers(err.Code) {
		err.Outcome = registry.OutcomeUncertain // the intent stays open: callers must not take the call for ended
	}
	withAdvice := advisedError{err, d.Policy.Row(err.Code).Advice}
	switch {
	case err.Outcome == registry.OutcomeFailed:
		storeErr = d.store(ctx, func(view registry.View) registry.Change {
			change := registry.Change{Delete: []registry.Key{d.Intent.Key()}, Events: d.failureEvents(err)}
			change = change.And(d.endedChange(view, true))
			if d.Failed != nil {
				change = change.And(d.Failed(view, err, !d.doubt))
			}
			return change
		})
	case !Released(ctx):
		next := time.Time{}
		if d.RepeatAfter > 0 {
			next = d.Now().Add(d.RepeatAfter)
		}
		storeErr = d.keepOpen(ctx, err, next)
	}
	if ctx.Err() != nil {
		return errors.Join(fmt.Errorf("%w (given up: %w)", withAdvice, context.Cause(ctx)), storeErr)
	}
	return errors.Join(withAdvice, storeErr)
}

// advisedError is a call's error with advice for an operator.
type advisedError struct {
	*registry.CallError
	advice string
}

func (e advisedError) Error() string { return e.CallError.Error() + "; " + e.advice }
func (e advisedError) Unwrap() error { return e.CallError }

// keepOpen stores the last error of a call whose intent stays open, and the time of the next try. If the error shows
// that the call has ended at the plugin, keepOpen removes this node from the senders.
func (d *delivery) keepOpen(ctx context.Context, err *registry.CallError, next time.Time) error {
	events := d.failureEvents(err)
	d.Intent.Outcome, d.Intent.Code, d.Intent.Detail, d.Intent.Next = err.Outcome, err.Code, err.Detail, next
	return d.store(ctx, func(view registry.View) registry.Change {
		open, _ := d.OpenCall(view, d.Intent)
		d.Intent.Senders = open.Senders
		if d.sender != "" && EndsCall(err) && d.Executors.OneInstance(d.by.Plugin) {
			d.Intent.Senders = WithoutSender(open.Senders, d.sender)
		}
		return registry.Change{Put: []registry.Record{d.Intent}, Events: events}
	})
}

// failureEvents returns the event of a failed try, or nothing if the last try failed in the same way.
func (d *delivery) failureEvents(err *registry.CallError) []registry.Event {
	if d.isRecorded(err) {
		return nil
	}
	e := Event(registry.EventStepFailed, d.Intent, d.Now())
	e.Detail = err.Code + ": " + err.Detail
	if err.Code == "" {
		e.Detail = "no answer: " + err.Detail
	}
	return []registry.Event{e}
}

// isRecorded reports whether the intent already records this failure.
func (d *delivery) isRecorded(err *registry.CallError) bool {
	return d.Intent.Outcome == err.Outcome && d.Intent.Code == err.Code
}

// store commits the change and further decisions. It does so even if ctx has ended, so that the outcome is not lost
// with the caller. If the intent is no longer open, it stores nothing and returns errClosed. If another node may be the
// executor now, it stores nothing and returns an ErrUnavailable: the new executor repeats the call.
func (d *delivery) store(
	ctx context.Context, change func(registry.View) registry.Change, then ...registry.Decision,
) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), Grace)
	defer cancel()
	open := true
	decisions := append([]registry.Decision{func(view registry.View) (registry.Change, error) {
		if open = d.isOpen(view); !open {
			return registry.Change{}, d.errClosed()
		}
		if _, err := d.executor(view); err != nil {
			return registry.Change{}, err
		}
		return change(view), nil
	}}, then...)
	_, err := d.State.Commit(ctx, decisions...)
	if err != nil && open {
		return fmt.Errorf("store the outcome of %s of %s: %w", d.Intent.RPC, d.Intent.Name, err)
	}
	return err
}
