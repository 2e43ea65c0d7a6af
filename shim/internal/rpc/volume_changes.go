package rpc

import (
	"context"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

type volumeChanges struct {
	pb.UnimplementedVolumeChangesServer
	s *Server
}

func (v *volumeChanges) Modify(ctx context.Context, req *pb.ModifyVolumeRequest) (*pb.ModifyVolumeReply, error) {
	volume, at, err := change(ctx, v.s, "VolumeChanges.Modify", req, answered(
		func(ctx context.Context, a *Active, call registry.Call) (registry.Volume, error) {
			name, err := volumeName(req.GetName())
			if err != nil {
				return registry.Volume{}, err
			}
			return a.Volumes.Modify(ctx, call, name, req.GetMutableParameters())
		}))
	return &pb.ModifyVolumeReply{Answer: at, Volume: volumeProto(volume)}, err
}
