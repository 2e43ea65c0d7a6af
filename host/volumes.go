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
	return wire.Volume(reply.GetVolume()), err
}

// RegisterVolume records a volume that exists at its plugin.
func (h *Host) RegisterVolume(ctx context.Context, s VolumeSpec) (VolumeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumesClient, pb.VolumesClient.Register,
		&pb.RegisterVolumeRequest{Call: mutating(), Spec: wire.VolumeSpecProto(s)})
	return wire.Volume(reply.GetVolume()), err
}

// ExpandVolume makes a volume larger, at its controller and on this node. If the volume is mounted here, the node
// expands it at once, else before its next use; Volume.Expansion says what is left to do on this node. Other nodes
// that have the volume mounted expand it by themselves. A volume that is large enough stays as it is. ErrConflict: the
// volume is in use, and its plugin expands only unused volumes. ErrInvalid: the volume would have to shrink.
func (h *Host) ExpandVolume(ctx context.Context, n VolumeName, want CapacityRange) (VolumeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumesClient, pb.VolumesClient.Expand, &pb.ExpandVolumeRequest{
		Call: mutating(), Name: wire.VolumeNameProto(n), RequiredBytes: want.Required, LimitBytes: want.Limit,
	})
	return wire.Volume(reply.GetVolume()), err
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
	return convert(reply.GetUsage(), wire.VolumeUsage), Seq(reply.GetAnswer().GetIndex()), err
}

// UpdateVolume changes a volume as its changed volume file says. Secrets, mutable parameters and added capabilities
// change at once; mount options, the context of a registered volume and removed capabilities only while the volume is
// unused. If one change cannot be made, none is made: ErrConflict has the reasons. With dryRun, UpdateVolume only
// returns the changes, each with its Problem, and calls no plugin.
func (h *Host) UpdateVolume(ctx context.Context, s VolumeSpec, dryRun bool) (VolumeUpdate, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumeChangesClient, pb.VolumeChangesClient.Update,
		&pb.UpdateVolumeRequest{Call: mutating(), Spec: wire.VolumeSpecProto(s), DryRun: dryRun})
	return VolumeUpdate{Volume: wire.Volume(reply.GetVolume()).Volume,
		Changes: convert(reply.GetChanges(), wire.FieldChange)}, err
}

// AdoptVolume makes a record of a volume that its plugin has. The plugin describes the volume's context, size and
// topology; the spec has the rest, and what the plugin leaves out. ErrNotFound: the plugin has no such volume.
// ErrInvalid: the spec disagrees with the plugin.
func (h *Host) AdoptVolume(ctx context.Context, s VolumeSpec) (VolumeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumeChangesClient, pb.VolumeChangesClient.Adopt,
		&pb.AdoptVolumeRequest{Call: mutating(), Spec: wire.VolumeSpecProto(s)})
	return wire.Volume(reply.GetVolume()), err
}

// VolumesAtPlugin lists the volumes that a plugin has (ListVolumes of CSI), also those without a record: these have no
// Name. ErrUnsupported: the plugin lacks LIST_VOLUMES, or is not asked again because it died during such a call.
func (h *Host) VolumesAtPlugin(ctx context.Context, plugin PluginID) ([]PluginVolume, error) {
	reply, err := call(ctx, h, reads, pb.NewVolumeChangesClient, pb.VolumeChangesClient.ListAtPlugin,
		&pb.ListVolumesAtPluginRequest{Call: &pb.Call{}, Plugin: string(plugin)})
	return convert(reply.GetVolumes(), wire.PluginVolume), err
}

// ModifyVolume gives mutable parameters of a volume other values. All others stay as they are. If the outcome of an
// earlier modification is not known (Volume.Modification), its parameters are sent too. ErrUnsupported: the plugin has
// no mutable parameters. ErrInvalid: the plugin refuses these values.
func (h *Host) ModifyVolume(ctx context.Context, n VolumeName, parameters map[string]string) (VolumeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumeChangesClient, pb.VolumeChangesClient.Modify,
		&pb.ModifyVolumeRequest{
			Call: mutating(), Name: wire.VolumeNameProto(n), MutableParameters: parameters,
		})
	return wire.Volume(reply.GetVolume()), err
}
