package journal

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
	upHash   string // of the call upwards that is unsure
	downHash string // of the call downwards that is unsure
}

// hashOf is the hash of the unsure call in a direction, empty if there is none.
func (e *edge) hashOf(upwards bool) string {
	if upwards {
		return e.upHash
	}
	return e.downHash
}

func (e *edge) begin(l Line, upwards bool) {
	e.state = unsure
	if upwards {
		e.upHash = l.Hash
	} else {
		e.downHash = l.Hash
	}
}

// end moves the edge to what the answer says. Only a determinate answer ends what is unsure.
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
// it may be there. What was not found, or is not implemented, is not there. A volume whose deletion was refused is there:
// it may be used again.
func (f *flight) afterRefusal(code string) state {
	switch {
	case f.RPC == "CreateVolume" && f.before != up, code == "UNIMPLEMENTED" && f.before == down:
		return down
	case code == "NOT_FOUND" && (f.RPC == "NodeUnstageVolume" || f.RPC == "NodeUnpublishVolume"):
		return down
	case f.up && f.before == up, f.RPC == "DeleteVolume" && f.before == up && code != "NOT_FOUND":
		return up
	}
	return failed
}

// volume is what a client knows of one volume.
type volume struct {
	create  *edge
	nodes   map[string]*node
	other   map[string]*edge // calls without a negation, by RPC, node and name
	context *string          // volume_context as CreateVolume answered it
	grown   *bool            // what ControllerExpand last said of the node's part
}

// node is one volume on one node.
type node struct {
	attach  edge
	stage   edge
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

// edge that a call moves, and whether upwards; nil for a call that moves none.
func (c *checker) edge(l Line) (*edge, bool) {
	if l.RPC == "CreateVolume" {
		return c.creation(l.Plugin, l.Name), true
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
	}
	key := l.RPC + "\x00" + l.Node + "\x00" + l.Name
	if v.other[key] == nil {
		v.other[key] = &edge{}
	}
	return v.other[key], upwards
}

func (c *checker) creation(plugin, name string) *edge {
	key := volumeKey{plugin, name}
	if c.creates[key] == nil {
		c.creates[key] = &edge{}
	}
	return c.creates[key]
}
