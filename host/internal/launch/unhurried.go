package launch

import (
	"context"
	"time"
)

// What is read while others have calls under way is read in bites, with a rest after each. Whoever wants a processor then waits for a bite at most,
// and needs no privilege for that. A thread of low priority would be worse than one of the usual: while it waits for a processor in the middle of a
// bite, this process's next collection of garbage waits for it, and with that all calls.
const (
	bite = 256 << 10 // a quarter of a millisecond's work
	rest = time.Millisecond
)

// unhurriedKey is the context's key of Unhurried.
type unhurriedKey struct{}

// Unhurried is ctx for Add and Stored where nobody waits for the binary: they leave most of the processor to others, and take longer for that, by a
// millisecond for each 256 KiB.
func Unhurried(ctx context.Context) context.Context {
	return context.WithValue(ctx, unhurriedKey{}, true)
}

// pause is the rest after a bite, where there is to be one.
func pause(ctx context.Context) {
	if ctx.Value(unhurriedKey{}) == nil {
		return
	}
	select {
	case <-time.After(rest):
	case <-ctx.Done():
	}
}
