package intent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"

	"holdfast/registry"
)

// Grace bounds two things after the caller of a call is gone: storing the outcome, and Call.Renew.
const Grace = 5 * time.Second

// A failed try is stored if the next try begins later than recordNew (for a new answer) or recordAlways (for any). An
// operator would not see a shorter wait.
const (
	recordNew    = 100 * time.Millisecond
	recordAlways = 500 * time.Millisecond
)

// Sender sends CSI calls that change something.
type Sender struct {
	State registry.State
	Now   func() time.Time // wall time, for people
	Pause *Pause           // no call begins during a pause; nil: never paused
	Drain time.Duration    // how long a call may run from its start, if the shim releases the state

	Traces trace.TracerProvider // for a span of each call, with all its tries; nil: no spans
	// Executors says which controller calls this node may send. If it is nil, this node may send all, as it is the only
	// one.
	Executors Executors
	Node      registry.NodeName // this node, if other nodes use the same volumes; otherwise empty
	// Late is set to repeat one call that this node has begun as a former executor. Then Send stores nothing. It
	// returns nil once an answer of the plugin shows that the call has ended there.
	Late *registry.LateCall
}

// OpenCall returns the open call that must have an outcome before next is sent, unless next repeats or undoes it. A
// call that attaches a volume to one node does not wait for calls on another node, and the reverse.
func (s Sender) OpenCall(v registry.View, next registry.Intent) (registry.Intent, bool) {
	elsewhere := func(id registry.NodeID) bool {
		at, found := v.Attachment(registry.AttachmentKey{Volume: next.Volume, Node: s.Node})
		return s.Node != "" && id != "" && (!found || at.NodeID != id)
	}
	if open, found := v.Intent(next.Volume); found && !(next.RPC.OnNode() && elsewhere(open.Node)) {
		return open, true
	}
	if elsewhere(next.Node) {
		return registry.Intent{}, false
	}
	return v.NodeIntent(next.Volume)
}

// Executors knows which node makes the controller calls of each plugin. A node may lose this role at any time.
type Executors interface {
	// Check returns the plugin's executor if it is this node, for a decision that begins a call. Otherwise it returns
	// an ErrUnavailable that names the executor. If the plugin has controller_scope = "node" and this node makes the
	// calls, the executor is zero.
	Check(registry.View, registry.ExecutorKey) (registry.Executor, error)
	// Sending is called directly before a call is sent, and done after the call. It returns an ErrUnavailable if
	// another node may be the executor now.
	Sending(context.Context, registry.ExecutorKey) (done func(), err error)
	// OneInstance reports whether this node has exactly one controller instance of the plugin. Only then does an answer
	// show that the call has ended on this node.
	OneInstance(registry.PluginID) bool
	// Repeating is called directly before this node repeats a call as a former executor. It returns an error if the
	// call must not be sent any more.
	Repeating(context.Context, registry.PluginID, registry.LateCall) error
}

// Send sends calls for one volume, one after the other. It opens the intent of each call, sends the call, retries it by
// its policy, and stores its outcome. The outcome of a call and the intent of the next one are one commit. Send stops
// retrying when ctx ends or RetryUntil has passed. It returns nil when all calls are done and their outcomes are
// stored. After an error, the calls after the failed one were not sent. If the error is not ErrUncertain, the failed
// call does not run.
func (s Sender) Send(ctx context.Context, calls ...Call) (err error) {
	if s.Late != nil {
		return s.repeat(ctx, calls[0])
	}
	var done *delivery // the call whose outcome is not stored yet
	for _, c := range calls {
		if done, err = s.deliver(ctx, c, done); err != nil {
			return c.explain(err)
		}
	}
	if done == nil {
		return nil
	}
	var then []registry.Decision
	for _, decide := range done.Then {
		then = append(then, func(view registry.View) (registry.Change, error) {
			change, err := decide(view)
			if err != nil {
				change = registry.Change{}
			}
			return change, nil
		})
	}
	return done.explain(done.store(ctx, done.done, then...))
}

