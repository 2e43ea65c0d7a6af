package rpc

import (
	"context"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

type volumeChanges struct {
	pb.UnimplementedVolumeChangesServer
	s *Server
}

func (v *volumeChanges) Update(ctx context.Context, req *pb.UpdateVolumeRequest) (*pb.UpdateVolumeReply, error) {
	done, at, err := change(ctx, v.s, "VolumeChanges.Update", req, withStoredAnswer(forSpec(req,
		func(ctx context.Context, a *Active, call registry.Call, s registry.VolumeSpec) (registry.VolumeUpdate, error) {
			return a.Volumes.Update(ctx, call, s, req.GetDryRun())
		})))
	reply := &pb.UpdateVolumeReply{Answer: at, Volume: volumeProto(done.Volume)}
	for _, c := range done.Changes {
		reply.Changes = append(reply.Changes, wire.FieldChangeProto(c))
	}
	return reply, err
}

func (v *volumeChanges) Adopt(ctx context.Context, req *pb.AdoptVolumeRequest) (*pb.AdoptVolumeReply, error) {
	volume, at, err := change(ctx, v.s, "VolumeChanges.Adopt", req, withStoredAnswer(forSpec(req,
		func(ctx context.Context, a *Active, _ registry.Call, spec registry.VolumeSpec) (registry.Volume, error) {
			return a.Volumes.Adopt(ctx, spec)
		})))
	return &pb.AdoptVolumeReply{Answer: at, Volume: volumeProto(volume)}, err
}

// ListAtPlugin asks a plugin. It changes nothing, and its answer is true only at that moment.
func (v *volumeChanges) ListAtPlugin(
	ctx context.Context, req *pb.ListVolumesAtPluginRequest,
) (*pb.ListVolumesAtPluginReply, error) {
	plugin, err := registry.ParsePluginID(req.GetPlugin())
	if err != nil {
		return nil, wire.Status(err)
	}
	list, at, err := query(ctx, v.s, req, func(ctx context.Context, a *Active) ([]registry.PluginVolume, error) {
		return a.Volumes.External(ctx, plugin)
	})
	if err != nil {
		return nil, err
	}
	reply := &pb.ListVolumesAtPluginReply{Answer: at}
	for _, one := range list {
		reply.Volumes = append(reply.Volumes, wire.PluginVolumeProto(one))
	}
	return reply, nil
}

func (v *volumeChanges) Modify(ctx context.Context, req *pb.ModifyVolumeRequest) (*pb.ModifyVolumeReply, error) {
	volume, at, err := change(ctx, v.s, "VolumeChanges.Modify", req, withStoredAnswer(
		func(ctx context.Context, a *Active, call registry.Call) (registry.Volume, error) {
			name, err := volumeName(req.GetName())
			if err != nil {
				return registry.Volume{}, err
			}
			return a.Volumes.Modify(ctx, call, name, req.GetMutableParameters())
		}))
	return &pb.ModifyVolumeReply{Answer: at, Volume: volumeProto(volume)}, err
}
