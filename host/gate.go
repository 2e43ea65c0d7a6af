package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/proto/wire"
	"holdfast/registry"
)

// gate passes calls to the active shim, and holds them while there is none. During a swap it first holds writes only.
type gate struct {
	mu         sync.Mutex // guards all below; held only to read or change it
	active     *shim      // nil: all calls are held
	writesHeld bool
	heldCalls  int           // calls that had to wait since writesHeld was last set
	why        error         // why calls are held
	closed     error         // set for good by shut
	changed    chan struct{} // closed and replaced at each change
}

func newGate() *gate { return &gate{changed: make(chan struct{})} }

// change runs f, which changes the gate, and lets all waiting calls decide again.
func (g *gate) change(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
	close(g.changed)
	g.changed = make(chan struct{})
}

// open sends all calls to a shim.
func (g *gate) open(p peer) {
	g.change(func() { g.active, g.writesHeld, g.why = p.(*shim), false, nil })
}

// holdWrites holds calls that change something, and begins to count those that wait.
func (g *gate) holdWrites() { g.change(func() { g.writesHeld, g.heldCalls = true, 0 }) }

// holdAll holds all calls.
func (g *gate) holdAll(why error) { g.change(func() { g.active, g.why = nil, why }) }

// shut fails all calls for good.
func (g *gate) shut(why error) { g.change(func() { g.active, g.closed = nil, why }) }

// countHeld returns how many calls had to wait since holdWrites.
func (g *gate) countHeld() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.heldCalls
}

// access says whether a call changes the state.
type access bool

const (
	reads  access = false
	writes access = true
)

var (
	errReplacing  = errors.New("the shim is being replaced")
	errHeld       = errors.New("the call was held as long as it may be")
	errUnanswered = errors.New("the active shim does not answer")
)

// gateDecision is the gate's decision about one call.
type gateDecision struct {
	shim    *shim         // nil: the call has to wait, or closed is set
	changed chan struct{} // closed when the gate changes, and may decide otherwise
	why     error         // why the call has to wait
	closed  error
}

// decide returns the shim that a call may go to, or why the call has to wait. The call does not go to avoid, the shim
// at which it was cut off, if any.
func (g *gate) decide(a access, avoid *shim) gateDecision {
	g.mu.Lock()
	defer g.mu.Unlock()
	d := gateDecision{changed: g.changed, why: g.why, closed: g.closed}
	switch {
	case g.active == nil || g.active == avoid: // the call has to wait
	case g.writesHeld && a == writes:
		d.why = errReplacing
	default:
		d.shim = g.active
	}
	return d
}

func (g *gate) countWaiting() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.heldCalls++
}

// retrySame is the pause before a call that was cut off at a shim is repeated at the same shim. If that shim is still
// active, only its connection broke.
const retrySame = 100 * time.Millisecond

// shimWait tracks how long a call waits for shims.
type shimWait struct {
	left time.Duration // how long it may still wait
	why  error         // why it waits, or waited until its time was up; nil: neither
}

// enter returns the active shim. If there is none for this call, enter waits for one until w.left is used up, ctx ends,
// or the gate is shut. If ctx ends when w.left is used up or a moment later, enter reports the end of ctx. For
// retrySame it does not return avoid, the shim at which the call was cut off: that shim is most likely dead.
func (g *gate) enter(ctx context.Context, a access, w *shimWait, avoid *shim) (*shim, error) {
	began := time.Now()
	defer func() { w.left -= time.Since(began) }()
	var limit, retry <-chan time.Time // nil: the call has not had to wait
	for {
		d := g.decide(a, avoid)
		switch {
		case d.closed != nil:
			return nil, d.closed
		case limit != nil && ctx.Err() != nil: // a call that need not wait finds the end of ctx by itself
			return nil, noShimError(w.why, context.Cause(ctx))
		case d.shim != nil:
			if !timeIsUp(ctx) {
				w.why = nil // a later timeout is not due to the wait
			}
			return d.shim, nil
		case limit == nil:
			g.countWaiting()
			limit, retry = time.After(w.left), time.After(retrySame)
		}
		w.why = cmp.Or(d.why, errUnanswered)
		select {
		case <-d.changed:
		case <-retry:
			avoid = nil
		case <-ctx.Done():
		case <-limit:
			if !timeIsUp(ctx) {
				return nil, noShimError(w.why, errHeld)
			}
			<-ctx.Done()
		}
	}
}

