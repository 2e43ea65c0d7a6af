package rpc

import (
	"cmp"
	"context"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// maxOperator bounds the name of an operator, in bytes.
const maxOperator = 256

func checkOperator(by string) error {
	if by == "" || len(by) > maxOperator {
		return registry.Invalid("the operator's name has %d bytes; 1 to %d are allowed", len(by), maxOperator)
	}
	return nil
}

func (s *allocs) ForceRelease(ctx context.Context, req *pb.ForceReleaseRequest) (*pb.ForceReleaseReply, error) {
	id, err := registry.ParseAllocID(req.GetAlloc())
	if err != nil {
		return nil, wire.Status(err)
	}
	indexOf := func(v registry.View) registry.Seq {
		al, _ := v.Alloc(id)
		return al.CreateIndex
	}
	steps, at, err := force(ctx, s.s, "Allocs.ForceRelease", req, indexOf,
		func(ctx context.Context, a *Active, _ registry.Call, f registry.Force) ([]registry.ReleaseStep, error) {
			return a.Allocs.ForceRelease(ctx, id, f)
		})
	return &pb.ForceReleaseReply{Answer: at, Steps: steps}, err
}

func (c *claims) ForceRelease(
	ctx context.Context, req *pb.ForceReleaseClaimRequest,
) (*pb.ForceReleaseClaimReply, error) {
	name, err := volumeName(req.GetName())
	id, badAlloc := registry.ParseAllocID(req.GetAlloc())
	if err = cmp.Or(err, badAlloc); err != nil {
		return nil, wire.Status(err)
	}
	indexOf := func(v registry.View) (last registry.Seq) {
		for _, claim := range v.ClaimsOf(id) {
			if claim.Name == name {
				last = claim.CreateIndex
			}
		}
		return last
	}
	steps, at, err := force(ctx, c.s, "Claims.ForceRelease", req, indexOf,
		func(ctx context.Context, a *Active, _ registry.Call, f registry.Force) ([]registry.ReleaseStep, error) {
			return a.Allocs.ForceReleaseClaims(ctx, name, id, f)
		})
	return &pb.ForceReleaseClaimReply{Answer: at, Steps: steps}, err
}

// Detach passes the last attachment to runRemoval. The attachments are detached in order, so the last one exists until
// all are detached.
func (v *volumes) Detach(ctx context.Context, req *pb.DetachVolumeRequest) (*pb.DetachVolumeReply, error) {
	name, err := volumeName(req.GetName())
	node := registry.NodeName(req.GetNode())
	if err == nil {
		err = checkOptional(node, registry.ParseNodeName)
	}
	if err != nil {
		return nil, wire.Status(err)
	}
	indexOf := func(view registry.View) (last registry.Seq) {
		for _, at := range view.AllAttachments() {
			if at.Name == name && (node == "" || at.Node == node) {
				last = at.CreateIndex
			}
		}
		return last
	}
	steps, at, err := force(ctx, v.s, "Volumes.Detach", req, indexOf,
		func(ctx context.Context, a *Active, call registry.Call, f registry.Force) ([]registry.ReleaseStep, error) {
			return a.Volumes.DetachVolume(ctx, call, name, node, f)
		})
	return &pb.DetachVolumeReply{Answer: at, Steps: steps}, err
}

// force runs an operation that removes records by force, and returns its steps. A replay of a finished call returns no
// steps. A dry run stores nothing.
func force(
	ctx context.Context, s *Server, method string, req interface {
		request
		GetForce() *pb.Force
	}, indexOf createIndexFunc,
	run func(context.Context, *Active, registry.Call, registry.Force) ([]registry.ReleaseStep, error),
) (steps []*pb.ReleaseStep, at *pb.Answer, err error) {
	f := wire.Force(req.GetForce())
	if len(f.By) > maxOperator {
		return nil, nil, wire.Status(registry.Invalid("the operator's name has %d bytes; %d are allowed", len(f.By),
			maxOperator))
	}
	at, err = do(ctx, s, method, req, func(ctx context.Context, a *Active, call registry.Call) error {
		carryOut := func() error {
			done, err := run(ctx, a, call, f)
			for _, step := range done {
				steps = append(steps, wire.ReleaseStepProto(step))
			}
			return err
		}
		if f.DryRun {
			return carryOut()
		}
		return runRemoval(ctx, a, call, indexOf, carryOut)
	})
	return steps, at, err
}
