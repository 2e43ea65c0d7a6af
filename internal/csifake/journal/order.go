package journal

import (
	"maps"
	"slices"
	"strings"
)

// order checks R2 and R4: the states that must be certain before a call may be sent.
func (c *checker) order(l Line) {
	switch l.RPC {
	case "CreateVolume":
		c.source(l)
	case "CreateVolumeGroupSnapshot":
		for _, id := range l.Volumes {
			c.mustBeUp(l, "R2", c.volume(l.Plugin, id).create, "volume "+id)
		}
	}
	if l.Volume == "" {
		return
	}
	v := c.volume(l.Plugin, l.Volume)
	if c.ephemeral(l, v) {
		return
	}
	switch l.RPC {
	case "ControllerPublishVolume", "ControllerModifyVolume", "CreateSnapshot":
		c.mustBeUp(l, "R2", v.create, "the volume")
	case "ControllerExpandVolume":
		c.mustBeUp(l, "R2", v.create, "the volume")
		c.offline(l, v)
	case "NodeStageVolume":
		c.attached(l, v)
	case "NodePublishVolume":
		if c.stages(l, v) {
			c.mustBeUp(l, "R2", &v.node(c.nodeOf(l)).stage, "its staging")
		} else {
			c.attached(l, v)
		}
	case "NodeUnstageVolume":
		c.unpublished(l, v.node(c.nodeOf(l)))
	case "ControllerUnpublishVolume":
		if l.Node != "" {
			c.nodeDown(l, v, l.Node)
		}
	case "DeleteVolume":
		for _, id := range slices.Sorted(maps.Keys(v.nodes)) {
			c.mustBeDown(l, &v.nodes[id].attach, "its attachment to "+id)
			c.nodeDown(l, v, id)
		}
	case "NodeExpandVolume":
		c.expandable(l, v)
	}
}

// source checks the source of a new volume.
func (c *checker) source(l Line) {
	from, id, _ := strings.Cut(l.Source, " ")
	switch from {
	case "volume":
		c.mustBeUp(l, "R2", c.volume(l.Plugin, id).create, "its source")
	case "snapshot":
		c.mustBeUp(l, "R2", named(c.snapshots, volumeKey{l.Plugin, id}, up), "its source")
	}
}

// ephemeral reports whether the call is for an ephemeral volume, which is only published and unpublished.
func (c *checker) ephemeral(l Line, v *volume) bool {
	switch l.RPC {
	case "NodePublishVolume":
		if l.Ephemeral && v.context != nil && v.create.state == up {
			c.report("R2", "volume %s is published as an ephemeral one, but CreateVolume has made it", l.Volume)
		}
		v.ephemeral = v.ephemeral || l.Ephemeral
	case "NodeUnpublishVolume":
	default:
		if v.ephemeral && Mutates(l.RPC) {
			c.report("R2", "%s for volume %s, which is ephemeral", l.RPC, l.Volume)
		}
	}
	return v.ephemeral
}

func (c *checker) attached(l Line, v *volume) {
	if c.plugin(l.Plugin).attaches {
		c.mustBeUp(l, "R2", &v.node(c.nodeOf(l)).attach, "its attachment")
		return
	}
	c.mustBeUp(l, "R2", v.create, "the volume")
}

func (c *checker) nodeDown(l Line, v *volume, id string) {
	n := v.node(id)
	c.mustBeDown(l, &n.stage, "its staging on "+id)
	c.unpublished(l, n)
}

func (c *checker) unpublished(l Line, n *node) {
	for _, path := range slices.Sorted(maps.Keys(n.publish)) {
		c.mustBeDown(l, n.publish[path], "its publication at "+path)
	}
}

func (c *checker) mustBeUp(l Line, rule string, e *edge, what string) {
	switch e.state {
	case up:
	case unsure:
		c.report("RU", "%s for %s while %s is uncertain", l.RPC, l.subject(), what)
	default:
		c.report(rule, "%s for %s before %s was there", l.RPC, l.subject(), what)
	}
}

func (c *checker) mustBeDown(l Line, e *edge, what string) {
	switch e.state {
	case down:
	case unsure:
		c.report("RU", "%s for volume %s while %s is uncertain", l.RPC, l.Volume, what)
	default:
		c.report("R4", "%s for volume %s before %s was undone", l.RPC, l.Volume, what)
	}
}

