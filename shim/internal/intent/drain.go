package intent

import (
	"context"
	"errors"
	"time"
)

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
