package controller

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"holdfast/registry"
)

// checkTopology adds a reason if the volume is not accessible from the node. It compares topologies only if the plugin
// has VOLUME_ACCESSIBILITY_CONSTRAINTS, because without it they mean nothing.
func (r *refusals) checkTopology(v registry.Volume, node registry.Instance) {
	if f := node.Fingerprint; f.Has(registry.PluginTopology) && !registry.Accessible(v.Accessible, f.Topology) {
		r.add(registry.InfeasibleTopology, "volume %s is accessible from %s, but plugin %s reports %s for node %s",
			v.VolumeName(), registry.Topologies(v.Accessible), v.Plugin, registry.Topology(f.Topology), r.claim.Node)
	}
}

// checkPreferred returns an ErrInvalid if topology_request prefers a topology that it does not require (CSI
// TopologyRequirement.preferred).
func checkPreferred(s registry.VolumeSpec) error {
	for _, preferred := range s.Preferred {
		if len(s.Required) > 0 && !slices.ContainsFunc(s.Required, preferred.Equal) {
			return registry.Invalid("topology_request of volume %s prefers %s, which required does not list; "+
				"add it to required, or remove it from preferred", s.VolumeName(), preferred)
		}
	}
	return nil
}

// checkRequired returns an ErrInvalid if topology_request.required excludes this node, and no other node could use the
// volume. It returns nil if no node plugin reports its topology.
func (m *Controller) checkRequired(at registry.Instance, s registry.VolumeSpec) error {
	node, known := m.Plugins.Find(registry.RoleNode, s.Plugin)
	others := m.clustered() && !at.Local() // other nodes could use the volume
	if !known || others || !at.Fingerprint.Has(registry.PluginTopology) ||
		!node.Fingerprint.Has(registry.PluginTopology) ||
		registry.Accessible(s.Required, node.Fingerprint.Topology) {
		return nil
	}
	return registry.Invalid("topology_request.required of volume %s allows %s, but plugin %s reports %s for "+
		"this node, which could not use the volume; correct required",
		s.VolumeName(), registry.Topologies(s.Required), s.Plugin, registry.Topology(node.Fingerprint.Topology))
}

// checkLimit adds a reason if the node has its maximum of volumes of the plugin (max_volumes_per_node; 0: no limit),
// and this volume is not yet among them. It reads the claims through View.Aside, so that claims of other nodes are no
// condition of the commit. Instead, Claim takes the claims of this node for the plugin one at a time.
func (r *refusals) checkLimit(view registry.View, node registry.Instance, planned []registry.Claim, here bool) {
	limit := node.Fingerprint.MaxVolumes
	if limit == 0 {
		return
	}
	placed := placedOn(view.Aside(), r.claim.Volume.Plugin, r.claim.Node, planned, here)
	if _, counted := placed[r.claim.Volume]; counted || int64(len(placed)) < limit {
		return
	}
	var holders []registry.Claim
	var texts []string
	for _, p := range placed {
		holders, texts = append(holders, p.claims...), append(texts, p.String())
	}
	slices.Sort(texts)
	slices.SortFunc(holders, func(a, b registry.Claim) int { return cmp.Compare(a.Key().Path, b.Key().Path) })
	r.addHeld(holders, registry.InfeasibleLimit,
		"no room for volume %s: plugin %s allows %d volumes on node %s, and %d are there: %s", r.claim.Name,
		r.claim.Volume.Plugin, limit, r.claim.Node, len(placed), strings.Join(texts, ", "))
}

// placedVolume is a volume that counts against the limit of a node.
type placedVolume struct {
	name   string
	claims []registry.Claim
	users  []string // for people
}

// placedOn returns the volumes of the plugin that count against the limit of the node, each once. These are claimed,
// attached or staged there, or used there by clients of the CSI endpoint. Inline volumes do not count, because no
// controller publishes them. here means that the node is this one: only its stagings are known.
func placedOn(
	view registry.View, plugin registry.PluginID, node registry.NodeName, planned []registry.Claim, here bool,
) map[registry.VolumeKey]*placedVolume {
	all := map[registry.VolumeKey]*placedVolume{}
	count := func(key registry.VolumeKey, name string, user string) *placedVolume {
		if all[key] == nil {
			all[key] = &placedVolume{name: name}
		}
		p := all[key]
		if user != "" && !slices.Contains(p.users, user) {
			p.users = append(p.users, user)
		}
		return p
	}
	for _, c := range append(view.ClaimsAt(plugin), planned...) {
		if v, _ := view.VolumeByKey(c.Volume); c.Node != node || c.Volume.Plugin != plugin || v.Ephemeral {
			continue
		}
		user := fmt.Sprintf("alloc %s", c.Alloc)
		if alloc, known := view.Alloc(c.Alloc); known && alloc.Job != "" {
			user += " of job " + alloc.Job
		}
		p := count(c.Volume, c.Name.String(), user)
		p.claims = append(p.claims, c)
	}
	for _, a := range view.AttachmentsAt(plugin) {
		if a.Node == node {
			count(a.Volume, a.Name.String(), "")
		}
	}
	for _, s := range view.StagingsAt(plugin) {
		if here && s.State != registry.MarkNone {
			count(s.Volume, s.Name.String(), "")
		}
	}
	for _, u := range view.EndpointUsesAt(plugin) {
		if u.Node == node && u.Target != "" {
			count(u.Volume, fmt.Sprintf("%q", u.Volume.External), "a client of the CSI endpoint")
		}
	}
	return all
}

// String names the volume and its users.
func (p *placedVolume) String() string {
	if len(p.users) == 0 {
		return p.name + " (being released)"
	}
	return fmt.Sprintf("%s (%s)", p.name, strings.Join(p.users, ", "))
}
