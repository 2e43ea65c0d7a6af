package intent

import (
	"context"
	"time"
)

// roundKey is the context's key of the end of a round, a time.Time.
type roundKey struct{}

// Round is ctx in which nothing is waited for longer than limit, and no further try of a call is begun after it. A call that is under way is
// not cut off: it has a deadline of its own.
func Round(ctx context.Context, limit time.Duration) context.Context {
	return context.WithValue(ctx, roundKey{}, time.Now().Add(limit))
}

// Waiting is ctx for a wait: it ends with the round, if there is one.
func Waiting(ctx context.Context) (context.Context, context.CancelFunc) {
	if end, is := ctx.Value(roundKey{}).(time.Time); is {
		return context.WithDeadline(ctx, end)
	}
	return context.WithCancel(ctx)
}

// over says whether a try after delay would be one after the round.
func over(ctx context.Context, delay time.Duration) bool {
	end, is := ctx.Value(roundKey{}).(time.Time)
	return is && time.Now().Add(delay).After(end)
}
