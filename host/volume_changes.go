package host

import (
	"context"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// UpdateVolume makes a volume as its changed volume file says. Secrets, mutable parameters and further capabilities
// change at once; mount options, the context of a registered volume and removed capabilities only while the volume is
// unused. If one change cannot be made, none is made: ErrConflict has the reasons. With dryRun, UpdateVolume only
// returns the changes, each with its Problem, and calls no plugin.
func (h *Host) UpdateVolume(ctx context.Context, s VolumeSpec, dryRun bool) (VolumeUpdate, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumeChangesClient, pb.VolumeChangesClient.Update,
		&pb.UpdateVolumeRequest{Call: mutating(), Spec: wire.VolumeSpecProto(s), DryRun: dryRun})
	if err != nil {
		return VolumeUpdate{}, err
	}
	return VolumeUpdate{Volume: wire.Volume(reply.GetVolume()).Volume,
		Changes: convert(reply.GetChanges(), wire.FieldChange)}, nil
}

// AdoptVolume makes a record of a volume that its plugin has. The plugin describes the volume's context, size and
// topology; the spec has the rest, and what the plugin leaves out. ErrNotFound: the plugin has no such volume.
// ErrInvalid: the spec disagrees with the plugin.
func (h *Host) AdoptVolume(ctx context.Context, s VolumeSpec) (VolumeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumeChangesClient, pb.VolumeChangesClient.Adopt,
		&pb.AdoptVolumeRequest{Call: mutating(), Spec: wire.VolumeSpecProto(s)})
	return volumeReply(reply, err)
}

// VolumesAtPlugin lists the volumes that a plugin has (ListVolumes of CSI), also those without a record: these have no
// Name. ErrUnsupported: the plugin lacks LIST_VOLUMES, or is not asked because it died during that call.
func (h *Host) VolumesAtPlugin(ctx context.Context, plugin PluginID) ([]PluginVolume, error) {
	reply, err := call(ctx, h, reads, pb.NewVolumeChangesClient, pb.VolumeChangesClient.ListAtPlugin,
		&pb.ListVolumesAtPluginRequest{Call: &pb.Call{}, Plugin: string(plugin)})
	return convert(reply.GetVolumes(), wire.PluginVolume), err
}

// ModifyVolume gives mutable parameters of a volume other values. Parameters that are not in parameters stay as they
// are. If the outcome of an earlier modification is not known (Volume.Modification), its parameters are sent too.
// ErrUnsupported: the plugin has no mutable parameters. ErrInvalid: it refuses these.
func (h *Host) ModifyVolume(ctx context.Context, n VolumeName, parameters map[string]string) (VolumeStatus, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumeChangesClient, pb.VolumeChangesClient.Modify,
		&pb.ModifyVolumeRequest{
			Call: mutating(), Name: wire.VolumeNameProto(n), MutableParameters: parameters,
		})
	return volumeReply(reply, err)
}
