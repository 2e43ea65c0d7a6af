package host

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// ShimStatus is what the active shim reports about itself.
type ShimStatus struct {
	Version     string
	PID         int
	Generation  uint64
	Index       Seq
	Schema      uint32 // of its store
	OpenIntents int    // CSI calls under way or of unknown outcome
	Instances   int
	Allocs      int
	SHA256      string // of its binary
	Protocol    int    // version agreed with this host
	// ClusterProblem says why changes of records that nodes share have to wait: since when etcd has not answered, or
	// why the node has not joined its cluster. Empty: such changes need not wait.
	ClusterProblem string
}

// Status asks the active shim for its status. ShimState needs no call.
func (h *Host) Status(ctx context.Context) (ShimStatus, error) {
	var reply *pb.StatusReply
	var from *shim
	err := h.do(ctx, reads, func(ctx context.Context, sh *shim) (err error) {
		from = sh
		reply, err = sh.control().Status(ctx, &pb.StatusRequest{Call: &pb.Call{}})
		if err == nil && reply.GetAnswer().GetGeneration() == 0 { // it has released the state
			return status.Error(codes.Unavailable, "this shim is not active")
		}
		return err
	})
	if err != nil {
		return ShimStatus{}, err
	}
	return ShimStatus{
		Version: reply.GetVersion(), PID: int(reply.GetPid()), Schema: reply.GetSchema(),
		Generation: reply.GetAnswer().GetGeneration(), Index: Seq(reply.GetAnswer().GetIndex()),
		OpenIntents: int(reply.GetOpenIntents()), Instances: int(reply.GetInstances()), Allocs: int(reply.GetAllocs()),
		SHA256: from.binary.SHA256, Protocol: from.process.Protocol(), ClusterProblem: reply.GetClusterProblem(),
	}, nil
}

// Doctor has the shim compare its records with the mount table, directories and plugins. Without repair it changes
// nothing, and returns the differences and the plan of a repair. With repair it carries out that plan. ErrConflict: the
// current plan does not have the given digest. An empty digest stands for any plan.
func (h *Host) Doctor(ctx context.Context, repair bool, digest string) (Diagnosis, error) {
	req, a := &pb.DoctorRequest{Call: &pb.Call{}, Repair: repair, Digest: digest}, reads
	if repair {
		req.Call, a = mutating(), writes
	}
	reply, err := call(ctx, h, a, pb.NewControlClient, pb.ControlClient.Doctor, req)
	return wire.Diagnosis(reply), err
}
