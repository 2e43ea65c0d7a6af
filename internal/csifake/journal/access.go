package journal

import (
	"maps"
	"slices"
	"strings"
)

// access is R16, R17 and R28: who may use a volume, and how.
func (c *checker) access(l Line) {
	if l.Volume == "" || undoes[l.RPC] {
		return
	}
	v, id := c.volume(l.Plugin, l.Volume), l.Node
	switch l.RPC {
	case "ControllerPublishVolume":
		c.room(l, v)
	case "NodeStageVolume":
		id = c.nodeOf(l)
	case "NodePublishVolume":
		id = c.nodeOf(l)
		c.besideOthers(l, v.node(id))
	default:
		return
	}
	if v.denied[l.Usage] {
		c.report("R16", "%s of %s for %s, which the plugin did not confirm", l.RPC, l.Volume, l.Usage)
	}
	if singleNode(l.Usage) {
		c.onOneNode(l, v, id)
	}
}

func singleNode(usage string) bool { return strings.Contains(usage, " SINGLE_NODE_") }

// manyTargets tells whether a volume may be published twice on a node.
func manyTargets(usage string) bool {
	return !singleNode(usage) || strings.HasSuffix(usage, " SINGLE_NODE_MULTI_WRITER")
}

func (c *checker) onOneNode(l Line, v *volume, id string) {
	for _, other := range slices.Sorted(maps.Keys(v.nodes)) {
		if other != id && v.nodes[other].inUse() {
			c.report("R17", "%s of %s (%s) on %s while it is on %s", l.RPC, l.Volume, l.Usage, id, other)
		}
	}
}

// besideOthers judges a publication beside those at other targets.
func (c *checker) besideOthers(l Line, n *node) {
	for _, path := range slices.Sorted(maps.Keys(n.publish)) {
		e := n.publish[path]
		if path == l.Target || e.state != up && e.state != unsure {
			continue
		}
		switch {
		case e.usage != l.Usage:
			c.report("R17", "volume %s is published with the capability %q while it is at %s with %q", l.Volume,
				l.Usage, path, e.usage)
		case !manyTargets(l.Usage):
			c.report("R17", "volume %s (%s) is published while it is at %s", l.Volume, l.Usage, path)
		}
	}
}

// room is R28.
func (c *checker) room(l Line, v *volume) {
	most := c.plugin(l.Plugin).nodes[l.Node].most
	if have := len(c.attachments[nodeKey{l.Plugin, l.Node}]); most > 0 && int64(have) >= most &&
		v.node(l.Node).attach.state != up {
		c.report("R28", "volume %s is attached to %s, which has %d volumes and takes no more than %d", l.Volume, l.Node,
			have, most)
	}
}

// confirmed takes in what ValidateVolumeCapabilities answered.
func (v *volume) confirmed(asked, denied []string) {
	if v.denied == nil {
		v.denied = map[string]bool{}
	}
	for _, usage := range asked {
		delete(v.denied, usage)
	}
	for _, usage := range denied {
		v.denied[usage] = true
	}
}
