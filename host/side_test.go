package host

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/proto/wire"
	"holdfast/registry"
)

// A shim whose clock is the first to see that the time is up, and cuts the call off, was late and has refused nothing.
func TestCallsCutOffByTheShimsClockAreLate(t *testing.T) {
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	later, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	cut, late := status.Error(codes.Canceled, "stream terminated by RST_STREAM"), status.Error(codes.DeadlineExceeded, "")
	for _, c := range []struct {
		what string
		ctx  context.Context
		err  error
		want bool
	}{
		{"cut off, with no time left", soon, cut, true},
		{"late, with no time left", soon, late, true},
		{"cut off, with time", later, cut, false},
		{"an answer, with no time left", soon, wire.Status(registry.ErrConflict), false},
		{"no error", soon, nil, false},
	} {
		if got := overdue(c.ctx, c.err); got != c.want {
			t.Errorf("%s: %t", c.what, got)
		}
	}
}
