package journal

import (
	"path/filepath"
	"strings"
)

// paths checks R9, R10, R11 and R12: the paths of a request.
func (c *checker) paths(l Line) {
	if l.Role != "node" || l.Volume == "" {
		return
	}
	n := c.volume(l.Plugin, l.Volume).node(c.nodeOf(l))
	switch l.RPC {
	case "NodeStageVolume":
		c.stagingDirectory(l)
	case "NodePublishVolume":
		c.stagingIffStages(l)
		c.target(l, n)
	case "NodeUnpublishVolume":
		if !filepath.IsAbs(l.Target) {
			c.report("R11", "the target path %q of volume %s is not absolute", l.Target, l.Volume)
		}
	case "NodeGetVolumeStats", "NodeGetVolumeHealth", "NodeExpandVolume":
		c.whereItIs(l, c.volume(l.Plugin, l.Volume), n)
	}
	if l.Staging != "" {
		c.oneStagingPath(l, n)
	}
}

// whereItIs checks R12 for calls about a volume that is already staged or published.
func (c *checker) whereItIs(l Line, v *volume, n *node) {
	k := c.instance(l).node
	switch {
	case !k.known:
	case l.Staging != "" && !k.ever["STAGE_UNSTAGE_VOLUME"]:
		c.report("R12", "%s with a staging path, but %s does not stage", l.RPC, l.Instance)
	case l.Staging == "" && k.now["STAGE_UNSTAGE_VOLUME"] && !v.ephemeral:
		c.report("R12", "%s of %s without its staging path, but %s stages", l.RPC, l.Volume, l.Instance)
	}
	if e := n.publish[l.Path]; l.Path != n.staging && (e == nil || e.state == down) {
		c.report("R12", "%s of %s at %s, where the volume is not", l.RPC, l.Volume, l.Path)
	}
}

func (c *checker) stagingDirectory(l Line) {
	if !filepath.IsAbs(l.Staging) {
		c.report("R9", "the staging path %q of volume %s is not absolute", l.Staging, l.Volume)
	}
	if l.Look != nil && l.Look.Staging != "" && l.Look.Staging != "dir" {
		c.report("R9", "the staging path %s of volume %s is no directory but %s", l.Staging, l.Volume, l.Look.Staging)
	}
}

func (c *checker) stagingIffStages(l Line) {
	k := c.instance(l).node
	switch {
	case !k.known:
	case l.Ephemeral && l.Staging != "":
		c.report("R12", "NodePublishVolume of the ephemeral volume %s with a staging path", l.Volume)
	case l.Ephemeral:
	case k.now["STAGE_UNSTAGE_VOLUME"] && l.Staging == "":
		c.report("R12", "NodePublishVolume of %s without a staging path, but %s stages", l.Volume, l.Instance)
	case !k.ever["STAGE_UNSTAGE_VOLUME"] && l.Staging != "":
		c.report("R12", "NodePublishVolume of %s with a staging path, but %s does not stage", l.Volume, l.Instance)
	}
}

func (c *checker) oneStagingPath(l Line, n *node) {
	if n.staging == "" {
		n.staging = l.Staging
	}
	if n.staging != l.Staging {
		c.report("R10", "%s has volume %s at the staging path %s, before it was %s", l.RPC, l.Volume, l.Staging,
			n.staging)
	}
	place := placeKey{l.Plugin, c.nodeOf(l), l.Staging}
	if owner, taken := c.stagings[place]; taken && owner != l.Volume {
		c.report("R10", "%s has volume %s at the staging path of volume %s", l.RPC, l.Volume, owner)
		return
	}
	c.stagings[place] = l.Volume
}

