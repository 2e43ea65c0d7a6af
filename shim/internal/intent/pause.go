package intent

import (
	"context"
	"errors"
	"sync"
	"time"

	"holdfast/registry"
)

// Pause keeps CSI calls that change something from beginning while the shim is quiesced. A call that would begin waits
// until the pause ends or its context ends; the latter comes first when the shim releases the state. The next shim then
// continues. The zero value is not paused.
type Pause struct {
	mu     sync.Mutex    // guards all below; held for no longer than a look-up
	ended  chan struct{} // closed when the pause ends; nil: there is none
	notify func(op registry.OperationID, waiting bool)
}

// Begin begins the pause, unless it has begun.
func (p *Pause) Begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended == nil {
		p.ended = make(chan struct{})
	}
}

// End ends the pause. Calls that wait begin.
func (p *Pause) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended != nil {
		close(p.ended)
		p.ended = nil
	}
}

// Notify has f called when a call for an operation begins to wait for the end of a pause, and when it has waited.
func (p *Pause) Notify(f func(op registry.OperationID, waiting bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.notify = f
}

// current returns the channel that is closed when the pause ends, nil if there is none, and what Notify has set.
func (p *Pause) current() (ended <-chan struct{}, notify func(registry.OperationID, bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if notify = p.notify; notify == nil {
		notify = func(registry.OperationID, bool) {}
	}
	return p.ended, notify
}

// wait returns nil when there is no pause, or the cause of ctx's end. A nil *Pause is never paused.
func (p *Pause) wait(ctx context.Context, op registry.OperationID) error {
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

// DrainTime is the Drain of an active shim: a short call ends, and is not made twice.
const DrainTime = 10 * time.Millisecond

// ErrReleased is, or is in, the cause of a context that ends because its shim releases the state.
var ErrReleased = errors.New("this shim is not active any more")

// Released reports whether ctx has ended because its shim releases the state. The next shim finds the intents of its
// calls and makes these again, so nothing needs to be stored of them.
func Released(ctx context.Context) bool {
	return ctx.Err() != nil && errors.Is(context.Cause(ctx), ErrReleased)
}

// drained returns a context for a call that begins now. It ends with ctx, but if ctx ends for ErrReleased, not before
// the call has had the time given.
func drained(ctx context.Context, drain time.Duration) (context.Context, context.CancelFunc) {
	if ctx.Err() != nil {
		return context.WithCancel(ctx)
	}
	began := time.Now()
	call, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		why := context.Cause(ctx)
		switch {
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			return // the call has the same deadline, and ends by that rather than by being cancelled
		case !errors.Is(why, ErrReleased):
			cancel(why)
			return
		}
		time.AfterFunc(drain-time.Since(began), func() { cancel(why) })
	})
	end, has := ctx.Deadline()
	if !has {
		return call, func() { stop(); cancel(nil) }
	}
	limited, done := context.WithDeadline(call, end)
	return limited, func() { stop(); cancel(nil); done() }
}
