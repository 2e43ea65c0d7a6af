package csi

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/registry"
)

// Create sends CreateVolume.
func (f *Fleet) Create(ctx context.Context, at registry.InstanceKey, r CreateRequest) (out Created, err error) {
	var reply csi.CreateVolumeResponse
	err = f.send(ctx, registry.CreateVolumeRPC, at, createRequest(r), &reply, nil)
	vol := reply.GetVolume()
	out = Created{
		VolumeID: vol.GetVolumeId(), Capacity: vol.GetCapacityBytes(), Context: vol.GetVolumeContext(),
		Source: registry.Source{
			Volume:   registry.ExternalID(vol.GetContentSource().GetVolume().GetVolumeId()),
			Snapshot: registry.ExternalID(vol.GetContentSource().GetSnapshot().GetSnapshotId()),
		},
	}
	for _, t := range vol.GetAccessibleTopology() {
		out.Accessible = append(out.Accessible, t.GetSegments())
	}
	return out, err
}

func createRequest(r CreateRequest) *csi.CreateVolumeRequest {
	req := &csi.CreateVolumeRequest{
		Name: r.Name, VolumeCapabilities: capabilities(r.Capabilities, r.FSType, r.MountFlags),
		Parameters:        r.Parameters,
		MutableParameters: r.Mutable, Secrets: reveal(r.Secrets), VolumeContentSource: contentSource(r.Source),
	}
	if r.CapacityMin > 0 || r.CapacityMax > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: r.CapacityMin, LimitBytes: r.CapacityMax}
	}
	if len(r.Required)+len(r.Preferred) > 0 {
		req.AccessibilityRequirements = &csi.TopologyRequirement{
			Requisite: topologies(r.Required), Preferred: topologies(r.Preferred),
		}
	}
	return req
}

// contentSource returns the source of a new volume's content, or nil if the volume is to be empty.
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

// Delete sends DeleteVolume.
func (f *Fleet) Delete(ctx context.Context, at registry.InstanceKey, r DeleteRequest) error {
	req := &csi.DeleteVolumeRequest{VolumeId: string(r.VolumeID), Secrets: reveal(r.Secrets)}
	return f.send(ctx, registry.DeleteVolumeRPC, at, req, &csi.DeleteVolumeResponse{}, r.Private.asFunc)
}

// Attach sends ControllerPublishVolume. It returns the publish context.
func (f *Fleet) Attach(ctx context.Context, at registry.InstanceKey, r AttachRequest) (map[string]string, error) {
	req := &csi.ControllerPublishVolumeRequest{
		VolumeId: string(r.VolumeID), NodeId: string(r.Node), VolumeCapability: usageCapability(r.Usage),
		Readonly: r.Usage.ReadOnly, Secrets: reveal(r.Secrets), VolumeContext: r.VolumeContext,
	}
	var reply csi.ControllerPublishVolumeResponse
	err := f.send(ctx, registry.ControllerPublishRPC, at, req, &reply, nil)
	return reply.GetPublishContext(), err
}

// Detach sends ControllerUnpublishVolume. Without a node ID it sends nothing, because that would mean every node.
func (f *Fleet) Detach(ctx context.Context, at registry.InstanceKey, r DetachRequest) error {
	if r.Node == "" {
		err := status.Error(codes.InvalidArgument,
			"the node id is empty, which would detach the volume from every node: the call was not sent")
		return failure(registry.ControllerUnpublishRPC, at, err, &callTrace{}, redactor{})
	}
	req := &csi.ControllerUnpublishVolumeRequest{
		VolumeId: string(r.VolumeID), NodeId: string(r.Node), Secrets: reveal(r.Secrets),
	}
	return f.send(ctx, registry.ControllerUnpublishRPC, at, req, &csi.ControllerUnpublishVolumeResponse{},
		r.Private.asFunc)
}

// Expand sends ControllerExpandVolume.
func (f *Fleet) Expand(ctx context.Context, at registry.InstanceKey, r ExpandRequest) (Expanded, error) {
	req := &csi.ControllerExpandVolumeRequest{
		VolumeId: string(r.VolumeID), CapacityRange: capacityRange(r.Range), Secrets: reveal(r.Secrets),
		VolumeCapability: usageCapability(r.Usage),
	}
	var reply csi.ControllerExpandVolumeResponse
	err := f.send(ctx, registry.ControllerExpandRPC, at, req, &reply, r.Private.asFunc)
	return Expanded{Capacity: reply.GetCapacityBytes(), NodeExpansionRequired: reply.GetNodeExpansionRequired()}, err
}