// deliver sends one call until it is done. If there is a call before it, deliver opens the intent in the commit that
// stores the outcome of that call. It leaves its own outcome to be stored.
func (s Sender) deliver(ctx context.Context, c Call, before *delivery) (d *delivery, err error) {
	ctx, end := s.startSpan(ctx, c.Intent)
	defer func() { end(err) }()
	if before == nil || ctx.Err() != nil || s.Pause.paused() { // otherwise, a pause begins after this call
		if before != nil { // store the outcome first, as this call may have to wait
			if err := before.store(ctx, before.done); err != nil {
				return nil, err
			}
			before = nil
		}
		if err := s.Pause.Wait(ctx, c.Intent.Operation); err != nil {
			return nil, fmt.Errorf("%s of %s was not sent: %w", c.Intent.RPC, c.Intent.Name, err)
		}
	}
	if c.Policy.Deadline == 0 {
		c.Policy = PolicyOf(c.Intent.RPC)
	}
	d = &delivery{Sender: s, Call: c}
	if err := d.open(ctx, before); err != nil {
		return nil, err
	}
	return d, d.retry(ctx)
}

// retry sends the call until it is done.
func (d *delivery) retry(ctx context.Context) error {
	answers := map[string]int{} // how often each code was answered
	for first := true; ; first = false {
		if !first {
			d.renew(ctx)
			if !d.stillOpen(ctx) {
				return d.forgotten()
			}
		}
		err := d.try(ctx)
		if err == nil {
			return nil
		}
		row := d.Policy.Row(err.Code)
		answers[err.Code]++
		if ctx.Err() != nil || answers[err.Code] >= row.Tries {
			return d.giveUp(ctx, err)
		}
		delay := d.delay(err.Code)
		if !d.RetryUntil.IsZero() && time.Now().Add(delay).After(d.RetryUntil) {
			return d.giveUp(ctx, err)
		}
		if delay >= recordAlways || delay >= recordNew && !d.reported(err) {
			if failed := d.keepOpen(ctx, err, d.Now().Add(delay)); failed != nil {
				return errors.Join(err, failed)
			}
		}
		if !Sleep(ctx, delay) || d.Pause.Wait(ctx, d.Intent.Operation) != nil {
			return d.giveUp(ctx, err)
		}
		d.Intent.Attempt++
	}
}

// Once makes one call without an intent. As for Send, the call does not begin during a pause and has a deadline. Before
// Once, the caller must have stored what the call may do. by is the executor that has to send the call; zero: any node
// may.
func (s Sender) Once(
	ctx context.Context, op registry.OperationID, by registry.ExecutorKey, deadline time.Duration,
	do func(context.Context) error,
) error {
	if err := s.Pause.Wait(ctx, op); err != nil {
		return err
	}
	ctx, end := drained(ctx, s.Drain, deadline)
	defer end()
	return s.executed(ctx, by, do)
}

// executed makes a call that only the executor by may send; zero: any node may.
func (s Sender) executed(ctx context.Context, by registry.ExecutorKey, do func(context.Context) error) error {
	if s.Executors == nil || by.Plugin == "" {
		return do(ctx)
	}
	done, err := s.Executors.Sending(ctx, by)
	if err != nil {
		return err
	}
	defer done()
	return do(ctx)
}

// delivery is one of the calls that Send sends.
type delivery struct {
	Sender
	Call
	doubt  bool // an earlier try, or the call that this one undoes, had no certain answer
	repeat bool // this call repeats or undoes an earlier one that may still run at the plugin
	by     registry.ExecutorKey
	sender registry.NodeName // the executor that sends the call; empty: it needs none
}

