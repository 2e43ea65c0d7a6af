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

// If the shim releases the state while the intent of a call is stored, the call is not sent. Its intent stays open
// without a failure, so that the next shim sends the call without a commit.
func TestCallThatIsNotSentBecauseOfAReleaseStaysOpen(t *testing.T) {
	for _, further := range []bool{false, true} {
		log := registrytest.NewLog(time.Now)
		ctx, cancel := context.WithCancelCause(t.Context())
		last := stage(func(ctx context.Context) error {
			if ctx.Err() == nil {
				t.Error("it is sent")
			}
			return answer("CANCELLED", registry.OutcomeFailed)
		})
		last.Failed = func(registry.View, *registry.CallError, bool) registry.Change {
			t.Error("it has failed")
			return registry.Change{}
		}
		calls := []Call{last}
		if further {
			last.Intent.RPC = registry.NodePublishRPC
			calls = []Call{stage(func(context.Context) error { return nil }), last}
		}
		calls[len(calls)-1].Before = func(registry.View) (registry.Change, error) {
			cancel(ErrReleased)
			return registry.Change{}, nil
		}
		err := Sender{State: releasing{log}, Now: time.Now, Drain: DrainTime}.Send(ctx, calls...)
		open, found, _, events := look(t, log)
		if !errors.Is(err, ErrReleased) || Unsettled(err) == nil {
			t.Errorf("the caller takes the call for ended: %v", err)
		}
		if !found || open.RPC != last.Intent.RPC || len(events) > 0 {
			t.Errorf("%v; open intent %+v (%v), events %v", err, open, found, events)
		}
	}
}

// releasing is a State whose commits succeed even if their context ends meanwhile.
type releasing struct{ *registrytest.Log }

func (s releasing) Commit(ctx context.Context, decisions ...registry.Decision) (registry.Seq, error) {
	return s.Log.Commit(context.WithoutCancel(ctx), decisions...)
}
