package driver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/registry"
	"holdfast/shim/internal/controller"
)

var _ controller.Driver = (*Fleet)(nil)

// Create is CreateVolume. What comes back is the plugin's word, unchecked.
func (f *Fleet) Create(ctx context.Context, at registry.InstanceKey, r controller.CreateRequest) (controller.Created, error) {
	c, err := f.of(at)
	if err != nil {
		return controller.Created{}, unsent(registry.CreateVolumeRPC, at, err)
	}
	reply, err := csi.NewControllerClient(c.cc).CreateVolume(ctx, createRequest(r))
	if err != nil {
		return controller.Created{}, failure(registry.CreateVolumeRPC, at, err, hidden(r.Secrets, r.MountFlags, r.Parameters))
	}
	vol := reply.GetVolume()
	out := controller.Created{VolumeID: vol.GetVolumeId(), Capacity: vol.GetCapacityBytes(), Context: vol.GetVolumeContext()}
	for _, t := range vol.GetAccessibleTopology() {
		out.Accessible = append(out.Accessible, t.GetSegments())
	}
	return out, nil
}

func createRequest(r controller.CreateRequest) *csi.CreateVolumeRequest {
	req := &csi.CreateVolumeRequest{
		Name: r.Name, VolumeCapabilities: capabilities(r.Capabilities, r.FSType, r.MountFlags), Parameters: r.Parameters, Secrets: reveal(r.Secrets),
	}
	if r.CapacityMin > 0 || r.CapacityMax > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: r.CapacityMin, LimitBytes: r.CapacityMax}
	}
	if len(r.Required)+len(r.Preferred) > 0 {
		req.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: topologies(r.Required), Preferred: topologies(r.Preferred)}
	}
	switch {
	case r.CloneID != "":
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: string(r.CloneID)},
		}}
	case r.SnapshotID != "":
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: r.SnapshotID},
		}}
	}
	return req
}

// Delete is DeleteVolume.
func (f *Fleet) Delete(ctx context.Context, at registry.InstanceKey, r controller.DeleteRequest) error {
	c, err := f.of(at)
	if err != nil {
		return unsent(registry.DeleteVolumeRPC, at, err)
	}
	_, err = csi.NewControllerClient(c.cc).DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: string(r.VolumeID), Secrets: reveal(r.Secrets)})
	return failure(registry.DeleteVolumeRPC, at, err, hidden(r.Secrets, ""))
}

// Attach is ControllerPublishVolume. It returns the publish context.
func (f *Fleet) Attach(ctx context.Context, at registry.InstanceKey, r controller.AttachRequest) (map[string]string, error) {
	c, err := f.of(at)
	if err != nil {
		return nil, unsent(registry.ControllerPublishRPC, at, err)
	}
	reply, err := csi.NewControllerClient(c.cc).ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: string(r.VolumeID), NodeId: string(r.Node), VolumeCapability: usageCapability(r.Usage), Readonly: r.Usage.ReadOnly,
		Secrets: reveal(r.Secrets), VolumeContext: r.VolumeContext,
	})
	return reply.GetPublishContext(), failure(registry.ControllerPublishRPC, at, err, hidden(r.Secrets, r.Usage.MountFlags, r.VolumeContext))
}

// Detach is ControllerUnpublishVolume. Without a node id it would mean every node: it is never sent so.
func (f *Fleet) Detach(ctx context.Context, at registry.InstanceKey, r controller.DetachRequest) error {
	if r.Node == "" {
		return unsent(registry.ControllerUnpublishRPC, at, registry.Invalid("the node id is empty, which would detach the volume from every node"))
	}
	c, err := f.of(at)
	if err != nil {
		return unsent(registry.ControllerUnpublishRPC, at, err)
	}
	_, err = csi.NewControllerClient(c.cc).ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{
		VolumeId: string(r.VolumeID), NodeId: string(r.Node), Secrets: reveal(r.Secrets),
	})
	return failure(registry.ControllerUnpublishRPC, at, err, hidden(r.Secrets, ""))
}

// Validate is ValidateVolumeCapabilities.
func (f *Fleet) Validate(ctx context.Context, at registry.InstanceKey, r controller.ValidateRequest) (controller.Validated, error) {
	const rpc registry.RPC = "ValidateVolumeCapabilities"
	c, err := f.of(at)
	if err != nil {
		return controller.Validated{}, unsent(rpc, at, err)
	}
	hide := hidden(r.Secrets, r.MountFlags, r.VolumeContext, r.Parameters)
	reply, err := csi.NewControllerClient(c.cc).ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: string(r.VolumeID), VolumeContext: r.VolumeContext, VolumeCapabilities: capabilities(r.Capabilities, r.FSType, r.MountFlags),
		Parameters: r.Parameters, Secrets: reveal(r.Secrets),
	})
	if err != nil {
		return controller.Validated{}, failure(rpc, at, err, hide)
	}
	return controller.Validated{
		Confirmed: confirmed(reply.GetConfirmed().GetVolumeCapabilities()), Message: Redact(reply.GetMessage(), hide),
	}, nil
}
