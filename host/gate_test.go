package host

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/proto/wire"
	"holdfast/registry"
)

// A call is held until its own deadline, even if a swap or MaxHold ends at that moment. If its deadline is later than
// MaxHold, it is held for MaxHold. The error says why no shim is active.
func TestHeldCallKeepsItsOwnDeadline(t *testing.T) {
	t.Parallel()
	const maxHold = time.Second
	damaged := registry.Errorf(registry.ErrDamaged, "shim.db is damaged")
	for name, c := range map[string]struct {
		why      error
		deadline time.Duration
		opens    time.Duration // when the next shim is active; 0: never
		took     time.Duration
		says     string // "": the call succeeds
	}{
		"no shim":               {damaged, maxHold / 2, 0, maxHold / 2, "held until its deadline: no shim is active"},
		"at the end of MaxHold": {damaged, maxHold, 0, maxHold, "held until its deadline: no shim is active"},
		"after MaxHold":         {damaged, 2 * maxHold, 0, maxHold, "no shim is active (" + errHeld.Error()},
		"at the end of a swap":  {errReplacing, maxHold / 2, maxHold / 2, maxHold / 2, "held during a swap"},
		"just after a swap": {errReplacing, maxHold / 2, maxHold / 2 * 99 / 100, maxHold / 2,
			"held during a swap"},
		"at the next shim":       {errReplacing, maxHold / 2, maxHold / 3, maxHold / 2, "context deadline exceeded"},
		"time for the next shim": {errReplacing, maxHold, maxHold / 4, maxHold / 2, ""},
	} {
		bubble(t, name, func(t *testing.T) {
			for range 20 { // timers that are due at once are handled in any order
				h := &Host{gate: newGate(), config: Config{MaxHold: maxHold}, closing: t.Context()}
				h.gate.holdAll(c.why)
				if c.opens > 0 {
					time.AfterFunc(c.opens, func() { h.gate.open(&shim{}) })
				}
				calls := map[string]func(ctx context.Context) error{"call": func(ctx context.Context) error {
					return h.do(ctx, writes, func(ctx context.Context, _ *shim) error {
						select {
						case <-time.After(maxHold / 4):
							return nil
						case <-ctx.Done():
							return status.FromContextError(ctx.Err()).Err()
						}
					})
				}}
				if c.opens == 0 {
					calls["watch"] = func(ctx context.Context) error {
						return h.Watch(ctx, WatchOptions{Past: true}, nil)
					}
				}
				for what, call := range calls {
					ctx, cancel := context.WithTimeout(t.Context(), c.deadline)
					began := time.Now()
					err := call(ctx)
					took := time.Since(began)
					cancel()
					switch {
					case took != c.took:
						t.Errorf("%s: held for %s", what, took)
					case c.says == "" && err == nil:
					case errors.Is(err, registry.ErrUnavailable) != strings.Contains(c.says, "held") ||
						errors.Is(err, c.why) != strings.Contains(c.says, "held") ||
						errors.Is(err, context.DeadlineExceeded) == (c.deadline > maxHold) ||
						!strings.HasPrefix(err.Error(), c.says):
						t.Errorf("%s: %v", what, err)
					}
				}
			}
		})
	}
}

// An error of the transport is no answer of the shim. An answer carries a detail.
func TestErrorOfTheTransportIsNoAnswer(t *testing.T) {
	t.Parallel()
	for _, code := range []codes.Code{codes.Unavailable, codes.Canceled, codes.DeadlineExceeded} {
		if !hasNoAnswer(status.Error(code, "stream terminated by RST_STREAM with error code: CANCEL")) {
			t.Errorf("%s of the transport is taken for an answer", code)
		}
	}
	for _, err := range []error{
		wire.Status(registry.Errorf(context.DeadlineExceeded, "it waits for plugin fake")),
		wire.Status(registry.Errorf(registry.ErrUnavailable, "no plugin")),
		status.Error(codes.InvalidArgument, "bad"), nil,
	} {
		if hasNoAnswer(err) {
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
		soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		busy := registry.Errorf(registry.ErrUnavailable, "the plugin is away")
		// A shim may notice the deadline first and cut the call off.
		cut := status.Error(codes.Canceled, "stream terminated by RST_STREAM")
		for _, c := range []struct {
			name string
			ctx  context.Context
			err  error
			want bool
		}{
			{"cut off, with no time left", soon, cut, true},
			{"late, with no time left", soon, status.Error(codes.DeadlineExceeded, ""), true},
			{"cut off, with time left", t.Context(), cut, false},
			{"an answer, with no time left", soon, wire.Status(registry.ErrConflict), false},
			{"no error", soon, nil, false},
		} {
			if got := endedByDeadline(c.ctx, c.err); got != c.want {
				t.Errorf("%s: %t", c.name, got)
			}
		}
		for _, kind := range []error{registry.ErrUnavailable, registry.ErrUncertain} {
			err := withDeadline(soon, registry.Errorf(kind, "commit under way"))
			if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, kind) || soon.Err() == nil {
				t.Errorf("with no time left: %v", err)
			}
		}
		if err := withDeadline(t.Context(), busy); err != busy {
			t.Errorf("with time left: %v", err)
		}
		if wrong := registry.Invalid("no"); withDeadline(soon, wrong) != wrong || withDeadline(soon, nil) != nil {
			t.Error("the deadline was added to ErrInvalid, or to no error")
		}
	})
}
