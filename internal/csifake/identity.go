package csifake

import (
	"context"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

type identity struct {
	csi.UnimplementedIdentityServer
	p *Plugin
}

func (s identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: s.p.cfg.Name, VendorVersion: s.p.cfg.Version}, nil
}

func (s identity) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (
	*csi.GetPluginCapabilitiesResponse, error,
) {
	reply := &csi.GetPluginCapabilitiesResponse{}
	add := func(n csi.PluginCapability_Service_Type) {
		reply.Capabilities = append(reply.Capabilities, &csi.PluginCapability{Type: &csi.PluginCapability_Service_{
			Service: &csi.PluginCapability_Service{Type: n}}})
	}
	// a node reports it too, because it holds for the plugin as a whole
	if s.p.cfg.serves(Controller) || len(s.p.caps["controller"]) > 0 {
		add(csi.PluginCapability_Service_CONTROLLER_SERVICE)
	}
	for _, n := range s.p.caps["service"] {
		if t := csi.PluginCapability_Service_Type(n); t != csi.PluginCapability_Service_CONTROLLER_SERVICE {
			add(t)
		}
	}
	for _, n := range s.p.caps["expansion"] {
		kind := csi.PluginCapability_VolumeExpansion_Type(n)
		reply.Capabilities = append(reply.Capabilities, &csi.PluginCapability{
			Type: &csi.PluginCapability_VolumeExpansion_{
				VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: kind}}})
	}
	return reply, nil
}

func (s identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

// topology returns the topology of the plugin's node. It is nil unless the plugin constrains the accessibility of
// volumes.
func (p *Plugin) topology() *csi.Topology {
	if len(p.cfg.Topology) == 0 || !p.caps.has("service/VOLUME_ACCESSIBILITY_CONSTRAINTS") {
		return nil
	}
	return &csi.Topology{Segments: maps.Clone(p.cfg.Topology)}
}

// find returns a volume. With Config.AnyVolume it creates a missing one.
func (p *Plugin) find(c *contents, id string) (*volume, error) {
	if id == "" {
		return nil, invalid("volume_id is missing")
	}
	if v := c.Volumes[id]; v != nil {
		return v, nil
	}
	known := p.cfg.AnyVolume
	for _, have := range p.cfg.Volumes {
		known = known || have == id
	}
	if !known {
		return nil, status.Errorf(codes.NotFound, "volume %q does not exist", id)
	}
	v := &volume{ID: id, Capacity: 1 << 30}
	c.Volumes[id] = v
	return v, nil
}
