package journal

import (
	"cmp"
	"fmt"
	"slices"
)

// Check compares a journal with the CSI automaton and returns violations in the order of the lines. Its time grows
// linearly with the number of lines.
func Check(lines []Line, o Options) []Violation {
	c := newChecker(o)
	for i, l := range lines {
		c.last[l.Run] = i + 1
		if l.Kind == Stop {
			c.stopped[l.Run] = true
		}
		if l.Kind == Abandoned {
			c.gone[callID{l.Run, l.Call}] = l.Mono
		}
	}
	calls := 0
	for i, l := range lines {
		c.at = i + 1
		c.line(l)
		if l.Kind == Begin {
			calls++
		}
	}
	c.at = 0
	if calls == 0 {
		c.report("R0", "the journal has no call in it: nothing was judged")
	}
	if o.Settled {
		c.settled()
	}
	slices.SortStableFunc(c.found, func(a, b Violation) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Rule, b.Rule), cmp.Compare(a.Text, b.Text))
	})
	return c.found
}

// checker reads a journal from top to bottom, and with it follows the knowledge of the client. It looks everything up
// by a key and never searches earlier lines.
type checker struct {
	opts  Options
	found []Violation
	at    int // number of the current line

	last    map[string]int   // run -> number of its last line
	stopped map[string]bool  // runs that wrote a stop
	gone    map[callID]int64 // time when the caller of a call went away
	open    map[callID]*flight
	ended   map[callID]*flight                // with ByNode
	busy    map[subjectKey]map[callID]*flight // the open calls, by their subjects

	learnt      map[string]*learnt // by instance
	plugins     map[string]*plugin
	volumes     map[volumeKey]*volume
	creates     map[volumeKey]*edge   // CreateVolume by name, because the ID is not known yet
	snaps       map[volumeKey]*edge   // CreateSnapshot by name
	snapshots   map[volumeKey]*edge   // the same edges by the ID of the snapshot
	groups      map[volumeKey]*edge   // CreateVolumeGroupSnapshot by name
	groupIDs    map[volumeKey]*edge   // the same edges by the ID of the group
	members     map[*edge][]string    // IDs of the snapshots of a group; nil: no answer has named them
	grouped     map[volumeKey]bool    // IDs of snapshots that belong to a group
	stagings    map[placeKey]string   // staging path -> its volume
	targets     map[placeKey]string   // target path -> the volume last published there
	tokens      map[listKey]bool      // tokens with which a list may continue
	attachments map[nodeKey]volumeSet // volumes that are certainly attached to a node
}

type (
	volumeKey  struct{ plugin, id string }
	nodeKey    struct{ plugin, node string }
	placeKey   struct{ plugin, node, path string }
	subjectKey struct{ plugin, subject string }
	listKey    struct{ of, rpc, token string } // of a plugin for its tokens, of an instance for pages
	volumeSet  map[string]bool
)

func newChecker(o Options) *checker {
	return &checker{opts: o, last: map[string]int{}, stopped: map[string]bool{}, gone: map[callID]int64{},
		open: map[callID]*flight{}, ended: map[callID]*flight{}, busy: map[subjectKey]map[callID]*flight{},
		learnt: map[string]*learnt{}, plugins: map[string]*plugin{}, volumes: map[volumeKey]*volume{},
		groups: map[volumeKey]*edge{}, groupIDs: map[volumeKey]*edge{}, members: map[*edge][]string{},
		grouped: map[volumeKey]bool{},
		creates: map[volumeKey]*edge{}, snaps: map[volumeKey]*edge{}, snapshots: map[volumeKey]*edge{},
		stagings: map[placeKey]string{}, targets: map[placeKey]string{}, tokens: map[listKey]bool{},
		attachments: map[nodeKey]volumeSet{}}
}

func (c *checker) report(rule, format string, args ...any) {
	if slices.Contains(c.opts.Allow, rule) {
		return
	}
	c.found = append(c.found, Violation{Rule: rule, Line: c.at, Text: fmt.Sprintf(format, args...)})
}

func (c *checker) line(l Line) {
	switch l.Kind {
	case Begin:
		c.begin(l)
	case Abandoned:
		if f := c.open[callID{l.Run, l.Call}]; f != nil {
			f.abandoned = true
		}
	case End:
		c.end(l)
	case Reboot:
		c.reboot(l)
	case Start:
		c.endpoint(l)
		c.cut(l)
	case Stop:
		c.cut(l)
	}
}

