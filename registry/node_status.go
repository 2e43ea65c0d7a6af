package registry

import (
	"slices"
	"strings"
	"time"
)

// NodeStatus is a node with what a scheduler or an operator needs to know of it. A node that is not in a cluster is
// always alive.
type NodeStatus struct {
	Node
	Alive bool `json:"alive"` // its lease in etcd is valid; else the node is suspect
	// AliveSince is when the lease began, SuspectSince when the queried node saw it end; zero: not known.
	AliveSince   time.Time `json:"alive_since,omitzero"`
	SuspectSince time.Time `json:"suspect_since,omitzero"`

	// Stale says why the status may be outdated: etcd does not answer. Empty: it is current.
	Stale string `json:"stale,omitempty"`
	// Unformed says how many of the expected nodes have registered. Empty: all have, or the node is in no cluster.
	Unformed string `json:"unformed,omitempty"`

	// Plugins are by name: those with an instance on the node, and those whose volumes are in use there.
	Plugins []NodePluginStatus `json:"plugins,omitempty"`
}

// NodePluginStatus is a plugin on a node, and the use of its volumes there.
type NodePluginStatus struct {
	NodePlugin
	Executor    bool `json:"executor,omitempty"` // the node makes the plugin's controller calls
	Claims      int  `json:"claims"`             // of allocs on the node
	Attachments int  `json:"attachments"`        // of volumes to the node
}

// NodeFeasible says whether a node can take an alloc.
type NodeFeasible struct {
	Node    NodeName     `json:"node"`
	Reasons []Infeasible `json:"reasons,omitempty"` // none: it can
}

// Health returns the health of the plugin in a role; empty: no instance has registered on the node.
func (p NodePlugin) Health(role Role) HealthState {
	healthy := p.Node
	if role == RoleController {
		healthy = p.Controller
	}
	switch {
	case healthy:
		return Healthy
	case role == RoleNode && p.NodeUnhealthy, role == RoleController && p.ControllerUnhealthy:
		return Unhealthy
	}
	return ""
}

// Registered reports whether the plugin has an instance on the node. A plugin without one is in a NodeStatus if its
// volumes are still in use there.
func (p NodePlugin) Registered() bool { return p.Health(RoleNode)+p.Health(RoleController) != "" }

// Find returns an instance made from the node's description of its plugin.
func (n Node) Find(role Role, id PluginID) (Instance, bool) {
	for _, p := range n.Plugins {
		if health := p.Health(role); p.Plugin == id && health != "" {
			return Instance{InstanceKey: InstanceKey{Role: role, Plugin: id}, Health: Health{State: health},
				Fingerprint: Fingerprint{NodeID: p.NodeID, MaxVolumes: p.MaxVolumes, Topology: p.Topology,
					Capabilities: p.Capabilities}}, true
		}
	}
	return Instance{}, false
}

// SuspectSince returns since when this node sees another one as suspect; zero: no stored event says so.
func (v View) SuspectSince(n NodeName) (since time.Time) {
	events, _ := v.Events(0, MaxEvents)
	for _, e := range events {
		if e.Kind == EventNodeSuspect && e.Node == n {
			since = e.At
		}
	}
	return since
}

// NodeStatus returns the status of a node with this record.
func (v View) NodeStatus(n Node, claims []Claim, attachments []Attachment) NodeStatus {
	lease, alive := v.NodeLease(n.Name)
	out := NodeStatus{Node: n, Alive: alive, AliveSince: lease.Since}
	reasons := []string{n.Reason, n.Fencing.Failed}
	if v.Formation().Cluster != "" {
		out.Unformed = v.Unformed()
		if !alive {
			out.SuspectSince = v.SuspectSince(n.Name)
		}
	}
	out.Reason = strings.Join(slices.DeleteFunc(reasons, func(s string) bool { return s == "" }), "; ")
	for _, p := range n.Plugins {
		status := NodePluginStatus{NodePlugin: p}
		if e, held := v.Executor(p.Plugin); held {
			status.Executor = e.Holder == n.Name
		}
		out.Plugins = append(out.Plugins, status)
	}
	for _, c := range claims {
		if c.Node == n.Name {
			out.plugin(c.Volume.Plugin).Claims++
		}
	}
	for _, a := range attachments {
		if a.Node == n.Name {
			out.plugin(a.Volume.Plugin).Attachments++
		}
	}
	slices.SortFunc(out.Plugins, func(a, b NodePluginStatus) int {
		return strings.Compare(string(a.Plugin), string(b.Plugin))
	})
	return out
}

// plugin returns the status of a plugin, which it adds if it is missing.
func (s *NodeStatus) plugin(id PluginID) *NodePluginStatus {
	i := slices.IndexFunc(s.Plugins, func(p NodePluginStatus) bool { return p.Plugin == id })
	if i < 0 {
		i, s.Plugins = len(s.Plugins), append(s.Plugins, NodePluginStatus{NodePlugin: NodePlugin{Plugin: id}})
	}
	return &s.Plugins[i]
}