// timeoutError returns the error of a call that got no answer in time. It includes why no shim is active, or why the
// call was held until its time was up.
func (g *gate) timeoutError(w shimWait, end error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.active == nil && g.why != nil {
		w.why = g.why
	}
	if w.why == nil {
		return end
	}
	return noShimError(w.why, end)
}

// noShimError returns the error of a call that was held. end is what ended the wait, why the reason for the wait.
func noShimError(why, end error) error {
	text := "no shim is active (%w): %w"
	switch {
	case !errors.Is(end, context.DeadlineExceeded):
	case errors.Is(why, errReplacing):
		text = "held during a swap until its deadline: " + text
	default:
		text = "held until its deadline: " + text
	}
	return registry.Errorf(registry.ErrUnavailable, text, end, why)
}

// call makes a call at the active shim with a method of a generated client.
func call[Client, Request, Reply any](
	ctx context.Context, h *Host, a access, newClient func(grpc.ClientConnInterface) Client,
	method func(Client, context.Context, Request, ...grpc.CallOption) (Reply, error), req Request,
) (reply Reply, err error) {
	ctx, end := h.startSpan(ctx, a, req)
	defer func() { end(err) }()
	beforeTry := shortenWait(req)
	err = h.do(ctx, a, func(ctx context.Context, sh *shim) (err error) {
		beforeTry()
		reply, err = method(newClient(sh.process.Conn()), ctx, req)
		return err
	})
	return reply, err
}

// do makes a call at the active shim. If the shim dies during the call, do repeats the call at the next shim; if only
// the connection broke, at the same one. That is safe: reads change nothing, and writes carry an operation ID. A call
// waits for shims for at most MaxHold in all, so a call that kills every shim ends.
func (h *Host) do(ctx context.Context, a access, f func(ctx context.Context, sh *shim) error) error {
	wait := shimWait{left: h.config.MaxHold}
	var avoid *shim
	for {
		sh, err := h.gate.enter(ctx, a, &wait, avoid)
		if err != nil {
			return err
		}
		err = f(ctx, sh)
		switch {
		case !hasNoAnswer(err):
			return withDeadline(ctx, wire.Error(err))
		case noTimeLeft(ctx, err):
			<-ctx.Done()
			return h.gate.timeoutError(wait, context.Cause(ctx))
		}
		avoid = sh
	}
}

// endedByTime are the errors that a call may return because its caller's time is up.
var endedByTime = []error{registry.ErrUnavailable, registry.ErrUncertain, context.DeadlineExceeded}

// withDeadline adds to the error of a call that the caller's time is up, if it is.
func withDeadline(ctx context.Context, err error) error {
	if !slices.ContainsFunc(endedByTime, func(kind error) bool { return errors.Is(err, kind) }) || !timeIsUp(ctx) {
		return err
	}
	<-ctx.Done()
	if end := context.Cause(ctx); !errors.Is(err, end) {
		return fmt.Errorf("%w: %w", end, err)
	}
	return err
}

// timeIsUp reports whether the caller's time is up, or is in a moment: the shim has the same deadline and may notice it
// first.
func timeIsUp(ctx context.Context) bool {
	end, limited := ctx.Deadline()
	return ctx.Err() != nil || limited && time.Until(end) < 50*time.Millisecond
}

// noTimeLeft reports whether a call was cut off because its caller's time is up. If its shim has exited or is not
// active, the call still has a moment at the next one.
func noTimeLeft(ctx context.Context, err error) bool {
	return ctx.Err() != nil || timeIsUp(ctx) && status.Code(err) != codes.Unavailable
}

// hasNoAnswer reports whether err is that of a call without an answer: the transport failed, the shim died or is not
// active, or the time was up for the transport. An answer of the shim carries a detail.
func hasNoAnswer(err error) bool {
	st, is := status.FromError(err)
	noAnswer := []codes.Code{codes.Unavailable, codes.Canceled, codes.DeadlineExceeded}
	return is && len(st.Details()) == 0 && slices.Contains(noAnswer, st.Code())
}
