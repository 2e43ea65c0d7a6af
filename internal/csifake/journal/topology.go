package journal

import (
	"slices"
	"strings"
)

// topology is R26.
func (c *checker) topology(l Line) {
	if k := c.of(l); l.Topology && k.service.known && !k.service.now["VOLUME_ACCESSIBILITY_CONSTRAINTS"] {
		c.report("R26", "%s with topology, but %s does not advertise VOLUME_ACCESSIBILITY_CONSTRAINTS", l.RPC,
			l.Instance)
	}
	id := l.Node
	switch l.RPC {
	case "ControllerPublishVolume":
	case "NodeStageVolume", "NodePublishVolume":
		id = c.nodeOf(l)
	default:
		return
	}
	v := c.volume(l.Plugin, l.Volume)
	if at, told := c.plugin(l.Plugin).nodes[id]; told && !reaches(v.segments, at.segments) {
		c.report("R26", "%s of %s on %s, which is at %v, but the volume is at %v", l.RPC, l.Volume, id, at.segments,
			v.segments)
	}
}

// reaches tells whether a node is in one of the places where a volume is. Keys are the same in any case.
func reaches(volume []map[string]string, node map[string]string) bool {
	at := map[string]string{}
	for k, s := range node {
		at[strings.ToLower(k)] = s
	}
	return len(volume) == 0 || slices.ContainsFunc(volume, func(place map[string]string) bool {
		for k, s := range place {
			if at[strings.ToLower(k)] != s {
				return false
			}
		}
		return true
	})
}

func first(all []map[string]string) map[string]string {
	if len(all) == 0 {
		return nil
	}
	return all[0]
}
