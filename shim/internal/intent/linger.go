package intent

import (
	"context"
	"errors"
	"time"
)

// Linger is how long a call has from its beginning, though its shim lets go of the state meanwhile: one that is short ends, and is not made twice; one
// that is long is called off, and made again by the next shim.
const Linger = 10 * time.Millisecond

// ErrLetGo is, or is in, the cause of a context that ends because its shim lets go of the state.
var ErrLetGo = errors.New("this shim is not active any more")

// LetGo says whether ctx has ended because its shim lets go of the state. Calls of it that were called off are made again by the next shim, which
// finds their intents as they are: nothing needs to be stored of that, and whoever waits for this shim to let go waits less.
func LetGo(ctx context.Context) bool {
	return ctx.Err() != nil && errors.Is(context.Cause(ctx), ErrLetGo)
}

// lingering is ctx for a call that begins now. It ends with ctx, but not before Linger if ctx ends for ErrLetGo.
func lingering(ctx context.Context) (context.Context, context.CancelFunc) {
	if ctx.Err() != nil {
		return context.WithCancel(ctx)
	}
	began := time.Now()
	call, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		why := context.Cause(ctx)
		switch {
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			return // the call has the same deadline, and ends of that rather than of being called off
		case !errors.Is(why, ErrLetGo):
			cancel(why)
			return
		}
		time.AfterFunc(Linger-time.Since(began), func() { cancel(why) })
	})
	end, has := ctx.Deadline()
	if !has {
		return call, func() { stop(); cancel(nil) }
	}
	limited, done := context.WithDeadline(call, end)
	return limited, func() { stop(); cancel(nil); done() }
}
