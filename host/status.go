package host

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "holdfast/proto/holdfast/v1"
)

// ShimStatus is what the active shim says of itself.
type ShimStatus struct {
	Version     string
	PID         int
	Generation  uint64
	Index       Seq
	Schema      uint32 // of its store
	OpenIntents int    // CSI calls that are under way, or whose outcome is not known
	Instances   int
	Allocs      int
	SHA256      string // of its binary
	Protocol    int    // that it and this host have agreed on
}

// Status asks the active shim what it is.
func (h *Host) Status(ctx context.Context) (ShimStatus, error) {
	var reply *pb.StatusReply
	var of *shim
	err := h.make(ctx, reads, func(ctx context.Context, sh *shim) (err error) {
		of = sh
		reply, err = sh.control().Status(ctx, &pb.StatusRequest{Call: &pb.Call{}})
		if err == nil && reply.GetAnswer().GetGeneration() == 0 { // it has let the state go
			return status.Error(codes.Unavailable, "this shim is not active")
		}
		return err
	})
	if err != nil {
		return ShimStatus{}, err
	}
	return ShimStatus{
		Version: reply.GetVersion(), PID: int(reply.GetPid()), Generation: reply.GetAnswer().GetGeneration(), Index: Seq(reply.GetAnswer().GetIndex()),
		Schema: reply.GetSchema(), OpenIntents: int(reply.GetOpenIntents()), Instances: int(reply.GetInstances()), Allocs: int(reply.GetAllocs()),
		SHA256: of.binary.SHA256, Protocol: of.process.Protocol(),
	}, nil
}