// open stores the intent, together with the outcome of the call before. Without a call before, it joins an intent that
// is stored already.
func (d *delivery) open(ctx context.Context, before *delivery) error {
	if before == nil {
		if joined, err := d.join(ctx); joined || err != nil {
			return err
		}
		_, err := d.State.Commit(ctx, d.opening)
		return err
	}
	var refused error
	err := before.store(ctx, before.done, func(view registry.View) (change registry.Change, err error) {
		change, refused = d.opening(view)
		return change, refused
	})
	if refused != nil && errors.Is(err, refused) {
		return refused
	}
	return err
}

// opening returns the change that opens the intent.
func (d *delivery) opening(view registry.View) (change registry.Change, err error) {
	next := d.Intent
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
		if err := LegalFor(executor, open, next); err != nil {
			return registry.Change{}, err
		}
		next.Senders = WithSender(open.Senders, executor.Holder)
		d.doubt, d.repeat = true, MayRun(open)
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
		joined, d.doubt, d.repeat = true, true, MayRun(open)
		d.Intent, d.sender = open, executor.Holder
		d.Intent.Attempt++
		return nil
	})
	return joined, err
}

// executor returns the executor of the call's plugin, which is this node. It is zero if any node may send the call.
func (d *delivery) executor(view registry.View) (registry.Executor, error) {
	if d.Executors == nil || d.Intent.RPC.OnNode() {
		return registry.Executor{}, nil
	}
	v, _ := view.Volume(d.Intent.Name)
	d.by = registry.ExecutorKey{Plugin: d.Intent.Volume.Plugin, Node: v.Node}
	return d.Executors.Check(view, d.by)
}

// requested returns open with only the fields that a caller of Send sets. If at is zero, the caller does not know the
// instance, and At is zero too.
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

// try sends the call once. It returns nil if the call is done.
func (d *delivery) try(ctx context.Context) *registry.CallError {
	ctx, end := drained(ctx, d.Drain, d.Policy.Deadline)
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
	if at != d.Intent.At || len(WithSender(d.Intent.Senders, d.sender)) > len(d.Intent.Senders) {
		if err := d.storeTry(ctx, at); err != nil {
			return err
		}
	}
	return d.executed(ctx, d.by, func(ctx context.Context) error {
		if err := d.checkSend(ctx); err != nil {
			return err
		}
		return d.Do(ctx)
	})
}

// retryDivisor divides the time that a call has run at a plugin. The quotient is the wait before the call is repeated,
// and so bounds how late the end of the call is noticed.
const retryDivisor = 3

// delay returns the wait after a try with the code. After ABORTED for an earlier call that still runs, the first wait
// is short, because most calls are short. Later waits grow with the time that the call has run.
func (d *delivery) delay(code string) time.Duration {
	if d.repeat && code == "ABORTED" {
		wait := min(max(2*DrainTime, d.Now().Sub(d.Intent.Since)/retryDivisor), d.Policy.Backoff.Max)
		return Backoff{First: wait, Max: wait}.Delay(1, rand.Float64())
	}
	return d.Policy.Backoff.Delay(d.Intent.Attempt, rand.Float64())
}

func (d *delivery) renew(ctx context.Context) {
	if d.Renew == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, Grace)
	defer cancel()
	d.Renew(ctx)
}

// stillOpen reports whether the intent that this run opened is still open. If the state cannot be read, it returns
// true.
func (d *delivery) stillOpen(ctx context.Context) (open bool) {
	err := d.State.View(ctx, func(view registry.View) error {
		open = d.owns(view)
		return nil
	})
	return open || err != nil
}

func (d *delivery) owns(view registry.View) bool {
	open, found := d.OpenCall(view, d.Intent)
	return found && repeats(open, d.Intent) && open.Name == d.Intent.Name && open.Since.Equal(d.Intent.Since)
}

// forgotten returns the error of a call whose intent another operation has closed.
func (d *delivery) forgotten() error {
	return registry.Errorf(registry.ErrConflict, "%s of %s was running when its record was closed, as by a "+
		"deregistration: the call is not sent again, and what it may have done is not recorded",
		d.Intent.RPC, d.Intent.Name)
}