func (c *checker) target(l Line, n *node) {
	if !filepath.IsAbs(l.Target) {
		c.report("R11", "the target path %q of volume %s is not absolute", l.Target, l.Volume)
	}
	if owner := c.targetOwner(l); owner != "" {
		c.report("R11", "volume %s is published at %s, where volume %s is", l.Volume, l.Target, owner)
	}
	if l.Target == l.Staging {
		c.report("R11", "the target path of volume %s is its staging path", l.Volume)
	}
	if l.Look == nil {
		return
	}
	if l.Look.Parent != "" && l.Look.Parent != "dir" {
		c.report("R11", "the parent of the target %s is no directory but %s", l.Target, l.Look.Parent)
	}
	if fresh := n.publish[l.Target] == nil || n.publish[l.Target].state == down; fresh &&
		l.Look.Target != "" && l.Look.Target != "absent" {
		c.report("R11", "the target %s is there (%s) before the plugin has made it", l.Target, l.Look.Target)
	}
}

// targetOwner returns another volume of the same plugin and node that is, or may be, published at the same path.
func (c *checker) targetOwner(l Line) string {
	id := c.nodeOf(l)
	place := placeKey{l.Plugin, id, l.Target}
	owner := c.targets[place]
	c.targets[place] = l.Volume
	if owner == "" || owner == l.Volume {
		return ""
	}
	if e := c.volume(l.Plugin, owner).node(id).publish[l.Target]; e == nil || e.state == down {
		return ""
	}
	return owner
}

// contexts checks R13 and R15: the contexts that a request passes on.
func (c *checker) contexts(l Line) {
	if l.Volume == "" {
		return
	}
	v := c.volume(l.Plugin, l.Volume)
	switch l.RPC {
	case "ControllerPublishVolume":
		if k := c.instance(l).controller; l.ReadOnly && k.known && !k.now["PUBLISH_READONLY"] {
			c.report("R15", "ControllerPublishVolume of %s with readonly, which is not advertised", l.Volume)
		}
		c.volumeContext(l, v)
	case "ControllerUnpublishVolume":
		c.sameSecrets(l, v)
	case "NodeStageVolume", "NodePublishVolume":
		if l.Ephemeral {
			break // no CreateVolume in the journal has answered with its volume_context
		}
		c.volumeContext(l, v)
		c.publishContext(l, v.node(c.nodeOf(l)))
	case "ValidateVolumeCapabilities":
		c.volumeContext(l, v)
	}
}

func (c *checker) volumeContext(l Line, v *volume) {
	if v.context != nil && *v.context != l.VolumeContext {
		c.report("R13", "%s of %s has another volume_context than CreateVolume answered", l.RPC, l.Volume)
	}
}

func (c *checker) publishContext(l Line, n *node) {
	if n.context != nil && *n.context != l.PublishContext {
		c.report("R13", "%s of %s has another publish_context than ControllerPublishVolume answered", l.RPC, l.Volume)
	}
	if n.context == nil && l.PublishContext != "" && c.plugin(l.Plugin).controller && !c.plugin(l.Plugin).attaches {
		c.report("R13", "%s of %s has a publish_context, but the plugin does not attach", l.RPC, l.Volume)
	}
}

// sameSecrets checks R25. It compares only keys, because a journal has no values.
func (c *checker) sameSecrets(l Line, v *volume) {
	n := v.nodes[l.Node]
	if n == nil || n.attach.state == down {
		return
	}
	if now := strings.Join(l.SecretKeys, " "); now != n.attach.secrets {
		c.report("R25", "ControllerUnpublishVolume of %s has the secrets %q, ControllerPublishVolume had %q", l.Volume,
			now, n.attach.secrets)
	}
}

// nodeID checks R14.
func (c *checker) nodeID(l Line) {
	if l.RPC != "ControllerPublishVolume" && l.RPC != "ControllerUnpublishVolume" {
		return
	}
	known := c.plugin(l.Plugin).nodes
	_, told := known[l.Node]
	switch {
	case l.Node == "":
		c.report("R14", "%s of %s without a node id: from every node", l.RPC, l.Volume)
	case len(l.Node) > 256:
		c.report("R14", "%s of %s with a node id of %d bytes", l.RPC, l.Volume, len(l.Node))
	case len(known) > 0 && !told:
		c.report("R14", "%s of %s with the node id %q, which no node has reported", l.RPC, l.Volume, l.Node)
	}
}
