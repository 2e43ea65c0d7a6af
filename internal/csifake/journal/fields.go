package journal

import (
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// limits checks R18, R21 and R23: the contents of fields.
func (c *checker) limits(l Line) {
	for _, over := range l.Over {
		c.report("R18", "%s with too long a field: %s", l.RPC, over)
	}
	if strings.ContainsFunc(l.Name, banned) {
		c.report("R21", "%s with control characters in the name %q", l.RPC, l.Name)
	}
	for _, key := range l.SecretKeys {
		if !secretKey.MatchString(key) {
			c.report("R23", "%s with a secret under the key %q", l.RPC, key)
		}
	}
}

var secretKey = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

// banned reports whether no name may contain the character.
func banned(r rune) bool {
	return r <= 0x08 || r == 0x0b || r == 0x0c || r >= 0x0e && r <= 0x1f || r >= 0x7f && r <= 0x9f
}

var pluginName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$`)

// badName returns why the name of a plugin is invalid. It is empty for a valid name.
func badName(name string) string {
	switch {
	case name == "":
		return "has no name"
	case len(name) > 63:
		return fmt.Sprintf("has a name of %d bytes", len(name))
	case !pluginName.MatchString(name):
		return fmt.Sprintf("has the name %q", name)
	}
	return ""
}

func badNode(id string) string {
	switch {
	case id == "":
		return "has no node id"
	case len(id) > 256:
		return fmt.Sprintf("has a node id of %d bytes", len(id))
	}
	return ""
}

// identity checks R20, and R14 for the node: a plugin with an invalid name or node ID must get no volumes.
func (c *checker) identity(l Line) {
	k := c.instance(l)
	switch l.RPC {
	case "CreateVolume", "ControllerPublishVolume":
	case "NodeStageVolume", "NodePublishVolume":
		if k.badNode != "" {
			c.report("R14", "%s at %s, which %s", l.RPC, l.Instance, k.badNode)
		}
	default:
		return
	}
	if k.badName != "" {
		c.report("R20", "%s at %s, which %s", l.RPC, l.Instance, k.badName)
	}
}

// access checks R16, R17 and R28: access modes and limits of volumes.
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

// manyTargets reports whether a volume may be published twice on a node.
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

// besideOthers checks a publish against the publishes at other targets.
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

// room checks R28.
func (c *checker) room(l Line, v *volume) {
	most := c.plugin(l.Plugin).nodes[l.Node].most
	if have := len(c.attachments[nodeKey{l.Plugin, l.Node}]); most > 0 && int64(have) >= most &&
		v.node(l.Node).attach.state != up {
		c.report("R28", "volume %s is attached to %s, which has %d volumes and takes no more than %d", l.Volume, l.Node,
			have, most)
	}
}

// confirmed records the answer to ValidateVolumeCapabilities.
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

// topology checks R26.
func (c *checker) topology(l Line) {
	if k := c.instance(l); l.Topology && k.service.known && !k.service.now["VOLUME_ACCESSIBILITY_CONSTRAINTS"] {
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

// reaches reports whether a node is in one of the topologies of a volume. Keys are compared case-insensitively.
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

// lists checks R29.
func (c *checker) lists(l Line) {
	switch l.RPC {
	case "ListVolumes", "ListSnapshots", "ControllerListVolumeHealth":
	default:
		return
	}
	if l.Token != "" && !c.tokens[listKey{l.Plugin, l.RPC, l.Token}] {
		c.report("R29", "%s goes on with the token %q, which the plugin has not given", l.RPC, l.Token)
	}
}

// endpoint checks R31.
func (c *checker) endpoint(l Line) {
	path, unix := strings.CutPrefix(l.Endpoint, "unix://")
	if l.Endpoint != "" && (!unix || !filepath.IsAbs(path) || !strings.HasSuffix(path, ".sock")) {
		c.report("R31", "%s was started with CSI_ENDPOINT=%q", l.Instance, l.Endpoint)
	}
}
