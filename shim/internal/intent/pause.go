package intent

import (
	"context"
	"errors"
	"sync"
	"time"

	"holdfast/registry"
)

// Pause delays new CSI calls that change something while the shim is quiesced. A call waits until the pause or its
// context ends. Its context ends when the shim releases the state, and the next shim then makes the call. The zero
// value is not paused.
type Pause struct {
	mu     sync.Mutex                                  // guards all fields below; held only briefly
	ended  chan struct{}                               // closed when the pause ends; nil: there is none
	notify func(op registry.OperationID, waiting bool) // set by Notify; may be nil
}

// Begin begins the pause. It does nothing if the pause has begun.
func (p *Pause) Begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended == nil {
		p.ended = make(chan struct{})
	}
}

// End ends the pause and lets waiting calls begin.
func (p *Pause) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended != nil {
		close(p.ended)
		p.ended = nil
	}
}

// Notify sets the function that is called when a call of an operation begins to wait for the end of a pause, and after
// the wait. It replaces an earlier function.
func (p *Pause) Notify(f func(op registry.OperationID, waiting bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.notify = f
}

// current returns a channel that is closed when the pause ends, and the function that Notify has set, or one that does
// nothing. If there is no pause, the channel is nil.
func (p *Pause) current() (ended <-chan struct{}, notify func(registry.OperationID, bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if notify = p.notify; notify == nil {
		notify = func(registry.OperationID, bool) {}
	}
	return p.ended, notify
}

// paused reports whether there is a pause now. A nil *Pause is never paused.
func (p *Pause) paused() bool {
	if p == nil {
		return false
	}
	ended, _ := p.current()
	return ended != nil
}

// Wait waits until there is no pause. If ctx ends first, it returns the cause. A nil *Pause is never paused.
func (p *Pause) Wait(ctx context.Context, op registry.OperationID) error {
	for p != nil && ctx.Err() == nil {
		ended, notify := p.current()
		if ended == nil {
			break
		}
		notify(op, true)
		select {
		case <-ended:
		case <-ctx.Done():
		}
		notify(op, false)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// DrainTime is the Sender.Drain of an active shim. When the shim releases the state, a call may still run until this
// long after its start. A short call thus completes, and the next shim need not repeat it.
const DrainTime = 10 * time.Millisecond

// ErrReleased is the cause, or part of the cause, of a context that ends because its shim releases the state.
var ErrReleased = errors.New("this shim is not active any more")

// Released reports whether ctx has ended because its shim releases the state. If so, nothing needs to be stored,
// because the next shim repeats the calls of all open intents.
func Released(ctx context.Context) bool {
	return ctx.Err() != nil && errors.Is(context.Cause(ctx), ErrReleased)
}

// callContext returns a context for a call that begins now. It ends with ctx, or after limit. If ctx ends with
// ErrReleased, the call may still use the rest of its drain time.
func callContext(ctx context.Context, drain, limit time.Duration) (context.Context, context.CancelFunc) {
	if ctx.Err() != nil {
		return context.WithCancel(ctx)
	}
	began := time.Now()
	call, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		why := context.Cause(ctx)
		switch {
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			return // the call has the same deadline, so it need not be cancelled
		case !errors.Is(why, ErrReleased):
			cancel(why)
			return
		}
		time.AfterFunc(drain-time.Since(began), func() { cancel(why) })
	})
	until := began.Add(limit)
	if end, has := ctx.Deadline(); has && end.Before(until) {
		until = end
	}
	limited, done := context.WithDeadline(call, until)
	return limited, func() { stop(); cancel(nil); done() }
}
