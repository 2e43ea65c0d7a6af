package rpc

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// Doctor examines, which changes nothing, or repairs, which is a mutating call.
func (c *control) Doctor(ctx context.Context, req *pb.DoctorRequest) (*pb.DoctorReply, error) {
	if req.GetRepair() {
		return c.repair(ctx, req)
	}
	found, at, err := query(ctx, c.s, req, func(ctx context.Context, a *Active) (registry.Diagnosis, error) {
		if a.Doctor == nil {
			return registry.Diagnosis{}, errNoDoctor
		}
		return a.Doctor.Examine(ctx)
	})
	if err != nil {
		return nil, err
	}
	return diagnosis(found, at), nil
}

var errNoDoctor = registry.Errorf(registry.ErrUnsupported,
	"this shim cannot compare its records with this node: use a newer one")

// repair stores no answer: the same again does what is still to be done, or says that the plan is another one.
func (c *control) repair(ctx context.Context, req *pb.DoctorRequest) (*pb.DoctorReply, error) {
	found, err := mutate(ctx, c.s, "Control.Doctor", req,
		func(ctx context.Context, a *Active, _ registry.Call) (registry.Diagnosis, error) {
			if a.Doctor == nil {
				return registry.Diagnosis{}, errNoDoctor
			}
			return a.Doctor.Repair(ctx, req.GetDigest())
		})
	if err != nil {
		return nil, wire.Status(err)
	}
	return diagnosis(found, c.s.answerOrLatest(ctx, nil)), nil
}

// diagnosis is what was found, as far as it fits into one message; the rest is counted.
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
