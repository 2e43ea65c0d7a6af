package journal

import "strings"

// state is what a client knows of one edge of the automaton: one volume's existence, its attachment to one node, its
// staging on one node, one publication.
type state string

const (
	down   state = ""       // never asked for, or undone
	up     state = "up"     // asked for and answered OK
	failed state = "failed" // asked for and refused: part of the effect may be there
	unsure state = "unsure" // in flight, or answered in a way that says nothing
)

// edge is one step up and its negation.
type edge struct {
	state    state
	upHash   string   // of the call upwards that is unsure
	downHash string   // of the call downwards that is unsure
	mutable  []string // names of mutable_parameters of the call upwards
	undone   bool     // it was down before the last call, which was downwards
	flights  int      // calls that move it just now
	usage    string   // that the last call upwards asked for
	secrets  string   // keys of the secrets in the last call upwards
	sent     sent     // the last call
}

// sent is a call that moves an edge.
type sent struct {
	hash    string
	upwards bool
}

// hashOf is the hash of the unsure call in a direction, empty if there is none.
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

// mayBeUp reports whether a call upwards may have had an effect that is still there.
func (e *edge) mayBeUp() bool { return e.state != down && !e.undone }

// end moves the edge by an answer. Only a determinate answer makes it certain.
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

// afterRefusal: a refused call upwards leaves what was certain as it was; anything else has to be undone, for part of
// it may be there. What was not found, or is not implemented, is not there. A volume whose deletion was refused is
// there: it may be used again. One that is in use is, whatever came of an earlier try.
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

// volume is what a client knows of one volume.
type volume struct {
	create  *edge
	nodes   map[string]*node
	other   map[string]*edge // calls without a negation, by RPC, node and name
	context *string          // volume_context as CreateVolume answered it
	grown   *bool            // what ControllerExpand last said of the node's part
	bytes   int64            // that ControllerExpand last said the volume has

	ephemeral bool                // published without having been made
	denied    map[string]bool     // usages that the plugin did not confirm
	segments  []map[string]string // where it can be reached from; nil is from everywhere
}

// node is one volume on one node.
type node struct {
	attach  edge
	stage   edge
	expand  edge             // while it is staged or published as it is
	refused bool             // NodeExpand has answered that it cannot be, as the volume is mounted
	publish map[string]*edge // by target path
	staging string           // the one staging path
	context *string          // publish_context as ControllerPublish answered it
}

// volume that this line is about. One that was never seen created is taken to exist: it was provisioned elsewhere.
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

// anew: what is known of the volume's expansion on the node does not count any more. It is mounted anew, or not at all.
func (n *node) anew() {
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

// edge that a call moves, and whether upwards; nil for a call that moves none.
func (c *checker) edge(l Line) (*edge, bool) {
	switch l.RPC {
	case "CreateVolume":
		return named(c.creates, volumeKey{l.Plugin, l.Name}, down), true
	case "CreateSnapshot":
		return named(c.snaps, volumeKey{l.Plugin, l.Name}, down), true
	case "DeleteSnapshot":
		return named(c.snapshots, volumeKey{l.Plugin, l.Snapshot}, up), false
	case "CreateVolumeGroupSnapshot":
		return &groupNamed(c.groups, volumeKey{l.Plugin, l.Name}, down).edge, true
	case "DeleteVolumeGroupSnapshot":
		return &groupNamed(c.groupIDs, volumeKey{l.Plugin, l.Group}, up).edge, false
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

// named returns the edge of a key; a new one gets the state unseen.
func named(edges map[volumeKey]*edge, key volumeKey, unseen state) *edge {
	if edges[key] == nil {
		edges[key] = &edge{state: unseen}
	}
	return edges[key]
}
