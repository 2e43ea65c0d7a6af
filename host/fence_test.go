package host

import (
	"context"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "holdfast/proto/holdfast/v1"
)

// Config.Fence gets the node, and the time that the shim gives it.
func TestFenceIsCalledForTheShim(t *testing.T) {
	t.Parallel()
	h := &Host{}
	ask := &pb.CallbackRequest{Id: 7, Deadline: durationpb.New(time.Hour),
		Ask: &pb.CallbackRequest_Fence{Fence: &pb.AskFence{Node: "lost"}}}
	if reply := h.answer(t.Context(), ask); reply.GetKind() != pb.ErrorKind_ERROR_KIND_UNSUPPORTED {
		t.Errorf("a host without the function: %v", reply)
	}
	h.config.Fence = func(ctx context.Context, node string) error {
		if end, _ := ctx.Deadline(); node != "lost" || time.Until(end) < time.Minute {
			t.Errorf("fence %q until %s", node, end)
		}
		return nil
	}
	if reply := h.answer(t.Context(), ask); reply.GetError() != "" || reply.GetId() != 7 {
		t.Errorf("the shim gets %v", reply)
	}
}
