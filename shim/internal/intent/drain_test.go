package intent

import (
	"context"
	"errors"
	"testing"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// If the shim releases the state during a call, a short call ends and its outcome is stored. A long call is cancelled,
// and so is a call whose caller has gone. No call begins after that.
func TestShortCallsEndAfterARelease(t *testing.T) {
	const takes, later = DrainTime / 2, DrainTime / 5
	for name, c := range map[string]struct {
		takes time.Duration
		why   error
		ends  time.Duration // how long the call lasts
		done  bool
	}{
		"a short one, and the shim releases the state": {takes,
			registry.Errorf(registry.ErrUnavailable, "%w", ErrReleased), takes, true},
		"a long one, and the shim releases the state": {time.Hour,
			registry.Errorf(registry.ErrUnavailable, "%w", ErrReleased), DrainTime, false},
		"a short one, and its caller goes": {takes, context.Canceled, later, false},
	} {
		runInBubble(t, name, func(t *testing.T) {
			log := registrytest.NewLog(time.Now)
			ctx, cancel := context.WithCancelCause(t.Context())
			began, sent := time.Now(), 0
			time.AfterFunc(later, func() { cancel(c.why) })
			call := stage(func(ctx context.Context) error {
				sent++
				select {
				case <-time.After(c.takes):
					return nil
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			})
			err := send(ctx, log, call)
			if took := time.Since(began); (err == nil) != c.done || took != c.ends || sent != 1 {
				t.Errorf("sent %d times, it ended after %s with %v", sent, took, err)
			}
			if _, open, mark, _ := look(t, log); open == c.done || (mark == registry.MarkDone) != c.done {
				t.Errorf("its intent is open: %t, and its mark %q", open, mark)
			}
			if err := send(ctx, log, call); err == nil || sent != 1 || !errors.Is(err, context.Cause(ctx)) {
				t.Errorf("a further call: sent %d times, %v", sent, err)
			}
		})
	}
}
