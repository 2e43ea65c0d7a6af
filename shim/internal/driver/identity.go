package driver

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

// Probe asks whether the plugin is ready. No answer to that question means yes (CSI ProbeResponse.ready).
func (c *Conn) Probe(ctx context.Context) (ready bool, err error) {
	reply, err := csi.NewIdentityClient(c.cc).Probe(ctx, &csi.ProbeRequest{})
	if err != nil {
		return false, c.failed("Probe", err)
	}
	return reply.GetReady() == nil || reply.GetReady().GetValue(), nil
}

// Describe asks the plugin what it is and can do, for each role that its task serves.
func (c *Conn) Describe(ctx context.Context, roles []registry.Role) (map[registry.Role]registry.Fingerprint, error) {
	base, err := c.identity(ctx)
	if err != nil {
		return nil, err
	}
	out := map[registry.Role]registry.Fingerprint{}
	for _, role := range roles {
		f := base.Clone()
		switch role {
		case registry.RoleController:
			err = c.controllerCapabilities(ctx, &f)
		case registry.RoleNode:
			err = c.nodeInfo(ctx, &f)
		}
		if err != nil {
			return nil, err
		}
		slices.Sort(f.Capabilities)
		f.Capabilities = slices.Compact(f.Capabilities)
		out[role] = f
	}
	return out, nil
}

// pluginName is the form that GetPluginInfo.name must have: domain notation, at most 63 characters, letters and digits at both ends.
var pluginName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

func (c *Conn) identity(ctx context.Context) (registry.Fingerprint, error) {
	client := csi.NewIdentityClient(c.cc)
	info, err := client.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return registry.Fingerprint{}, c.failed("GetPluginInfo", err)
	}
	if !pluginName.MatchString(info.GetName()) {
		return registry.Fingerprint{}, c.broken("GetPluginInfo", "the plugin's name %q is not one: 1 to 63 characters in domain notation are needed", Redact(info.GetName(), nil))
	}
	if len(info.GetVendorVersion()) > 128 {
		return registry.Fingerprint{}, c.broken("GetPluginInfo", "the plugin's version is longer than 128 bytes")
	}
	caps, err := client.GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	if err != nil {
		return registry.Fingerprint{}, c.failed("GetPluginCapabilities", err)
	}
	f := registry.Fingerprint{Provider: info.GetName(), Version: info.GetVendorVersion()}
	for _, one := range caps.GetCapabilities() {
		if s := one.GetService(); s != nil {
			f.Capabilities = append(f.Capabilities, capability("plugin", csi.PluginCapability_Service_Type_name, int32(s.GetType())))
		}
		if e := one.GetVolumeExpansion(); e != nil {
			f.Capabilities = append(f.Capabilities, capability("expansion", csi.PluginCapability_VolumeExpansion_Type_name, int32(e.GetType())))
		}
	}
	return f, nil
}

func (c *Conn) controllerCapabilities(ctx context.Context, f *registry.Fingerprint) error {
	reply, err := csi.NewControllerClient(c.cc).ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	if err != nil {
		return c.failed("ControllerGetCapabilities", err)
	}
	for _, one := range reply.GetCapabilities() {
		if r := one.GetRpc(); r != nil {
			f.Capabilities = append(f.Capabilities, capability("controller", csi.ControllerServiceCapability_RPC_Type_name, int32(r.GetType())))
		}
	}
	return nil
}

// nodeInfo tolerates a plugin without NodeGetInfo: only one whose controller attaches needs a node id, and Attach asks for it.
func (c *Conn) nodeInfo(ctx context.Context, f *registry.Fingerprint) error {
	client := csi.NewNodeClient(c.cc)
	reply, err := client.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return c.failed("NodeGetCapabilities", err)
	}
	for _, one := range reply.GetCapabilities() {
		if r := one.GetRpc(); r != nil {
			f.Capabilities = append(f.Capabilities, capability("node", csi.NodeServiceCapability_RPC_Type_name, int32(r.GetType())))
		}
	}
	info, err := client.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if status.Code(err) == codes.Unimplemented {
		return nil
	}
	if err != nil {
		return c.failed("NodeGetInfo", err)
	}
	id, err := registry.ParseNodeID(info.GetNodeId())
	if err != nil {
		return c.broken("NodeGetInfo", "%v", err)
	}
	if info.GetMaxVolumesPerNode() < 0 {
		return c.broken("NodeGetInfo", "max_volumes_per_node is %d; it cannot be negative", info.GetMaxVolumesPerNode())
	}
	f.NodeID, f.MaxVolumes, f.Topology = id, info.GetMaxVolumesPerNode(), info.GetAccessibleTopology().GetSegments()
	return nil
}

// capability names an enum value, also one that this build does not know.
func capability(service string, known map[int32]string, value int32) registry.Capability {
	if name, ok := known[value]; ok {
		return registry.Capability(service + "." + name)
	}
	return registry.Capability(fmt.Sprintf("%s.%d", service, value))
}

// failed is the error of a call that asks and changes nothing.
func (c *Conn) failed(rpc registry.RPC, err error) error {
	return failure(rpc, registry.InstanceKey{Alloc: c.Task.Alloc, Task: c.Task.Task}, err, nil)
}

// broken is the error of an answer that cannot be believed.
func (c *Conn) broken(rpc registry.RPC, format string, args ...any) error {
	return registry.Errorf(registry.ErrInternal, "%s of %s: %s", rpc, c.Task, fmt.Sprintf(format, args...))
}
