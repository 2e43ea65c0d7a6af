package rpc

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// Doctor examines, or repairs. Examining changes nothing; a repair is a mutating call. A repair stores no answer: a
// replay either finishes the repair, or returns ErrConflict because the plan has changed.
func (c *control) Doctor(ctx context.Context, req *pb.DoctorRequest) (*pb.DoctorReply, error) {
	var found registry.Diagnosis
	var at *pb.Answer
	var err error
	if req.GetRepair() {
		found, at, err = change(ctx, c.s, "Control.Doctor", req,
			func(ctx context.Context, a *Active, _ registry.Call) (registry.Diagnosis, error) {
				return a.Doctor.Repair(ctx, req.GetDigest())
			})
	} else {
		found, at, err = query(ctx, c.s, req, func(ctx context.Context, a *Active) (registry.Diagnosis, error) {
			return a.Doctor.Examine(ctx)
		})
	}
	return diagnosis(found, at), err
}

// diagnosis returns the findings that fit into one message, and the number of the others.
func diagnosis(d registry.Diagnosis, at *pb.Answer) *pb.DoctorReply {
	reply := wire.DiagnosisProto(d)
	reply.Answer = at
	bytes := 0
	for i, f := range reply.Findings {
		if bytes += proto.Size(f); bytes > pageBytes {
			reply.Findings = append(reply.Findings[:i], &pb.Finding{
				Kind:   string(registry.FoundUnseen),
				Detail: fmt.Sprintf("%d more findings do not fit into one answer", len(d.Findings)-i),
				Advice: "repair the findings listed, then run holdfast doctor again",
			})
			break
		}
	}
	return reply
}
