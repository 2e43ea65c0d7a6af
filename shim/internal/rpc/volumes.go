package rpc

import (
	"context"
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
	reply := &pb.ParseVolumeReply{Answer: v.s.orLatest(ctx, nil), Diagnostics: wire.DiagnosticsProto(diags)}
	if diags.Err() == nil && spec != nil {
		reply.Spec = wire.VolumeSpecProto(*spec)
	}
	return reply, nil
}

func (v *volumes) Create(ctx context.Context, req *pb.CreateVolumeRequest) (*pb.CreateVolumeReply, error) {
	spec, err := checked(wire.VolumeSpec(req.GetSpec()))
	if err != nil {
		return nil, wire.Status(err)
	}
	vol, err := once(ctx, v.s, "Volumes.Create", req, func(ctx context.Context, a *Active, call registry.Call) (registry.Volume, error) {
		return a.Volumes.Create(ctx, call, spec)
	})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.CreateVolumeReply{Answer: v.s.orLatest(ctx, nil), Volume: wire.VolumeProto(registry.VolumeStatus{Volume: vol})}, nil
}

func (v *volumes) Register(ctx context.Context, req *pb.RegisterVolumeRequest) (*pb.RegisterVolumeReply, error) {
	spec, err := checked(wire.VolumeSpec(req.GetSpec()))
	if err != nil {
		return nil, wire.Status(err)
	}
	vol, err := once(ctx, v.s, "Volumes.Register", req, func(ctx context.Context, a *Active, call registry.Call) (registry.Volume, error) {
		return a.Volumes.Register(ctx, call, spec)
	})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.RegisterVolumeReply{Answer: v.s.orLatest(ctx, nil), Volume: wire.VolumeProto(registry.VolumeStatus{Volume: vol})}, nil
}

func (v *volumes) Delete(ctx context.Context, req *pb.DeleteVolumeRequest) (*pb.DeleteVolumeReply, error) {
	name, err := volumeName(req.GetName())
	if err != nil {
		return nil, wire.Status(err)
	}
	_, err = once(ctx, v.s, "Volumes.Delete", req, func(ctx context.Context, a *Active, call registry.Call) (struct{}, error) {
		return struct{}{}, a.Volumes.Delete(ctx, call, name)
	})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.DeleteVolumeReply{Answer: v.s.orLatest(ctx, nil)}, nil
}

func (v *volumes) Deregister(ctx context.Context, req *pb.DeregisterVolumeRequest) (*pb.DeregisterVolumeReply, error) {
	name, err := volumeName(req.GetName())
	if err != nil {
		return nil, wire.Status(err)
	}
	_, err = once(ctx, v.s, "Volumes.Deregister", req, func(ctx context.Context, a *Active, call registry.Call) (struct{}, error) {
		return struct{}{}, a.Volumes.Deregister(ctx, call, name)
	})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.DeregisterVolumeReply{Answer: v.s.orLatest(ctx, nil)}, nil
}

func (v *volumes) Expand(ctx context.Context, req *pb.ExpandVolumeRequest) (*pb.ExpandVolumeReply, error) {
	name, err := volumeName(req.GetName())
	if err != nil {
		return nil, wire.Status(err)
	}
	want := registry.CapacityRange{Required: req.GetRequiredBytes(), Limit: req.GetLimitBytes()}
	vol, err := once(ctx, v.s, "Volumes.Expand", req, func(ctx context.Context, a *Active, call registry.Call) (registry.Volume, error) {
		return a.Volumes.Expand(ctx, call, name, want)
	})
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.ExpandVolumeReply{Answer: v.s.orLatest(ctx, nil), Volume: wire.VolumeProto(registry.VolumeStatus{Volume: vol})}, nil
}

func (v *volumes) List(ctx context.Context, req *pb.ListVolumesRequest) (*pb.ListVolumesReply, error) {
	a, err := v.s.now(req)
	if err != nil {
		return nil, err
	}
	if err := filters(req.GetNamespace(), req.GetId(), "", req.GetPlugin()); err != nil {
		return nil, wire.Status(err)
	}
	var only registry.VolumeName
	if req.GetNamespace() != "" && req.GetId() != "" {
		only = registry.VolumeName{Namespace: registry.Namespace(req.GetNamespace()), ID: registry.VolumeID(req.GetId())}
	}
	list, at, err := a.Allocs.Volumes(ctx, only)
	if err != nil {
		return nil, a.status(ctx, err)
	}
	list = slices.DeleteFunc(list, func(s registry.VolumeStatus) bool {
		return req.GetNamespace() != "" && string(s.Namespace) != req.GetNamespace() ||
			req.GetId() != "" && string(s.ID) != req.GetId() || req.GetPlugin() != "" && string(s.Plugin) != req.GetPlugin()
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
	usage, at, err := look(ctx, v.s, req, func(ctx context.Context, a *Active) ([]registry.VolumeUsage, error) {
		if a.Meter == nil {
			return nil, registry.Errorf(registry.ErrUnsupported, "this shim cannot say how full a volume is: use a newer one")
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
	a, err := c.s.now(req)
	if err != nil {
		return nil, err
	}
	list, at, err := a.Allocs.Claims(ctx)
	if err != nil {
		return nil, a.status(ctx, err)
	}
	list = slices.DeleteFunc(list, func(cl registry.Claim) bool {
		return req.GetVolume() != nil && cl.Name != wire.VolumeName(req.GetVolume()) || req.GetAlloc() != "" && string(cl.Alloc) != req.GetAlloc()
	})
	part, next, err := paged(list, req.GetPage(), func(cl registry.Claim) string { return cl.Key().Path }, wire.ClaimProto)
	if err != nil {
		return nil, wire.Status(err)
	}
	return &pb.ListClaimsReply{Answer: a.answer(at), Claims: part, NextToken: next}, nil
}
