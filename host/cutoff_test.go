package host

import (
	"context"
	"testing"

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
