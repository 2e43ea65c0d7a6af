package host

import (
	"context"

	"google.golang.org/grpc"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// Doctor has the shim compare its records with mount table, directories and plugins, and says what differs and what repair would do; that
// changes nothing. With repair it does exactly that, if the plan is still the one that digest names (ErrConflict: it is not); without a
// digest, whatever the plan is by then.
func (h *Host) Doctor(ctx context.Context, repair bool, digest string) (Diagnosis, error) {
	req := &pb.DoctorRequest{Call: &pb.Call{}, Repair: repair, Digest: digest}
	makes := h.read
	if repair {
		req.Call.OperationId, makes = newOperation(), h.call
	}
	var reply *pb.DoctorReply
	err := makes(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		reply, err = pb.NewControlClient(conn).Doctor(ctx, req)
		return err
	})
	if err != nil {
		return Diagnosis{}, err
	}
	return wire.Diagnosis(reply), nil
}