func (c *checker) begin(l Line) {
	f := &flight{Line: l, at: c.at}
	e, up := c.edge(l)
	f.repeats = e != nil && l.Role != "node" && e.sent == sent{l.Hash, up}
	f.needless = e != nil && l.Role == "node" && !up && e.state == down
	c.checkOverlaps(f)
	c.knowsCapabilities(l)
	c.identity(l)
	c.limits(l)
	c.lists(l)
	c.paths(l)
	c.contexts(l)
	c.nodeID(l)
	c.access(l)
	c.topology(l)
	c.wholeGroup(l)
	c.blocks(l)
	if e != nil {
		c.order(l)
		c.retry(l, e, up)
		// With ByNode, such a call changes nothing if its effect is there already, whatever its answer is.
		if !c.opts.ByNode || !(f.repeats || f.needless) || e.state != position(up) {
			f.edge, f.up, f.before = e, up, e.state
			e.begin(l, up)
		}
	}
	c.addOpen(f)
}

// position returns the state to which a call in a direction moves an edge.
func position(upwards bool) state {
	if upwards {
		return up
	}
	return down
}

// end applies an answer that the caller has received. Two answers change nothing: one to a caller that was gone, and
// one that cannot be read. An answer with a new volume or snapshot but without its ID leaves the outcome unsure.
func (c *checker) end(l Line) {
	f := c.removeOpen(callID{l.Run, l.Call})
	if f == nil || f.abandoned || l.Lost || l.nameless(f.RPC) {
		return
	}
	if f.edge != nil {
		f.edge.end(l, f)
		c.arrived(f, l.Code)
	}
	if l.Code == "OK" && l.Answer != nil {
		c.learn(f.Line, *l.Answer)
	}
}

func (l Line) nameless(rpc string) bool {
	if l.Code != "OK" || l.Answer == nil {
		return false
	}
	return rpc == "CreateVolume" && l.Answer.Volume == "" || rpc == "CreateSnapshot" && l.Answer.Snapshot == "" ||
		rpc == "CreateVolumeGroupSnapshot" && l.Answer.Group == ""
}

// arrived updates the lookup tables after a call has moved an edge.
func (c *checker) arrived(f *flight, code string) {
	switch f.RPC {
	case "ControllerPublishVolume", "ControllerUnpublishVolume":
		key := nodeKey{f.Plugin, f.Node}
		if c.attachments[key] == nil {
			c.attachments[key] = volumeSet{}
		}
		if f.edge.state == up {
			c.attachments[key][f.Volume] = true
		} else {
			delete(c.attachments[key], f.Volume)
		}
	case "NodeExpandVolume":
		n := c.volume(f.Plugin, f.Volume).node(c.nodeOf(f.Line))
		n.refused = n.refused || code == "FAILED_PRECONDITION"
	case "NodeStageVolume", "NodeUnstageVolume":
		if n := c.volume(f.Plugin, f.Volume).node(c.nodeOf(f.Line)); n.stage.state != f.before {
			n.resetExpansion()
		}
	case "NodePublishVolume", "NodeUnpublishVolume":
		if f.edge.state == down && f.edge.flights == 0 {
			v := c.volume(f.Plugin, f.Volume)
			v.node(c.nodeOf(f.Line)).forget(f.Target, f.edge)
			v.ephemeral = v.ephemeral && v.anyPublished()
		}
		if n := c.volume(f.Plugin, f.Volume).node(c.nodeOf(f.Line)); n.stage.state == down && !n.mayBePublished() {
			n.resetExpansion()
		}
	}
}

// reboot applies a reboot: nothing is staged or published on the node any more.
func (c *checker) reboot(l Line) {
	for key, v := range c.volumes {
		if key.plugin != l.Plugin {
			continue
		}
		if n := v.nodes[l.Node]; n != nil {
			n.stage, n.publish = edge{}, map[string]*edge{}
			n.resetExpansion()
		}
		v.ephemeral = v.ephemeral && v.anyPublished()
	}
}

// cut ends the open calls of a run that has started or stopped.
func (c *checker) cut(l Line) {
	for id := range c.open {
		if id.run == l.Run {
			c.removeOpen(id)
		}
	}
}
