package rpc

import (
	"context"
	"errors"
	"slices"

	"holdfast/config"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

type volumes struct {
	pb.UnimplementedVolumesServer
	s *Server
}

func (v *volumes) Parse(ctx context.Context, req *pb.ParseVolumeRequest) (*pb.ParseVolumeReply, error) {
	opts := v.s.options(ctx, req.GetVariables(), req.GetVariableFiles(), req.GetValidate())
	spec, diags := config.ParseVolume(source(req.GetSource()), opts)
	reply := &pb.ParseVolumeReply{Answer: v.s.answerOrLatest(ctx, nil), Diagnostics: wire.DiagnosticsProto(diags)}
	if diags.Err() == nil && spec != nil {
		reply.Spec = wire.VolumeSpecProto(*spec)
	}
	return reply, nil
}

func (v *volumes) Create(ctx context.Context, req *pb.CreateVolumeRequest) (*pb.CreateVolumeReply, error) {
	spec, err := checkSpec(wire.VolumeSpec(req.GetSpec()))
	if err != nil {
		return nil, wire.Status(err)
	}
	vol, err := mutate(ctx, v.s, "Volumes.Create", req,
		func(ctx context.Context, a *Active, call registry.Call) (registry.Volume, error) {
			return answered(ctx, a, call, func() (registry.Volume, error) { return a.Volumes.Create(ctx, call, spec) })
		})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.CreateVolumeReply{Answer: v.s.answerOrLatest(ctx, nil),
		Volume: wire.VolumeProto(registry.VolumeStatus{Volume: vol})}, nil
}

func (v *volumes) Register(ctx context.Context, req *pb.RegisterVolumeRequest) (*pb.RegisterVolumeReply, error) {
	spec, err := checkSpec(wire.VolumeSpec(req.GetSpec()))
	if err != nil {
		return nil, wire.Status(err)
	}
	vol, err := mutate(ctx, v.s, "Volumes.Register", req,
		func(ctx context.Context, a *Active, call registry.Call) (registry.Volume, error) {
			return answered(ctx, a, call, func() (registry.Volume, error) { return a.Volumes.Register(ctx, spec) })
		})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.RegisterVolumeReply{Answer: v.s.answerOrLatest(ctx, nil),
		Volume: wire.VolumeProto(registry.VolumeStatus{Volume: vol})}, nil
}

func (v *volumes) Delete(ctx context.Context, req *pb.DeleteVolumeRequest) (*pb.DeleteVolumeReply, error) {
	name, err := volumeName(req.GetName())
	if err != nil {
		return nil, wire.Status(err)
	}
	_, err = mutate(ctx, v.s, "Volumes.Delete", req,
		func(ctx context.Context, a *Active, call registry.Call) (struct{}, error) {
			return removed(ctx, a, call, name, func() error { return a.Volumes.Delete(ctx, call, name) })
		})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.DeleteVolumeReply{Answer: v.s.answerOrLatest(ctx, nil)}, nil
}

func (v *volumes) Deregister(ctx context.Context, req *pb.DeregisterVolumeRequest) (*pb.DeregisterVolumeReply, error) {
	name, err := volumeName(req.GetName())
	if err != nil {
		return nil, wire.Status(err)
	}
	_, err = mutate(ctx, v.s, "Volumes.Deregister", req,
		func(ctx context.Context, a *Active, call registry.Call) (struct{}, error) {
			return removed(ctx, a, call, name, func() error { return a.Volumes.Deregister(ctx, name) })
		})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.DeregisterVolumeReply{Answer: v.s.answerOrLatest(ctx, nil)}, nil
}

func (v *volumes) Expand(ctx context.Context, req *pb.ExpandVolumeRequest) (*pb.ExpandVolumeReply, error) {
	name, err := volumeName(req.GetName())
	if err != nil {
		return nil, wire.Status(err)
	}
	want := registry.CapacityRange{Required: req.GetRequiredBytes(), Limit: req.GetLimitBytes()}
	vol, err := mutate(ctx, v.s, "Volumes.Expand", req,
		func(ctx context.Context, a *Active, call registry.Call) (registry.Volume, error) {
			return answered(ctx, a, call, func() (registry.Volume, error) {
				return a.Volumes.Expand(ctx, call, name, want)
			})
		})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.ExpandVolumeReply{Answer: v.s.answerOrLatest(ctx, nil),
		Volume: wire.VolumeProto(registry.VolumeStatus{Volume: vol})}, nil
}

// answered runs a use case that changes records that nodes share, and stores its answer, which is a record of this
// node. After a death between the two, a replay finds the volume as it was asked for and gets the same answer.
func answered[T any](ctx context.Context, a *Active, call registry.Call, run func() (T, error)) (T, error) {
	answer, err := run()
	if err == nil {
		err = a.store(ctx, call.Answered(answer))
	}
	return answer, err
}

// removed is answered for a use case that removes a volume. A record says before that the operation has begun to remove
// this volume. After a death, a replay that does not find the volume any more is done. Without that record, it would
// fail, as a call for an unknown volume does.
func removed(
	ctx context.Context, a *Active, call registry.Call, name registry.VolumeName, run func() error,
) (struct{}, error) {
	var begun registry.Operation
	var replay bool
	var created registry.Seq // 0: there is no such volume
	err := a.State.View(ctx, func(v registry.View) error {
		volume, _ := v.Volume(name)
		created = volume.CreateIndex
		begun, replay = v.Operation(call.ID)
		return nil
	})
	if err == nil && !replay && created > 0 {
		begun = registry.Operation{ID: call.ID, Method: call.Method, Digest: call.Digest, Removes: created}
		err = a.store(ctx, []registry.Record{begun})
	}
	if err != nil {
		return struct{}{}, err
	}
	if !replay || created == begun.Removes {
		err = run()
	}
	if created > 0 && errors.Is(err, registry.ErrNotFound) && a.removed(ctx, name, created) {
		err = nil // it was removed in the background while this call waited
	}
	if err == nil {
		err = a.store(ctx, call.Answered(struct{}{}))
	}
	return struct{}{}, err
}

// removed reports whether the volume that was created at an index is gone.
func (a *Active) removed(ctx context.Context, name registry.VolumeName, created registry.Seq) (gone bool) {
	err := a.State.View(ctx, func(v registry.View) error {
		volume, _ := v.Volume(name)
		gone = volume.CreateIndex != created
		return nil
	})
	return err == nil && gone
}

// store commits records of this node.
func (a *Active) store(ctx context.Context, records []registry.Record) error {
	if len(records) == 0 {
		return nil
	}
	_, err := a.State.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Put: records}, nil
	})
	return err
}

