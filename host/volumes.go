package host

import (
	"context"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// CreateVolume has the plugin create a volume. The same spec again returns the same volume.
func (h *Host) CreateVolume(ctx context.Context, s VolumeSpec) (VolumeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumesClient, pb.VolumesClient.Create,
		&pb.CreateVolumeRequest{Call: mutating(), Spec: wire.VolumeSpecProto(s)})
	return volumeReply(reply, err)
}

// RegisterVolume records a volume that exists at its plugin.
func (h *Host) RegisterVolume(ctx context.Context, s VolumeSpec) (VolumeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumesClient, pb.VolumesClient.Register,
		&pb.RegisterVolumeRequest{Call: mutating(), Spec: wire.VolumeSpecProto(s)})
	return volumeReply(reply, err)
}

// ExpandVolume makes a volume larger, at its controller and on this node. If the volume is mounted here, the node
// expands it at once, else before its next use; Volume.Expansion says what is left to do. A volume that is large enough
// stays as it is. ErrConflict: the volume is in use, and its plugin expands only unused volumes. ErrInvalid: the volume
// would have to shrink.
func (h *Host) ExpandVolume(ctx context.Context, n VolumeName, want CapacityRange) (VolumeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumesClient, pb.VolumesClient.Expand, &pb.ExpandVolumeRequest{
		Call: mutating(), Name: wire.VolumeNameProto(n), RequiredBytes: want.Required, LimitBytes: want.Limit,
	})
	return volumeReply(reply, err)
}

func volumeReply(reply interface{ GetVolume() *pb.Volume }, err error) (VolumeStatus, error) {
	if err != nil {
		return VolumeStatus{}, err
	}
	return wire.Volume(reply.GetVolume()), nil
}

// DeleteVolume has the plugin delete the volume, and removes its record. ErrConflict: the volume is in use.
func (h *Host) DeleteVolume(ctx context.Context, n VolumeName) error {
	_, err := call(ctx, h, writes, pb.NewVolumesClient, pb.VolumesClient.Delete,
		&pb.DeleteVolumeRequest{Call: mutating(), Name: wire.VolumeNameProto(n)})
	return err
}

// DeregisterVolume removes the volume's record; the plugin keeps the volume. ErrConflict: the volume is in use.
func (h *Host) DeregisterVolume(ctx context.Context, n VolumeName) error {
	_, err := call(ctx, h, writes, pb.NewVolumesClient, pb.VolumesClient.Deregister,
		&pb.DeregisterVolumeRequest{Call: mutating(), Name: wire.VolumeNameProto(n)})
	return err
}

// VolumeStats asks a volume's node plugin how full the volume is, and returns one answer per unit ("bytes", "inodes").
// ErrConflict: the volume is not mounted on this node, or another operation runs on it. ErrUnsupported: the plugin
// cannot say. The index is that of the shim after the plugin has answered.
func (h *Host) VolumeStats(ctx context.Context, n VolumeName) ([]VolumeUsage, Seq, error) {
	reply, err := call(ctx, h, reads, pb.NewVolumesClient, pb.VolumesClient.Stats,
		&pb.VolumeStatsRequest{Call: &pb.Call{}, Name: wire.VolumeNameProto(n)})
	if err != nil {
		return nil, 0, err
	}
	return convert(reply.GetUsage(), wire.VolumeUsage), Seq(reply.GetAnswer().GetIndex()), nil
}