// done returns the change that closes the intent of a call that is done.
func (d *delivery) done(view registry.View) registry.Change {
	change := registry.Change{Delete: []registry.Key{d.Intent.Key()}}.And(d.ended(view, false))
	if d.Done != nil {
		change = change.And(d.Done(view))
	}
	return change
}

// giveUp stores the last error and returns it with advice. It closes the intent of a failed call. The intent of an
// uncertain call stays open.
func (d *delivery) giveUp(ctx context.Context, err *registry.CallError) error {
	var failed error
	err.Attempt = d.Intent.Attempt
	with := advised{err, d.Policy.Row(err.Code).Advice}
	switch {
	case err.Outcome == registry.OutcomeFailed:
		failed = d.store(ctx, func(view registry.View) registry.Change {
			change := registry.Change{Delete: []registry.Key{d.Intent.Key()}, Events: d.failure(err)}
			change = change.And(d.ended(view, true))
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
		failed = d.keepOpen(ctx, err, next)
	}
	if ctx.Err() != nil {
		return errors.Join(fmt.Errorf("%w (given up: %w)", with, context.Cause(ctx)), failed)
	}
	return errors.Join(with, failed)
}

// advised is a call's error with advice for an operator.
type advised struct {
	*registry.CallError
	advice string
}

func (e advised) Error() string { return e.CallError.Error() + "; " + e.advice }
func (e advised) Unwrap() error { return e.CallError }

// keepOpen stores that the call has no certain answer, and when the next try is.
func (d *delivery) keepOpen(ctx context.Context, err *registry.CallError, next time.Time) error {
	events := d.failure(err)
	d.Intent.Outcome, d.Intent.Code, d.Intent.Detail, d.Intent.Next = err.Outcome, err.Code, err.Detail, next
	return d.store(ctx, func(view registry.View) registry.Change {
		open, _ := d.OpenCall(view, d.Intent)
		if d.Intent.Senders = open.Senders; d.sender != "" && Ends(err) && d.Executors.OneInstance(d.by.Plugin) {
			d.Intent.Senders = WithoutSender(open.Senders, d.sender)
		}
		return registry.Change{Put: []registry.Record{d.Intent}, Events: events}
	})
}

// failure returns the event of a failed try. There is none if the last try failed in the same way.
func (d *delivery) failure(err *registry.CallError) []registry.Event {
	if d.reported(err) {
		return nil
	}
	e := Event(registry.EventStepFailed, d.Intent, d.Now())
	e.Detail = err.Code + ": " + err.Detail
	if err.Code == "" {
		e.Detail = "no answer: " + err.Detail
	}
	return []registry.Event{e}
}

// reported reports whether the intent already records this failure.
func (d *delivery) reported(err *registry.CallError) bool {
	return d.Intent.Outcome == err.Outcome && d.Intent.Code == err.Code
}

// store commits the change and further decisions. It does so even if ctx has ended, so that the outcome is not lost
// with the caller. If the intent is no longer open, it stores nothing. If another node may be the executor now, it
// stores nothing either, because the new executor repeats the call.
func (d *delivery) store(
	ctx context.Context, change func(registry.View) registry.Change, then ...registry.Decision,
) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), Grace)
	defer cancel()
	owns := true
	decisions := append([]registry.Decision{func(view registry.View) (registry.Change, error) {
		if owns = d.owns(view); !owns {
			return registry.Change{}, d.forgotten()
		}
		if _, err := d.executor(view); err != nil {
			return registry.Change{}, err
		}
		return change(view), nil
	}}, then...)
	_, err := d.State.Commit(ctx, decisions...)
	if err != nil && owns {
		return fmt.Errorf("store the outcome of %s of %s: %w", d.Intent.RPC, d.Intent.Name, err)
	}
	return err
}
