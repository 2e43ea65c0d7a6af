package csi

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// Limits of a description. It is stored, and every event of the plugin has it.
const (
	maxVersion      = 128     // bytes (CSI "Size Limits")
	maxTopology     = 4 << 10 // bytes of names and values (CSI "Size Limits")
	maxCapabilities = 256     // of one service; CSI 1.13 has 15
)

// Probe asks whether the plugin is ready. An answer without the field ready means yes (CSI ProbeResponse).
func (c *Conn) Probe(ctx context.Context) (ready bool, err error) {
	const rpc = "Probe"
	l, err := c.connect(ctx)
	if err != nil {
		return false, c.askError(rpc, err)
	}
	var reply csi.ProbeResponse
	err = c.ask(ctx, l, "Identity", rpc, &csi.ProbeRequest{}, &reply)
	return err == nil && (reply.GetReady() == nil || reply.GetReady().GetValue()), err
}

// Describe asks the plugin to describe itself in each of the roles. A success makes the description current (Outdated).
func (c *Conn) Describe(
	ctx context.Context, roles []registry.Role,
) (map[registry.Role]registry.Fingerprint, error) {
	l, err := c.connect(ctx)
	if err != nil {
		return nil, registry.Errorf(registry.ErrUnavailable, "%s", status.Convert(err).Message())
	}
	changes := c.changes.Load()
	out, err := c.describe(ctx, l, roles)
	if err == nil {
		c.described.Store(changes)
	}
	return out, err
}

func (c *Conn) describe(
	ctx context.Context, l *link, roles []registry.Role,
) (map[registry.Role]registry.Fingerprint, error) {
	base, err := c.identity(ctx, l)
	if err != nil {
		return nil, err
	}
	out := map[registry.Role]registry.Fingerprint{}
	for _, role := range roles {
		if out[role], err = c.describeRole(ctx, l, role, base.Clone()); err != nil {
			return nil, err
		}
	}
	node, serves := out[registry.RoleNode]
	if serves && node.NodeID == "" && out[registry.RoleController].Has(registry.AttachDetach) {
		return nil, specViolation("NodeGetInfo",
			"it is not implemented, but the controller attaches volumes to nodes and needs the node's id")
	}
	l.setDescription(out)
	return out, nil
}

// describeRole returns base with the plugin's description of one role.
func (c *Conn) describeRole(
	ctx context.Context, l *link, role registry.Role, base registry.Fingerprint,
) (registry.Fingerprint, error) {
	var err error
	switch role {
	case registry.RoleController:
		if err = c.controllerCapabilities(ctx, l, &base); err == nil &&
			slices.Contains(base.Capabilities, registry.PluginGroups) {
			err = c.groupCapabilities(ctx, l, &base)
		}
	case registry.RoleNode:
		if err = c.nodeCapabilities(ctx, l, &base); err == nil {
			err = c.nodeInfo(ctx, l, &base)
		}
	}
	if err != nil {
		return registry.Fingerprint{}, err
	}
	slices.Sort(base.Capabilities)
	base.Capabilities = slices.Compact(base.Capabilities)
	return base, nil
}

// pluginName is the form of GetPluginInfo.name: domain notation, at most 63 characters, letters and digits at both
// ends.
var pluginName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

// identity asks for the plugin's name, version and capabilities. It stores the name in the link, for metrics.
func (c *Conn) identity(ctx context.Context, l *link) (registry.Fingerprint, error) {
	const rpc = "GetPluginInfo"
	var info csi.GetPluginInfoResponse
	err := c.ask(ctx, l, "Identity", rpc, &csi.GetPluginInfoRequest{}, &info)
	f := registry.Fingerprint{Provider: info.GetName(), Version: redactor{}.redact(info.GetVendorVersion())}
	switch {
	case err != nil:
		return f, err
	case !pluginName.MatchString(f.Provider):
		return f, specViolation(rpc, "invalid plugin name %q: it must be 1 to 63 characters in domain notation",
			redactor{}.redact(f.Provider))
	case len(f.Version) > maxVersion:
		return f, specViolation(rpc, "the plugin's version is longer than %d bytes", maxVersion)
	}
	l.driver.Store(&f.Provider)
	var reply csi.GetPluginCapabilitiesResponse
	err = c.ask(ctx, l, "Identity", "GetPluginCapabilities", &csi.GetPluginCapabilitiesRequest{}, &reply)
	for _, one := range bounded(reply.GetCapabilities()) {
		if s := one.GetService(); s != nil {
			addCapability(&f, "plugin", s.GetType())
		}
		if e := one.GetVolumeExpansion(); e != nil {
			addCapability(&f, "expansion", e.GetType())
		}
	}
	return f, err
}

