package host

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/proto/wire"
	"holdfast/registry"
)

// An error of the transport is no answer of the shim. An answer carries a detail.
func TestErrorOfTheTransportIsNoAnswer(t *testing.T) {
	t.Parallel()
	for _, code := range []codes.Code{codes.Unavailable, codes.Canceled, codes.DeadlineExceeded} {
		if !cutOff(status.Error(code, "stream terminated by RST_STREAM with error code: CANCEL")) {
			t.Errorf("%s of the transport is taken for an answer", code)
		}
	}
	for _, err := range []error{
		wire.Status(registry.Errorf(context.DeadlineExceeded, "it waits for plugin fake")),
		wire.Status(registry.Errorf(registry.ErrUnavailable, "no plugin")),
		status.Error(codes.InvalidArgument, "bad"), nil,
	} {
		if cutOff(err) {
			t.Errorf("an answer is not taken for one: %v", err)
		}
	}
}

// A call that was cut off because its shim is not active any more is repeated at the next one, however little time is
// left. A call whose time was up is not repeated.
func TestCutOffCallIsRepeatedWhateverTimeIsLeft(t *testing.T) {
	t.Parallel()
	for code, repeated := range map[codes.Code]bool{codes.Unavailable: true, codes.Canceled: false,
		codes.DeadlineExceeded: false} {
		for _, a := range []access{reads, writes} {
			synctest.Test(t, func(t *testing.T) {
				h := &Host{gate: newGate(), config: Config{MaxHold: time.Minute}}
				old, next := &shim{}, &shim{}
				h.gate.open(old)
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				answered := false
				err := h.do(ctx, a, func(_ context.Context, sh *shim) error {
					if sh == next {
						answered = true
						return nil
					}
					time.Sleep(60 * time.Millisecond)
					h.gate.holdAll(errReplacing)
					time.AfterFunc(20*time.Millisecond, func() { h.gate.open(next) })
					return status.Error(code, "the shim is not active")
				})
				timeUp := errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil
				if answered != repeated || repeated && err != nil || !repeated && !timeUp {
					t.Errorf("%s: repeated: %t; %v", code, answered, err)
				}
			})
		}
	}
}

func TestErrorSaysThatTheCallersTimeIsUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		busy := registry.Errorf(registry.ErrUnavailable, "the plugin is away")
		begun := registry.Errorf(registry.ErrUncertain, "commit under way")
		for kind, why := range map[error]error{registry.ErrUnavailable: busy, registry.ErrUncertain: begun} {
			err := withDeadline(ctx, why)
			if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, kind) || ctx.Err() == nil {
				t.Errorf("with no time left: %v", err)
			}
		}
		if err := withDeadline(t.Context(), busy); err != busy {
			t.Errorf("with time left: %v", err)
		}
		if err := withDeadline(ctx, nil); err != nil {
			t.Errorf("no error: %v", err)
		}
		if wrong := registry.Invalid("no"); withDeadline(ctx, wrong) != wrong {
			t.Error("the deadline was added to ErrInvalid")
		}
	})
}

// A shim may notice a deadline first and cut the call off: it was too late then, and has refused nothing.
func TestCallCutOffAtItsDeadlineWasTooLate(t *testing.T) {
	t.Parallel()
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	later, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	cut := status.Error(codes.Canceled, "stream terminated by RST_STREAM")
	late := status.Error(codes.DeadlineExceeded, "")
	for _, c := range []struct {
		name string
		ctx  context.Context
		err  error
		want bool
	}{
		{"cut off, with no time left", soon, cut, true},
		{"late, with no time left", soon, late, true},
		{"cut off, with time left", later, cut, false},
		{"an answer, with no time left", soon, wire.Status(registry.ErrConflict), false},
		{"no error", soon, nil, false},
	} {
		if got := endedByDeadline(c.ctx, c.err); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}
