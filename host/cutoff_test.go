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

// What the transport says of a call is nobody's answer: with a deadline that was over in the shim's clock first, it tells of a stream that was
// terminated, and whoever called is told that the time is up.
func TestTransportDoesNotAnswer(t *testing.T) {
	for _, code := range []codes.Code{codes.Unavailable, codes.Canceled, codes.DeadlineExceeded} {
		if !cutOff(status.Error(code, "stream terminated by RST_STREAM with error code: CANCEL")) {
			t.Errorf("%s of the transport is taken for an answer", code)
		}
	}
	for _, err := range []error{
		wire.Status(registry.Errorf(context.DeadlineExceeded, "it waits for plugin fake")), wire.Status(registry.Errorf(registry.ErrUnavailable, "no plugin")),
		status.Error(codes.InvalidArgument, "bad"), nil,
	} {
		if cutOff(err) {
			t.Errorf("an answer is taken for none: %v", err)
		}
	}
}

// A call that was cut off because its shim is active no more is made at the next one, however little time it has left; one whose time was up at the shim
// is not made again.
func TestLittleTimeIsForTheNextShim(t *testing.T) {
	for code, again := range map[codes.Code]bool{codes.Unavailable: true, codes.Canceled: false, codes.DeadlineExceeded: false} {
		for _, k := range []kind{reads, writes} {
			synctest.Test(t, func(t *testing.T) {
				h := &Host{gate: newGate(), config: Config{MaxHold: time.Minute}}
				old, fresh := &shim{}, &shim{}
				h.gate.open(old)
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				answered := false
				err := h.make(ctx, k, func(_ context.Context, sh *shim) error {
					if sh == fresh {
						answered = true
						return nil
					}
					time.Sleep(60 * time.Millisecond)
					h.gate.close(errQuiet)
					time.AfterFunc(20*time.Millisecond, func() { h.gate.open(fresh) })
					return status.Error(code, "the shim is not active")
				})
				if answered != again || again && err != nil || !again && (!errors.Is(err, context.DeadlineExceeded) || ctx.Err() == nil) {
					t.Errorf("%s: made again: %t; %v", code, answered, err)
				}
			})
		}
	}
}