// retry checks R6. An edge has only two calls, so the next call is either the same call or its undo. If it is the same
// call, all its fields must be the same. A modification may follow another one if it has values for all parameters of
// that one.
func (c *checker) retry(l Line, e *edge, upwards bool) {
	if l.RPC == "ControllerModifyVolume" && len(l.Mutable) > 0 &&
		!slices.ContainsFunc(e.mutable, func(name string) bool { return !slices.Contains(l.Mutable, name) }) {
		return
	}
	if was := e.hashOf(upwards); e.state == unsure && was != "" && was != l.Hash {
		c.report("R6", "%s for %s is sent again with other fields while its first outcome is uncertain",
			l.RPC, l.subject())
	}
}

// expandable checks R30.
func (c *checker) expandable(l Line, v *volume) {
	switch k := c.instance(l); {
	case v.grown != nil && !*v.grown:
		c.report("R30", "NodeExpandVolume for volume %s though ControllerExpandVolume did not ask for it", l.Volume)
	case v.grown == nil && c.plugin(l.Plugin).expands:
		c.report("R30", "NodeExpandVolume for volume %s before ControllerExpandVolume", l.Volume)
	case c.plugin(l.Plugin).expands && l.Bytes > v.bytes:
		c.report("R30", "NodeExpandVolume for volume %s to %d bytes; ControllerExpandVolume has answered that it has "+
			"%d", l.Volume, l.Bytes, v.bytes)
	case v.node(c.nodeOf(l)).refused:
		c.report("R30", "NodeExpandVolume for volume %s again, though the plugin has refused it for the present mount",
			l.Volume)
	case k.node.ever["STAGE_UNSTAGE_VOLUME"] && v.node(c.nodeOf(l)).stage.state != up:
		c.report("R30", "NodeExpandVolume for volume %s, which is not staged", l.Volume)
	case !k.node.ever["STAGE_UNSTAGE_VOLUME"] && !v.node(c.nodeOf(l)).isPublished():
		c.report("R30", "NodeExpandVolume for volume %s, which is not published", l.Volume)
	case !v.node(c.nodeOf(l)).isAt(l.Path):
		c.report("R30", "NodeExpandVolume for volume %s at %s, where it is not for certain", l.Volume, l.Path)
	}
}

// offline checks the other part of R30: if a plugin only expands OFFLINE, the volume must not be in use.
func (c *checker) offline(l Line, v *volume) {
	p := c.plugin(l.Plugin)
	if !p.expansion["OFFLINE"] || p.expansion["ONLINE"] {
		return
	}
	for _, id := range slices.Sorted(maps.Keys(v.nodes)) {
		n := v.nodes[id]
		if p.attaches && n.attach.state != down || !p.attaches && n.inUse() {
			c.report("R30", "ControllerExpandVolume for volume %s, which is in use on %s, but the plugin expands "+
				"OFFLINE only", l.Volume, id)
		}
	}
}

// isAt reports whether the volume is certainly staged or published at the path.
func (n *node) isAt(path string) bool {
	if path == n.staging && n.stage.state == up {
		return true
	}
	e := n.publish[path]
	return e != nil && e.state == up
}

func (n *node) isPublished() bool {
	for _, e := range n.publish {
		if e.state == up {
			return true
		}
	}
	return false
}

// settled checks R8 and the last part of RU: every call up was undone, with a certain outcome.
func (c *checker) settled() {
	for _, key := range slices.SortedFunc(maps.Keys(c.volumes), volumeKey.compare) {
		v := c.volumes[key]
		for _, id := range slices.Sorted(maps.Keys(v.nodes)) {
			n := v.nodes[id]
			for _, path := range slices.Sorted(maps.Keys(n.publish)) {
				c.mustBeGone(key, n.publish[path], "published at "+path)
			}
			c.mustBeGone(key, &n.stage, "staged on "+id)
			c.mustBeGone(key, &n.attach, "attached to "+id)
		}
	}
	for _, created := range []struct {
		what  string
		edges map[volumeKey]*edge
	}{{"volume", c.creates}, {"group snapshot", c.groups}, {"snapshot", c.snaps}} {
		for _, key := range slices.SortedFunc(maps.Keys(created.edges), volumeKey.compare) {
			if created.edges[key].state == unsure {
				c.report("RU", "whether the %s named %q exists is not known", created.what, key.id)
			}
		}
	}
}

func (c *checker) mustBeGone(key volumeKey, e *edge, how string) {
	switch e.state {
	case up:
		c.report("R8", "volume %s of %s is still %s", key.id, key.plugin, how)
	case unsure, failed:
		c.report("RU", "volume %s of %s may still be %s: its last call failed, or its outcome is not known",
			key.id, key.plugin, how)
	}
}
