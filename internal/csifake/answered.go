package csifake

import (
	"slices"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"holdfast/internal/csifake/journal"
)

// answered returns what a reply tells the caller, as it was sent.
func answered(req, reply proto.Message) *journal.Answer {
	switch r := reply.(type) {
	case *csi.GetPluginInfoResponse:
		return &journal.Answer{Name: r.GetName()}
	case *csi.NodeGetInfoResponse:
		return &journal.Answer{Node: r.GetNodeId(), MaxVolumes: r.GetMaxVolumesPerNode(),
			Segments: segments(r.GetAccessibleTopology())}
	case *csi.CreateVolumeResponse:
		return &journal.Answer{Volume: r.GetVolume().GetVolumeId(),
			VolumeContext: HashMap(r.GetVolume().GetVolumeContext()),
			Segments:      segments(r.GetVolume().GetAccessibleTopology()...)}
	case *csi.ControllerPublishVolumeResponse:
		return &journal.Answer{PublishContext: HashMap(r.GetPublishContext())}
	case *csi.ControllerExpandVolumeResponse:
		return &journal.Answer{NodeExpand: r.GetNodeExpansionRequired(), Bytes: r.GetCapacityBytes()}
	case *csi.CreateSnapshotResponse:
		return &journal.Answer{Snapshot: r.GetSnapshot().GetSnapshotId()}
	case *csi.CreateVolumeGroupSnapshotResponse:
		a := &journal.Answer{Group: r.GetGroupSnapshot().GetGroupSnapshotId()}
		for _, x := range r.GetGroupSnapshot().GetSnapshots() {
			a.Snapshots = append(a.Snapshots, x.GetSnapshotId())
		}
		return a
	case *csi.ValidateVolumeCapabilitiesResponse:
		return &journal.Answer{Denied: denied(req, r.GetConfirmed())}
	case *csi.ProbeResponse:
		if r.GetReady() != nil {
			ready := r.GetReady().GetValue()
			return &journal.Answer{Ready: &ready}
		}
	case interface{ GetNextToken() string }:
		return &journal.Answer{Next: r.GetNextToken()}
	}
	if reply == nil { // the call has no answer or a stream of them
		return nil
	}
	return announced(reply.ProtoReflect())
}

// announced returns the names of the capabilities in a reply, or their numbers if CSI does not define them. It returns
// nil if the reply is about other things.
func announced(reply protoreflect.Message) *journal.Answer {
	field := reply.Descriptor().Fields().ByName("capabilities")
	if field == nil {
		return nil
	}
	a, list := &journal.Answer{}, reply.Get(field).List()
	for i := range list.Len() {
		list.Get(i).Message().Range(func(kind protoreflect.FieldDescriptor, value protoreflect.Value) bool {
			named := kind.Message().Fields().ByName("type")
			number := value.Message().Get(named).Enum()
			name := strconv.Itoa(int(number))
			if known := named.Enum().Values().ByNumber(number); known != nil {
				name = string(known.Name())
			}
			if kind.Name() == "volume_expansion" {
				a.Expansion = append(a.Expansion, name)
			} else {
				a.Caps = append(a.Caps, name)
			}
			return true
		})
	}
	return a
}

func segments(all ...*csi.Topology) (list []map[string]string) {
	for _, t := range all {
		if t != nil {
			list = append(list, t.GetSegments())
		}
	}
	return list
}

// denied returns the requested usages that were not confirmed.
func denied(req proto.Message, confirmed *csi.ValidateVolumeCapabilitiesResponse_Confirmed) (usages []string) {
	asked, ok := req.(*csi.ValidateVolumeCapabilitiesRequest)
	if !ok {
		return nil
	}
	for _, want := range asked.GetVolumeCapabilities() {
		if !slices.ContainsFunc(confirmed.GetVolumeCapabilities(), func(c *csi.VolumeCapability) bool {
			return proto.Equal(c, want)
		}) {
			usages = append(usages, usageOf(want))
		}
	}
	return usages
}
