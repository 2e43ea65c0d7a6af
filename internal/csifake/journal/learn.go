package journal

import (
	"cmp"
	"strings"
)

func (k volumeKey) compare(other volumeKey) int {
	return cmp.Or(cmp.Compare(k.plugin, other.plugin), cmp.Compare(k.id, other.id))
}

// caps are the capabilities of one service of one instance, as answered.
type caps struct {
	known bool
	now   map[string]bool // in the newest answer
	ever  map[string]bool // in any answer: an undo depends on the capabilities at the time of the call that it undoes
}

func (s *caps) learn(names []string) {
	s.known, s.now = true, map[string]bool{}
	if s.ever == nil {
		s.ever = map[string]bool{}
	}
	for _, name := range names {
		s.now[name], s.ever[name] = true, true
	}
}

// learnt has the answers of one instance about itself.
type learnt struct {
	service, controller, group, node caps
	nodeID                           string
	badNode, badName                 string // why its node ID or name breaks the rules; empty: it does not
}

// plugin has the answers of all instances of one plugin.
type plugin struct {
	nodes      map[string]place // answers to NodeGetInfo, by node ID
	expansion  map[string]bool
	controller bool // a controller has answered with its capabilities
	attaches   bool // the newest answer of a controller has PUBLISH_UNPUBLISH_VOLUME
	expands    bool // the newest answer of a controller has EXPAND_VOLUME
}

// place describes a node, as NodeGetInfo does.
type place struct {
	most     int64 // largest number of volumes
	segments map[string]string
}

func (c *checker) instance(l Line) *learnt {
	k := c.learnt[l.Instance]
	if k == nil {
		k = &learnt{}
		c.learnt[l.Instance] = k
	}
	return k
}

func (c *checker) plugin(name string) *plugin {
	p := c.plugins[name]
	if p == nil {
		p = &plugin{nodes: map[string]place{}}
		c.plugins[name] = p
	}
	return p
}

// nodeOf returns the node of a call to the node service: from NodeGetInfo if that was called, else from the line.
func (c *checker) nodeOf(l Line) string {
	if id := c.instance(l).nodeID; id != "" {
		return id
	}
	return l.Node
}

// learn records an answer that the client has received.
func (c *checker) learn(l Line, a Answer) {
	k, p := c.instance(l), c.plugin(l.Plugin)
	switch l.RPC {
	case "GetPluginCapabilities":
		k.service.learn(a.Caps)
		p.expansion = map[string]bool{}
		for _, how := range a.Expansion {
			p.expansion[how] = true
		}
	case "GetPluginInfo":
		k.badName = badName(a.Name)
	case "ControllerGetCapabilities":
		k.controller.learn(a.Caps)
		p.controller = true
		p.attaches, p.expands = k.controller.now["PUBLISH_UNPUBLISH_VOLUME"], k.controller.now["EXPAND_VOLUME"]
	case "GroupControllerGetCapabilities":
		k.group.learn(a.Caps)
	case "NodeGetCapabilities":
		k.node.learn(a.Caps)
	case "NodeGetInfo":
		k.nodeID, k.badNode = a.Node, badNode(a.Node)
		p.nodes[a.Node] = place{a.MaxVolumes, first(a.Segments)}
	case "CreateVolume":
		v := c.volume(l.Plugin, a.Volume)
		v.create, v.context, v.grown = named(c.creates, volumeKey{l.Plugin, l.Name}, down), &a.VolumeContext, nil
		v.segments, v.denied = a.Segments, nil
	case "CreateSnapshot":
		c.snapshots[volumeKey{l.Plugin, a.Snapshot}] = named(c.snaps, volumeKey{l.Plugin, l.Name}, down)
	case "CreateVolumeGroupSnapshot":
		c.learnGroup(l, a)
	case "ValidateVolumeCapabilities":
		c.volume(l.Plugin, l.Volume).confirmed(l.Usages, a.Denied)
	case "ListVolumes", "ListSnapshots", "ControllerListVolumeHealth":
		c.tokens[listKey{l.Plugin, l.RPC, a.Next}] = true
	case "ControllerPublishVolume":
		c.volume(l.Plugin, l.Volume).node(l.Node).context = &a.PublishContext
	case "ControllerExpandVolume":
		v := c.volume(l.Plugin, l.Volume)
		v.grown, v.bytes = &a.NodeExpand, a.Bytes
	}
}

// knowsCapabilities checks R1.
func (c *checker) knowsCapabilities(l Line) {
	k := c.instance(l)
	switch service, name, optional := strings.Cut(needs[l.RPC], "/"); {
	case optional:
		c.advertised(l, service, k.capsOf(service), name)
	case l.RPC == "ValidateVolumeCapabilities":
		c.advertised(l, "service", &k.service, "CONTROLLER_SERVICE")
	case l.RPC == "NodePublishVolume" || l.RPC == "NodeUnpublishVolume":
		if !k.node.known {
			c.report("R1", "%s before %s has told its node capabilities", l.RPC, l.Instance)
		}
	}
	c.knowsDetails(l, k)
}

// knowsDetails checks R1 for optional parts of an RPC.
func (c *checker) knowsDetails(l Line, k *learnt) {
	lacks := func(service, name, what string) {
		if set := k.capsOf(service); set.known && !set.now[name] {
			c.report("R1", "%s of %s, but %s does not advertise %s/%s", l.RPC, what, l.Instance, service, name)
		}
	}
	service := l.Role
	if service == "" {
		service = "controller"
	}
	for _, usage := range append([]string{l.Usage}, l.Usages...) {
		if strings.HasSuffix(usage, " SINGLE_NODE_SINGLE_WRITER") ||
			strings.HasSuffix(usage, " SINGLE_NODE_MULTI_WRITER") {
			lacks(service, "SINGLE_NODE_MULTI_WRITER", "the access mode in "+usage)
		}
	}
	if len(l.Mutable) > 0 {
		lacks("controller", "MODIFY_VOLUME", "mutable parameters")
	}
	if l.MountGroup && service == "node" {
		lacks("node", "VOLUME_MOUNT_GROUP", "a mount group")
	}
	switch from, _, _ := strings.Cut(l.Source, " "); from {
	case "snapshot":
		lacks("controller", "CREATE_DELETE_SNAPSHOT", "a snapshot")
	case "volume":
		lacks("controller", "CLONE_VOLUME", "another volume")
	}
}

// capsOf returns the capabilities of a service.
func (k *learnt) capsOf(service string) *caps {
	switch service {
	case "controller":
		return &k.controller
	case "group":
		return &k.group
	case "node":
		return &k.node
	}
	return &k.service
}

func (c *checker) advertised(l Line, service string, set *caps, name string) {
	switch {
	case !set.known:
		c.report("R1", "%s before %s has told its %s capabilities", l.RPC, l.Instance, service)
	case !set.now[name] && !(undoes[l.RPC] && set.ever[name]):
		c.report("R1", "%s, but %s does not advertise %s/%s", l.RPC, l.Instance, service, name)
	}
}

// stages reports whether NodePublish needs a staged volume: the instance announces staging, or has announced it before
// and the volume may be staged.
func (c *checker) stages(l Line, v *volume) bool {
	return c.instance(l).node.now["STAGE_UNSTAGE_VOLUME"] ||
		c.instance(l).node.ever["STAGE_UNSTAGE_VOLUME"] && v.node(c.nodeOf(l)).stage.state != down
}
