package csi

import (
	"context"
	"fmt"
	"regexp"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// Limits of what a plugin may say of itself: it is stored, and told in every event of the plugin.
const (
	maxVersion      = 128     // bytes (CSI "Size Limits")
	maxTopology     = 4 << 10 // bytes of names and values (CSI "Size Limits")
	maxCapabilities = 256     // of one service; CSI 1.13 has 15
)

// Probe asks whether the plugin is ready. No answer to that question means yes (CSI ProbeResponse.ready).
func (c *Conn) Probe(ctx context.Context) (ready bool, err error) {
	err = c.ask(ctx, "Probe", func(ctx context.Context) error {
		reply, err := csi.NewIdentityClient(c.cc).Probe(ctx, &csi.ProbeRequest{})
		ready = reply.GetReady() == nil || reply.GetReady().GetValue()
		return err
	})
	return ready && err == nil, err
}

// Describe asks the plugin what it is and can do, for each role that its task serves.
func (c *Conn) Describe(ctx context.Context, roles []registry.Role) (map[registry.Role]registry.Fingerprint, error) {
	if err := c.ready(ctx); err != nil {
		return nil, registry.Errorf(registry.ErrUnavailable, "%s", status.Convert(err).Message())
	}
	news := c.news.Load()
	out, err := c.describe(ctx, roles)
	if err == nil {
		c.known.Store(news)
	}
	return out, err
}

func (c *Conn) describe(ctx context.Context, roles []registry.Role) (map[registry.Role]registry.Fingerprint, error) {
	made := c.made.Load()
	ctx = over(ctx, made)
	base, err := c.identity(ctx)
	if err != nil {
		return nil, err
	}
	out := map[registry.Role]registry.Fingerprint{}
	for _, role := range roles {
		if out[role], err = c.role(ctx, role, base.Clone()); err != nil {
			return nil, err
		}
	}
	node, serves := out[registry.RoleNode]
	if serves && node.NodeID == "" && out[registry.RoleController].Has(registry.AttachDetach) {
		return nil, broken("NodeGetInfo", "it is not implemented, but the controller attaches volumes to nodes and needs the node's id")
	}
	c.hasSaid(roles, made)
	return out, nil
}

// role is base with what the plugin says of one role.
func (c *Conn) role(ctx context.Context, role registry.Role, base registry.Fingerprint) (registry.Fingerprint, error) {
	var err error
	switch role {
	case registry.RoleController:
		err = c.controllerCapabilities(ctx, &base)
	case registry.RoleNode:
		if err = c.nodeCapabilities(ctx, &base); err == nil {
			err = c.nodeInfo(ctx, &base)
		}
	}
	if err != nil {
		return registry.Fingerprint{}, err
	}
	slices.Sort(base.Capabilities)
	base.Capabilities = slices.Compact(base.Capabilities)
	return base, nil
}

// pluginName is the form that GetPluginInfo.name must have: domain notation, at most 63 characters, letters and digits at both ends.
var pluginName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

func (c *Conn) identity(ctx context.Context) (registry.Fingerprint, error) {
	const rpc = "GetPluginInfo"
	var info *csi.GetPluginInfoResponse
	err := c.ask(ctx, rpc, func(ctx context.Context) (err error) {
		info, err = csi.NewIdentityClient(c.cc).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
		return err
	})
	f := registry.Fingerprint{Provider: info.GetName(), Version: Redact(info.GetVendorVersion(), nil)}
	switch {
	case err != nil:
		return f, err
	case !pluginName.MatchString(f.Provider):
		return f, broken(rpc, "the plugin's name %q is not one: 1 to 63 characters in domain notation are needed", Redact(f.Provider, nil))
	case len(f.Version) > maxVersion:
		return f, broken(rpc, "the plugin's version is longer than %d bytes", maxVersion)
	}
	return f, c.pluginCapabilities(ctx, &f)
}

func (c *Conn) pluginCapabilities(ctx context.Context, f *registry.Fingerprint) error {
	var reply *csi.GetPluginCapabilitiesResponse
	err := c.ask(ctx, "GetPluginCapabilities", func(ctx context.Context) (err error) {
		reply, err = csi.NewIdentityClient(c.cc).GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
		return err
	})
	for _, one := range bounded(reply.GetCapabilities()) {
		if s := one.GetService(); s != nil {
			f.Capabilities = append(f.Capabilities, capability("plugin", csi.PluginCapability_Service_Type_name, int32(s.GetType())))
		}
		if e := one.GetVolumeExpansion(); e != nil {
			f.Capabilities = append(f.Capabilities, capability("expansion", csi.PluginCapability_VolumeExpansion_Type_name, int32(e.GetType())))
		}
	}
	return err
}

func (c *Conn) controllerCapabilities(ctx context.Context, f *registry.Fingerprint) error {
	var reply *csi.ControllerGetCapabilitiesResponse
	err := c.ask(ctx, "ControllerGetCapabilities", func(ctx context.Context) (err error) {
		reply, err = csi.NewControllerClient(c.cc).ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
		return err
	})
	for _, one := range bounded(reply.GetCapabilities()) {
		if r := one.GetRpc(); r != nil {
			f.Capabilities = append(f.Capabilities, capability("controller", csi.ControllerServiceCapability_RPC_Type_name, int32(r.GetType())))
		}
	}
	return err
}

func (c *Conn) nodeCapabilities(ctx context.Context, f *registry.Fingerprint) error {
	var reply *csi.NodeGetCapabilitiesResponse
	err := c.ask(ctx, "NodeGetCapabilities", func(ctx context.Context) (err error) {
		reply, err = csi.NewNodeClient(c.cc).NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		return err
	})
	for _, one := range bounded(reply.GetCapabilities()) {
		if r := one.GetRpc(); r != nil {
			f.Capabilities = append(f.Capabilities, capability("node", csi.NodeServiceCapability_RPC_Type_name, int32(r.GetType())))
		}
	}
	return err
}

// nodeInfo tolerates a plugin without NodeGetInfo: only one whose controller attaches needs a node id.
func (c *Conn) nodeInfo(ctx context.Context, f *registry.Fingerprint) error {
	const rpc = "NodeGetInfo"
	var info *csi.NodeGetInfoResponse
	unimplemented := false
	err := c.ask(ctx, rpc, func(ctx context.Context) (err error) {
		info, err = csi.NewNodeClient(c.cc).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
		if unimplemented = status.Code(err) == codes.Unimplemented; unimplemented {
			return nil
		}
		return err
	})
	if err != nil || unimplemented {
		return err
	}
	topology := info.GetAccessibleTopology().GetSegments()
	if f.NodeID, err = registry.ParseNodeID(info.GetNodeId()); err != nil {
		return broken(rpc, "%v", err)
	}
	if info.GetMaxVolumesPerNode() < 0 {
		return broken(rpc, "max_volumes_per_node is %d; it cannot be negative", info.GetMaxVolumesPerNode())
	}
	if n := size(topology); n > maxTopology {
		return broken(rpc, "accessible_topology has %d bytes; %d are allowed", n, maxTopology)
	}
	f.MaxVolumes, f.Topology = info.GetMaxVolumesPerNode(), topology
	return nil
}

// bounded is the beginning of a list of capabilities: no plugin has so many.
func bounded[T any](list []T) []T { return list[:min(len(list), maxCapabilities)] }

func size(m map[string]string) (n int) {
	for k, v := range m {
		n += len(k) + len(v)
	}
	return n
}

// retired names capabilities that CSI had up to version 1.12, by service. Their numbers stay reserved.
var retired = map[string]map[int32]string{
	"controller": {11: "VOLUME_CONDITION"},
	"node":       {4: "VOLUME_CONDITION"},
}

// capability names an enum value, also one that this build does not know.
func capability(service string, known map[int32]string, value int32) registry.Capability {
	name, ok := known[value]
	if !ok {
		name, ok = retired[service][value]
	}
	if ok {
		return registry.Capability(service + "." + name)
	}
	return registry.Capability(fmt.Sprintf("%s.%d", service, value))
}

// broken is the error of an answer that cannot be believed.
func broken(rpc registry.RPC, format string, args ...any) error {
	return registry.Errorf(registry.ErrInternal, "%s: %s", rpc, fmt.Sprintf(format, args...))
}
