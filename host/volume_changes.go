package host

import (
	"context"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// ModifyVolume gives mutable parameters of a volume other values. Parameters that are not in parameters stay as they
// are. If the outcome of an earlier modification is not known (Volume.Modification), its parameters are sent too.
// ErrUnsupported: the plugin has no mutable parameters. ErrInvalid: it refuses these.
func (h *Host) ModifyVolume(ctx context.Context, n VolumeName, parameters map[string]string) (VolumeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumeChangesClient, pb.VolumeChangesClient.Modify, &pb.ModifyVolumeRequest{
		Call: mutating(), Name: wire.VolumeNameProto(n), MutableParameters: parameters,
	})
	return volumeReply(reply, err)
}
