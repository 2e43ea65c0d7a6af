package journal

import "strings"

// state is a client's knowledge of one edge of the automaton: the existence of a volume, its attachment to one node,
// its staging on one node, or one publish.
type state string

const (
	down   state = ""       // never requested, or undone
	up     state = "up"     // requested and answered OK
	failed state = "failed" // requested and refused: part of the effect may exist
	unsure state = "unsure" // in flight, or answered without a certain outcome
)

// edge is one step up and its undo.
type edge struct {
	state    state
	upHash   string   // hash of the unsure call up
	downHash string   // hash of the unsure call down
	mutable  []string // names of mutable_parameters in the last call up
	undone   bool     // the edge was down, and since then there were only calls down
	flights  int      // calls in flight that move the edge
	usage    string   // usage in the last call up
	secrets  string   // keys of the secrets in the last call up
	sent     sent     // the last call
}

// sent is a call that moves an edge.
type sent struct {
	hash    string
	upwards bool
}

// hashOf returns the hash of the unsure call in a direction, or "" if there is none.
func (e *edge) hashOf(upwards bool) string {
	if upwards {
		return e.upHash
	}
	return e.downHash
}

func (e *edge) begin(l Line, upwards bool) {
	e.undone = !upwards && (e.undone || e.state == down)
	e.state, e.sent = unsure, sent{l.Hash, upwards}
	if upwards {
		e.upHash, e.usage, e.secrets, e.mutable = l.Hash, l.Usage, strings.Join(l.SecretKeys, " "), l.Mutable
	} else {
		e.downHash = l.Hash
	}
}

// mayBeUp reports whether a call up may have an effect that still exists.
func (e *edge) mayBeUp() bool { return e.state != down && !e.undone }

// end moves the edge by an answer. Only an answer with a certain outcome makes the edge certain.
func (e *edge) end(l Line, f *flight) {
	switch OutcomeOf(l.Code) {
	case Uncertain:
		return
	case Done:
		e.state = down
		if f.up {
			e.state = up
		}
	case Failed:
		e.state = f.afterRefusal(l.Code)
	}
	e.upHash, e.downHash = "", ""
}

// afterRefusal returns the state of an edge after a refused call. A refused call up leaves an edge that was up as it
// was. A refused creation means down. So does NOT_FOUND of an unstage or unpublish, and UNIMPLEMENTED if the edge was
// down. A refused deletion leaves an edge that was up as it was, unless the code is NOT_FOUND. FAILED_PRECONDITION of a
// deletion (in use) means up in any case. After any other refusal, part of the effect may exist and has to be undone.
func (f *flight) afterRefusal(code string) state {
	switch {
	case strings.HasPrefix(f.RPC, "CreateVolume") && f.before != up, f.RPC == "CreateSnapshot" && f.before != up,
		code == "UNIMPLEMENTED" && f.before == down:
		return down
	case code == "NOT_FOUND" && (f.RPC == "NodeUnstageVolume" || f.RPC == "NodeUnpublishVolume"):
		return down
	case f.up && f.before == up, f.deletes() && f.before == up && code != "NOT_FOUND", f.deletes() &&
		code == "FAILED_PRECONDITION":
		return up
	}
	return failed
}

func (f *flight) deletes() bool {
	return f.RPC == "DeleteVolume" || f.RPC == "DeleteSnapshot" || f.RPC == "DeleteVolumeGroupSnapshot"
}

// volume is a client's knowledge of one volume.
type volume struct {
	create  *edge
	nodes   map[string]*node
	other   map[string]*edge // calls without an undo, by RPC, node and name
	context *string          // volume_context in the answer to CreateVolume
	grown   *bool            // whether the last ControllerExpand requires the node's part
	bytes   int64            // size in the last answer to ControllerExpand

	ephemeral bool                // published without having been created
	denied    map[string]bool     // usages that the plugin did not confirm
	segments  []map[string]string // topology in which it can be reached; nil: everywhere
}

