package csi

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// Create is CreateVolume. What comes back is the plugin's word, unchecked.
func (f *Fleet) Create(ctx context.Context, at registry.InstanceKey, r CreateRequest) (out Created, err error) {
	hide := hidden(r.Secrets, r.MountFlags, r.Parameters)
	err = f.send(ctx, registry.CreateVolumeRPC, at, hide, func(ctx context.Context, cc grpc.ClientConnInterface) error {
		reply, err := csi.NewControllerClient(cc).CreateVolume(ctx, createRequest(r))
		vol := reply.GetVolume()
		out = Created{VolumeID: vol.GetVolumeId(), Capacity: vol.GetCapacityBytes(), Context: vol.GetVolumeContext()}
		out.Source = registry.Source{
			Volume:   registry.ExternalID(vol.GetContentSource().GetVolume().GetVolumeId()),
			Snapshot: registry.ExternalID(vol.GetContentSource().GetSnapshot().GetSnapshotId()),
		}
		for _, t := range vol.GetAccessibleTopology() {
			out.Accessible = append(out.Accessible, t.GetSegments())
		}
		return err
	})
	return out, err
}

func createRequest(r CreateRequest) *csi.CreateVolumeRequest {
	req := &csi.CreateVolumeRequest{
		Name: r.Name, VolumeCapabilities: capabilities(r.Capabilities, r.FSType, r.MountFlags), Parameters: r.Parameters, Secrets: reveal(r.Secrets),
	}
	if r.CapacityMin > 0 || r.CapacityMax > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: r.CapacityMin, LimitBytes: r.CapacityMax}
	}
	if len(r.Required)+len(r.Preferred) > 0 {
		req.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: topologies(r.Required), Preferred: topologies(r.Preferred)}
	}
	req.VolumeContentSource = contentSource(r.Source)
	return req
}

// contentSource is nil for an empty volume.
func contentSource(s registry.Source) *csi.VolumeContentSource {
	switch {
	case s.Volume != "":
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: string(s.Volume)},
		}}
	case s.Snapshot != "":
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: string(s.Snapshot)},
		}}
	}
	return nil
}

// Delete is DeleteVolume.
func (f *Fleet) Delete(ctx context.Context, at registry.InstanceKey, r DeleteRequest) error {
	return f.send(ctx, registry.DeleteVolumeRPC, at, hidden(r.Secrets, r.Private.MountFlags, r.Private.Contexts...), func(ctx context.Context, cc grpc.ClientConnInterface) error {
		_, err := csi.NewControllerClient(cc).DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: string(r.VolumeID), Secrets: reveal(r.Secrets)})
		return err
	})
}

// Attach is ControllerPublishVolume. It returns the publish context.
func (f *Fleet) Attach(ctx context.Context, at registry.InstanceKey, r AttachRequest) (publish map[string]string, err error) {
	hide := hidden(r.Secrets, r.Usage.MountFlags, r.VolumeContext)
	err = f.send(ctx, registry.ControllerPublishRPC, at, hide, func(ctx context.Context, cc grpc.ClientConnInterface) error {
		reply, err := csi.NewControllerClient(cc).ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
			VolumeId: string(r.VolumeID), NodeId: string(r.Node), VolumeCapability: usageCapability(r.Usage), Readonly: r.Usage.ReadOnly,
			Secrets: reveal(r.Secrets), VolumeContext: r.VolumeContext,
		})
		publish = reply.GetPublishContext()
		return err
	})
	return publish, err
}

// Detach is ControllerUnpublishVolume. Without a node id it would mean every node: it is never sent so.
func (f *Fleet) Detach(ctx context.Context, at registry.InstanceKey, r DetachRequest) error {
	if r.Node == "" {
		err := status.Error(codes.InvalidArgument, "the node id is empty, which would detach the volume from every node: it was not sent")
		return failure(registry.ControllerUnpublishRPC, at, err, false, nil)
	}
	hide := hidden(r.Secrets, r.Private.MountFlags, r.Private.Contexts...)
	return f.send(ctx, registry.ControllerUnpublishRPC, at, hide, func(ctx context.Context, cc grpc.ClientConnInterface) error {
		_, err := csi.NewControllerClient(cc).ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{
			VolumeId: string(r.VolumeID), NodeId: string(r.Node), Secrets: reveal(r.Secrets),
		})
		return err
	})
}

// Expand is ControllerExpandVolume.
func (f *Fleet) Expand(ctx context.Context, at registry.InstanceKey, r ExpandRequest) (out Expanded, err error) {
	hide := hidden(r.Secrets, r.Private.MountFlags, r.Private.Contexts...)
	err = f.send(ctx, registry.ControllerExpandRPC, at, hide, func(ctx context.Context, cc grpc.ClientConnInterface) error {
		reply, err := csi.NewControllerClient(cc).ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
			VolumeId: string(r.VolumeID), CapacityRange: capacityRange(r.Range), Secrets: reveal(r.Secrets), VolumeCapability: maybeCapability(r.Usage),
		})
		out = Expanded{Capacity: reply.GetCapacityBytes(), Node: reply.GetNodeExpansionRequired()}
		return err
	})
	return out, err
}

// validateRPC changes nothing.
const validateRPC registry.RPC = "ValidateVolumeCapabilities"

// Validate is ValidateVolumeCapabilities.
func (f *Fleet) Validate(ctx context.Context, at registry.InstanceKey, r ValidateRequest) (out Validated, err error) {
	hide := hidden(r.Secrets, r.MountFlags, r.VolumeContext, r.Parameters)
	err = f.send(ctx, validateRPC, at, hide, func(ctx context.Context, cc grpc.ClientConnInterface) error {
		reply, err := csi.NewControllerClient(cc).ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: string(r.VolumeID), VolumeContext: r.VolumeContext, VolumeCapabilities: capabilities(r.Capabilities, r.FSType, r.MountFlags),
			Parameters: r.Parameters, Secrets: reveal(r.Secrets),
		})
		out = Validated{
			Confirmed: confirmed(reply.GetConfirmed().GetVolumeCapabilities()), Message: Redact(reply.GetMessage(), f.memory(at.Plugin).redactor(hide.words)),
		}
		return err
	})
	return out, err
}