// Modify sends ControllerModifyVolume.
func (f *Fleet) Modify(ctx context.Context, at registry.InstanceKey, r ModifyRequest) error {
	req := &csi.ControllerModifyVolumeRequest{
		VolumeId: string(r.VolumeID), MutableParameters: r.Mutable, Secrets: reveal(r.Secrets),
	}
	return f.send(ctx, registry.ControllerModifyRPC, at, req, &csi.ControllerModifyVolumeResponse{}, r.Private.asFunc)
}

// validateRPC names a call that changes nothing.
const validateRPC registry.RPC = "ValidateVolumeCapabilities"

// Validate sends ValidateVolumeCapabilities.
func (f *Fleet) Validate(ctx context.Context, at registry.InstanceKey, r ValidateRequest) (Validated, error) {
	req := &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: string(r.VolumeID), VolumeContext: r.VolumeContext, Parameters: r.Parameters,
		MutableParameters: r.Mutable, Secrets: reveal(r.Secrets),
		VolumeCapabilities: capabilities(r.Capabilities, r.FSType, r.MountFlags),
	}
	var reply csi.ValidateVolumeCapabilitiesResponse
	err := f.send(ctx, validateRPC, at, req, &reply, nil)
	return Validated{
		Confirmed: knownCapabilities(reply.GetConfirmed().GetVolumeCapabilities()),
		Message:   f.lazyRedactor(ctx, at, req, nil)().redact(reply.GetMessage()),
	}, err
}

// Capacity sends GetCapacity. It returns negative sizes in the answer unchanged.
func (f *Fleet) Capacity(
	ctx context.Context, at registry.InstanceKey, q registry.CapacityQuery,
) (out registry.PluginCapacity, err error) {
	req := &csi.GetCapacityRequest{Parameters: q.Parameters}
	if len(q.Topology) > 0 {
		req.AccessibleTopology = &csi.Topology{Segments: q.Topology}
	}
	var reply csi.GetCapacityResponse
	err = f.send(ctx, registry.GetCapacityRPC, at, req, &reply, nil)
	out.Available = reply.GetAvailableCapacity()
	if m := reply.GetMaximumVolumeSize(); m != nil {
		out.Maximum = &m.Value
	}
	if m := reply.GetMinimumVolumeSize(); m != nil {
		out.Minimum = &m.Value
	}
	return out, err
}

// pageSize is the number of volumes that ListVolumes asks for, so that a page of large entries fits into a message.
const pageSize = 256

// ListVolumes returns one page of ListVolumes.
func (f *Fleet) ListVolumes(ctx context.Context, at registry.InstanceKey, token string) (page Page, err error) {
	req := &csi.ListVolumesRequest{MaxEntries: pageSize, StartingToken: token}
	var reply csi.ListVolumesResponse
	err = f.send(ctx, registry.ListVolumesRPC, at, req, &reply, nil)
	page.Next = reply.GetNextToken()
	for _, e := range reply.GetEntries() {
		page.Entries = append(page.Entries, f.entry(ctx, at, req, e.GetVolume(), e.GetStatus()))
	}
	return page, err
}

// GetVolume sends ControllerGetVolume.
func (f *Fleet) GetVolume(ctx context.Context, at registry.InstanceKey, id registry.ExternalID) (Entry, error) {
	req := &csi.ControllerGetVolumeRequest{VolumeId: string(id)}
	var reply csi.ControllerGetVolumeResponse
	if err := f.send(ctx, registry.GetVolumeRPC, at, req, &reply, nil); err != nil {
		return Entry{}, err
	}
	return f.entry(ctx, at, req, reply.GetVolume(), reply.GetStatus()), nil
}

// volumeStatus is the status of a volume in a response.
type volumeStatus interface {
	proto.Message
	GetPublishedNodeIds() []string
}

// entry returns the volume in the response to req.
func (f *Fleet) entry(
	ctx context.Context, at registry.InstanceKey, req proto.Message, v *csi.Volume, status volumeStatus,
) Entry {
	e := Entry{Volume: registry.ExternalID(v.GetVolumeId()), Capacity: v.GetCapacityBytes(),
		Context: v.GetVolumeContext()}
	for _, t := range v.GetAccessibleTopology() {
		e.Accessible = append(e.Accessible, t.GetSegments())
	}
	for _, node := range status.GetPublishedNodeIds() {
		e.Nodes = append(e.Nodes, registry.NodeID(node))
	}
	e.Condition = condition(status, f.lazyRedactor(ctx, at, req, nil))
	return e
}
