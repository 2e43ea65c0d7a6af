package intent

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// A call that is short ends though its shim lets go of the state meanwhile, and what became of it is recorded. One that is long is called off, and so is
// any for which nobody waits any more; none is begun after that.
func TestShortCallsEnd(t *testing.T) {
	const takes, later = Linger / 2, Linger / 5
	for name, c := range map[string]struct {
		takes time.Duration
		why   error
		ends  time.Duration // after its beginning
		done  bool
	}{
		"a short one, and the shim lets go": {takes, registry.Errorf(registry.ErrUnavailable, "%w", ErrLetGo), takes, true},
		"a long one, and the shim lets go":  {time.Hour, registry.Errorf(registry.ErrUnavailable, "%w", ErrLetGo), Linger, false},
		"a short one, and its caller goes":  {takes, context.Canceled, later, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
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
				err := Drive(ctx, log, time.Now, call)
				if took := time.Since(began); (err == nil) != c.done || took != c.ends || sent != 1 {
					t.Errorf("sent %d times, it ended after %s with %v", sent, took, err)
				}
				if _, open, mark, _ := look(t, log); open == c.done || (mark == registry.MarkDone) != c.done {
					t.Errorf("its intent is open: %t, and its mark %q", open, mark)
				}
				if err := Drive(ctx, log, time.Now, call); err == nil || sent != 1 || !errors.Is(err, context.Cause(ctx)) {
					t.Errorf("a further call: sent %d times, %v", sent, err)
				}
			})
		})
	}
}

// A call's own deadline holds while it lingers.
func TestLingeringKeepsTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		call, done := lingering(ctx)
		defer done()
		want, _ := ctx.Deadline()
		if end, has := call.Deadline(); !has || !end.Equal(want) {
			t.Errorf("it ends at %v, not %v", end, want)
		}
		<-call.Done()
		if !errors.Is(call.Err(), context.DeadlineExceeded) {
			t.Errorf("it ended with %v", call.Err())
		}
	})
}
