package launch

import (
	"context"

	"holdfast/internal/priority"
)

// unhurriedKey is the context's key of Unhurried.
type unhurriedKey struct{}

// Unhurried is ctx for Add and Stored where nobody waits for the binary: they leave most of the processor to others, and take longer for that, by a
// millisecond for each 256 KiB.
func Unhurried(ctx context.Context) context.Context {
	return context.WithValue(ctx, unhurriedKey{}, true)
}

// pause is the rest after a bite, where there is to be one.
func pause(ctx context.Context) error {
	if ctx.Value(unhurriedKey{}) == nil {
		return nil
	}
	return priority.Rest(ctx)
}