// node is the state of one volume on one node.
type node struct {
	attach  edge
	stage   edge
	expand  edge             // of the present stage or publish
	refused bool             // NodeExpand has answered that the volume cannot be expanded as it is mounted now
	publish map[string]*edge // by target path
	staging string           // the one staging path
	context *string          // publish_context in the answer to ControllerPublish
}

// volume returns the volume with this ID. A volume that was never created in the journal counts as existing, because it
// may have been provisioned elsewhere.
func (c *checker) volume(plugin, id string) *volume {
	key := volumeKey{plugin, id}
	v := c.volumes[key]
	if v == nil {
		v = &volume{create: &edge{state: up}, nodes: map[string]*node{}, other: map[string]*edge{}}
		c.volumes[key] = v
	}
	return v
}

func (v *volume) node(id string) *node {
	n := v.nodes[id]
	if n == nil {
		n = &node{publish: map[string]*edge{}}
		v.nodes[id] = n
	}
	return n
}

func (n *node) target(path string) *edge {
	e := n.publish[path]
	if e == nil {
		e = &edge{}
		n.publish[path] = e
	}
	return e
}

// forget removes an edge that is down.
func (n *node) forget(path string, e *edge) {
	if n.publish[path] == e {
		delete(n.publish, path)
	}
}

// resetExpansion forgets the volume's expansion on the node, because the volume is mounted again or not at all.
func (n *node) resetExpansion() {
	flights := n.expand.flights
	n.expand, n.refused = edge{flights: flights}, false
}

// inUse reports whether the volume is, or may be, on this node.
func (n *node) inUse() bool {
	return n.attach.mayBeUp() || n.stage.mayBeUp() || n.mayBePublished()
}

func (n *node) mayBePublished() bool {
	for _, e := range n.publish {
		if e.mayBeUp() {
			return true
		}
	}
	return false
}

func (v *volume) anyPublished() bool {
	for _, n := range v.nodes {
		if n.mayBePublished() {
			return true
		}
	}
	return false
}

// edge returns the edge that a call moves, and whether the call is up. It returns nil for a call that moves none.
func (c *checker) edge(l Line) (*edge, bool) {
	switch l.RPC {
	case "CreateVolume":
		return named(c.creates, volumeKey{l.Plugin, l.Name}, down), true
	case "CreateSnapshot":
		return named(c.snaps, volumeKey{l.Plugin, l.Name}, down), true
	case "DeleteSnapshot":
		return named(c.snapshots, volumeKey{l.Plugin, l.Snapshot}, up), false
	case "CreateVolumeGroupSnapshot":
		return named(c.groups, volumeKey{l.Plugin, l.Name}, down), true
	case "DeleteVolumeGroupSnapshot":
		return named(c.groupIDs, volumeKey{l.Plugin, l.Group}, up), false
	}
	if l.Volume == "" || !Mutates(l.RPC) {
		return nil, false
	}
	v, upwards := c.volume(l.Plugin, l.Volume), !undoes[l.RPC]
	switch l.RPC {
	case "DeleteVolume":
		return v.create, upwards
	case "ControllerPublishVolume", "ControllerUnpublishVolume":
		return &v.node(l.Node).attach, upwards
	case "NodeStageVolume", "NodeUnstageVolume":
		return &v.node(c.nodeOf(l)).stage, upwards
	case "NodePublishVolume", "NodeUnpublishVolume":
		return v.node(c.nodeOf(l)).target(l.Target), upwards
	case "NodeExpandVolume":
		return &v.node(c.nodeOf(l)).expand, upwards
	}
	key := l.RPC + "\x00" + l.Node + "\x00" + l.Name
	if v.other[key] == nil {
		v.other[key] = &edge{}
	}
	return v.other[key], upwards
}

// named returns the edge with a key. A new edge gets the state unseen.
func named(edges map[volumeKey]*edge, key volumeKey, unseen state) *edge {
	if edges[key] == nil {
		edges[key] = &edge{state: unseen}
	}
	return edges[key]
}