func (c *Conn) controllerCapabilities(ctx context.Context, l *link, f *registry.Fingerprint) error {
	var reply csi.ControllerGetCapabilitiesResponse
	err := c.ask(ctx, l, "Controller", "ControllerGetCapabilities", &csi.ControllerGetCapabilitiesRequest{}, &reply)
	for _, one := range bounded(reply.GetCapabilities()) {
		if r := one.GetRpc(); r != nil {
			addCapability(f, "controller", r.GetType())
		}
	}
	return err
}

// groupCapabilities ignores a missing service that the plugin has announced, because only group snapshots need it.
func (c *Conn) groupCapabilities(ctx context.Context, l *link, f *registry.Fingerprint) error {
	const rpc = "GroupControllerGetCapabilities"
	var reply csi.GroupControllerGetCapabilitiesResponse
	err := l.invoke(ctx, &callTrace{}, "GroupController", rpc, &csi.GroupControllerGetCapabilitiesRequest{}, &reply)
	switch {
	case status.Code(err) == codes.Unimplemented:
		return nil
	case err != nil:
		return c.askError(rpc, err)
	}
	for _, one := range bounded(reply.GetCapabilities()) {
		if r := one.GetRpc(); r != nil {
			addCapability(f, "group", r.GetType())
		}
	}
	return nil
}

func (c *Conn) nodeCapabilities(ctx context.Context, l *link, f *registry.Fingerprint) error {
	var reply csi.NodeGetCapabilitiesResponse
	err := c.ask(ctx, l, "Node", "NodeGetCapabilities", &csi.NodeGetCapabilitiesRequest{}, &reply)
	for _, one := range bounded(reply.GetCapabilities()) {
		if r := one.GetRpc(); r != nil {
			addCapability(f, "node", r.GetType())
		}
	}
	return err
}

// nodeInfo ignores a missing NodeGetInfo: the node ID is only needed if the plugin's controller attaches volumes.
func (c *Conn) nodeInfo(ctx context.Context, l *link, f *registry.Fingerprint) error {
	const rpc = "NodeGetInfo"
	var info csi.NodeGetInfoResponse
	err := l.invoke(ctx, &callTrace{}, "Node", rpc, &csi.NodeGetInfoRequest{}, &info)
	switch {
	case status.Code(err) == codes.Unimplemented:
		return nil
	case err != nil:
		return c.askError(rpc, err)
	}
	topology := info.GetAccessibleTopology().GetSegments()
	if f.NodeID, err = registry.ParseNodeID(info.GetNodeId()); err != nil {
		return specViolation(rpc, "%v", err)
	}
	if info.GetMaxVolumesPerNode() < 0 {
		return specViolation(rpc, "max_volumes_per_node is %d; it cannot be negative", info.GetMaxVolumesPerNode())
	}
	if n := size(topology); n > maxTopology {
		return specViolation(rpc, "accessible_topology has %d bytes; %d are allowed", n, maxTopology)
	}
	f.MaxVolumes, f.Topology = info.GetMaxVolumesPerNode(), topology
	return nil
}

// bounded returns the first maxCapabilities entries of a list.
func bounded[T any](list []T) []T { return list[:min(len(list), maxCapabilities)] }

// size returns the number of bytes of names and values.
func size(m map[string]string) (n int) {
	for k, v := range m {
		n += len(k) + len(v)
	}
	return n
}

// retiredCapabilities are the capabilities that CSI had up to version 1.12. CSI keeps their numbers reserved.
var retiredCapabilities = map[registry.Capability]registry.Capability{
	"controller.11": registry.ListCondition,
	"node.4":        registry.NodeCondition,
}

// addCapability adds a capability of the service. If this build does not know its type, the type is a number.
func addCapability(f *registry.Fingerprint, service string, capability fmt.Stringer) {
	c := registry.Capability(service + "." + capability.String())
	f.Capabilities = append(f.Capabilities, cmp.Or(retiredCapabilities[c], c))
}

// specViolation returns the error of an answer that breaks the CSI specification.
func specViolation(rpc registry.RPC, format string, args ...any) error {
	return registry.Errorf(registry.ErrInternal, "%s: %s", rpc, fmt.Sprintf(format, args...))
}
