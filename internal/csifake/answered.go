package csifake

import (
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

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
	return announced(reply)
}

// announced returns the capabilities in a reply, or nil if the reply is about other things.
func announced(reply proto.Message) *journal.Answer {
	switch r := reply.(type) {
	case *csi.GetPluginCapabilitiesResponse:
		return &journal.Answer{Caps: serviceNames(r), Expansion: expansions(r)}
	case *csi.ControllerGetCapabilitiesResponse:
		return &journal.Answer{Caps: names(r.GetCapabilities(), func(c *csi.ControllerServiceCapability) fmt.Stringer {
			return c.GetRpc().GetType()
		})}
	case *csi.GroupControllerGetCapabilitiesResponse:
		return &journal.Answer{Caps: names(r.GetCapabilities(),
			func(c *csi.GroupControllerServiceCapability) fmt.Stringer {
				return c.GetRpc().GetType()
			})}
	case *csi.NodeGetCapabilitiesResponse:
		return &journal.Answer{Caps: names(r.GetCapabilities(), func(c *csi.NodeServiceCapability) fmt.Stringer {
			return c.GetRpc().GetType()
		})}
	}
	return nil
}

func serviceNames(r *csi.GetPluginCapabilitiesResponse) []string {
	var all []string
	for _, c := range r.GetCapabilities() {
		if s := c.GetService(); s != nil {
			all = append(all, s.GetType().String())
		}
	}
	return all
}

func expansions(r *csi.GetPluginCapabilitiesResponse) []string {
	var all []string
	for _, c := range r.GetCapabilities() {
		if e := c.GetVolumeExpansion(); e != nil {
			all = append(all, e.GetType().String())
		}
	}
	return all
}

func names[T any](list []T, of func(T) fmt.Stringer) []string {
	var all []string
	for _, c := range list {
		all = append(all, of(c).String())
	}
	return all
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