func (v *volumes) List(ctx context.Context, req *pb.ListVolumesRequest) (*pb.ListVolumesReply, error) {
	a, err := v.s.activeFor(req)
	if err != nil {
		return nil, err
	}
	if err := filters(req.GetNamespace(), req.GetId(), "", req.GetPlugin()); err != nil {
		return nil, wire.Status(err)
	}
	var only registry.VolumeName
	if req.GetNamespace() != "" && req.GetId() != "" {
		only = registry.VolumeName{Namespace: registry.Namespace(req.GetNamespace()),
			ID: registry.VolumeID(req.GetId())}
	}
	list, at, err := a.Allocs.Volumes(ctx, only)
	if err != nil {
		return nil, a.status(ctx, err)
	}
	list = slices.DeleteFunc(list, func(s registry.VolumeStatus) bool {
		return req.GetNamespace() != "" && string(s.Namespace) != req.GetNamespace() ||
			req.GetId() != "" && string(s.ID) != req.GetId() || req.GetPlugin() != "" &&
			string(s.Plugin) != req.GetPlugin()
	})
	key := func(s registry.VolumeStatus) string { return s.Volume.Key().Path }
	part, next, err := paged(list, req.GetPage(), key, wire.VolumeProto)
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.ListVolumesReply{Answer: a.answer(at), Volumes: part, NextToken: next}, nil
}

// Stats asks a plugin. It changes nothing, and its answer is of the moment.
func (v *volumes) Stats(ctx context.Context, req *pb.VolumeStatsRequest) (*pb.VolumeStatsReply, error) {
	name, err := volumeName(req.GetName())
	if err != nil {
		return nil, wire.Status(err)
	}
	usage, at, err := query(ctx, v.s, req, func(ctx context.Context, a *Active) ([]registry.VolumeUsage, error) {
		if a.Meter == nil {
			return nil, registry.Errorf(registry.ErrUnsupported,
				"this shim cannot say how full a volume is: use a newer one")
		}
		return a.Meter.Stats(ctx, name)
	})
	if err != nil {
		return nil, err
	}
	reply := &pb.VolumeStatsReply{Answer: at}
	for _, u := range usage {
		reply.Usage = append(reply.Usage, wire.VolumeUsageProto(u))
	}
	return reply, nil
}

type claims struct {
	pb.UnimplementedClaimsServer
	s *Server
}

func (c *claims) List(ctx context.Context, req *pb.ListClaimsRequest) (*pb.ListClaimsReply, error) {
	a, err := c.s.activeFor(req)
	if err != nil {
		return nil, err
	}
	list, at, err := a.Allocs.Claims(ctx)
	if err != nil {
		return nil, a.status(ctx, err)
	}
	list = slices.DeleteFunc(list, func(cl registry.Claim) bool {
		return req.GetVolume() != nil && cl.Name != wire.VolumeName(req.GetVolume()) || req.GetAlloc() != "" &&
			string(cl.Alloc) != req.GetAlloc()
	})
	part, next, err := paged(list, req.GetPage(), func(cl registry.Claim) string {
		return cl.Key().Path
	}, wire.ClaimProto)
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.ListClaimsReply{Answer: a.answer(at), Claims: part, NextToken: next}, nil
}
