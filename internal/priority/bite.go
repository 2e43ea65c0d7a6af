package priority

import (
	"context"
	"time"
)

// Bite is how much is read, hashed or written at a time, in bytes, where others have calls under way: a quarter of a millisecond's work, and then
// a Rest. Whoever wants a processor waits for a bite at most, and needs no privilege for that. A thread of low priority would be worse than one of
// the usual: while it waits for a processor in the middle of a bite, its process's next collection of garbage waits for it, and with that all calls.
const Bite = 256 << 10

// Rest lets others have the processor for a millisecond, unless ctx ends.
func Rest(ctx context.Context) error {
	select {
	case <-time.After(time.Millisecond):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
