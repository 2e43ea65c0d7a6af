package intent

import (
	"context"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"holdfast/internal/tracing"
	"holdfast/registry"
)

// Grace bounds storing the outcome of a call, which continues after its caller is gone. It also bounds Call.Renew.
const Grace = 5 * time.Second

// Sender sends CSI calls that change something.
type Sender struct {
	State registry.State
	Now   func() time.Time // wall time, for people
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

// OpenCall returns the open call that must have an outcome before next is sent, unless next repeats or undoes it. Calls
// on this node, and calls that attach the volume to another node or detach it there, do not wait for each other.
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

// Executes returns nil if this node may make the controller calls of a plugin. Otherwise it returns an ErrUnavailable
// that names the node that may make them.
func (s Sender) Executes(view registry.View, by registry.ExecutorKey) error {
	if s.Executors == nil {
		return nil
	}
	_, err := s.Executors.Check(view, by)
	return err
}

// Send sends calls for one volume, one after the other. It opens the intent of each call, sends the call, retries it by
// its policy, and stores its outcome. The outcome of a call and the intent of the next one are one commit. Send stops
// retrying when ctx ends or RetryUntil has passed. It returns nil when all calls are done and their outcomes are
// stored. After an error, the calls after the failed one were not sent. If the error is not ErrUncertain, the failed
// call does not run. With s.Late, Send only repeats the first call, once.
func (s Sender) Send(ctx context.Context, calls ...Call) (err error) {
	if s.Late != nil {
		return s.repeatLate(ctx, calls[0])
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
	return done.explain(done.store(ctx, done.doneChange, then...))
}

// deliver sends one call until it is done. If there is a call before it, deliver opens the intent in the commit that
// stores the outcome of that call. The caller of deliver stores the outcome of d.
func (s Sender) deliver(ctx context.Context, c Call, before *delivery) (d *delivery, err error) {
	ctx, end := s.startSpan(ctx, c.Intent)
	defer func() { end(err) }()
	if ctx.Err() != nil {
		if before != nil {
			if err := before.store(ctx, before.doneChange); err != nil {
				return nil, err
			}
		}
		return nil, fmt.Errorf("%s of %s was not sent: %w", c.Intent.RPC, c.Intent.Name, context.Cause(ctx))
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

// Once makes one call without an intent. As for Send, the call has a deadline. Before Once, the caller must have stored
// what the call may do. by is the executor that has to send the call; zero: any node may.
func (s Sender) Once(
	ctx context.Context, by registry.ExecutorKey, deadline time.Duration, do func(context.Context) error,
) error {
	ctx, end := callContext(ctx, s.Drain, deadline)
	defer end()
	return s.callAsExecutor(ctx, by, do)
}

// callAsExecutor calls do, which sends a call that only the executor by may send; zero: any node may. If another node
// may be the executor now, it returns an ErrUnavailable instead.
func (s Sender) callAsExecutor(ctx context.Context, by registry.ExecutorKey, do func(context.Context) error) error {
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

// repeatLate is Repeat for s.Late. It returns an ErrConflict if c is not that call.
func (s Sender) repeatLate(ctx context.Context, c Call) error {
	if c.Intent.RPC != s.Late.RPC || c.Intent.Hash != s.Late.Hash {
		return registry.Errorf(registry.ErrConflict, "%s of %s cannot be repeated: its volume has changed",
			s.Late.RPC, s.Late.For)
	}
	return s.Repeat(ctx, c.Intent.Volume.Plugin, *s.Late, c.Do)
}

// Repeat repeats once a call that this node has begun as a former executor. It returns nil if the plugin's answer shows
// that the call has ended there. A repeated call continues where the first one was (CSI spec, "Timeouts").
func (s Sender) Repeat(
	ctx context.Context, plugin registry.PluginID, late registry.LateCall, do func(context.Context) error,
) error {
	if s.Executors != nil {
		if err := s.Executors.Repeating(ctx, plugin, late); err != nil {
			return err
		}
	}
	ctx, end := callContext(ctx, s.Drain, PolicyOf(late.RPC).Deadline)
	defer end()
	err := callError(late.RPC, do(ctx))
	if err == nil || EndsCall(err) {
		return nil
	}
	return err
}

// startSpan begins the span of a call. A call without a waiting caller, such as one that was open when this shim became
// active, begins a new trace. Its attribute Operation is that of the caller's trace.
func (s Sender) startSpan(ctx context.Context, i registry.Intent) (_ context.Context, end func(error)) {
	if s.Traces == nil {
		return ctx, func(error) {}
	}
	ctx, span := s.Traces.Tracer(tracing.Scope).Start(ctx, string(i.RPC), trace.WithAttributes(
		tracing.Plugin.String(string(i.Volume.Plugin)), tracing.Volume.String(i.Name.String()),
		tracing.Operation.String(string(i.Operation))))
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}
