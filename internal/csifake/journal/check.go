package journal

import (
	"cmp"
	"fmt"
	"slices"
)

// Check holds a journal against the CSI automaton and says what broke it, in the order of the lines.
func Check(lines []Line, o Options) []Violation {
	c := &checker{opts: o, last: map[string]int{}, stopped: map[string]bool{}, open: map[callID]*flight{},
		learnt: map[string]*learnt{}, plugins: map[string]*plugin{}, volumes: map[volumeKey]*volume{},
		creates: map[volumeKey]*edge{}, stagings: map[placeKey]string{},
		gone: map[callID]int64{}}
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
	if calls == 0 && !o.Empty {
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

// checker reads a journal from top to bottom, as the client's knowledge grows.
type checker struct {
	opts  Options
	found []Violation
	at    int // number of the line being read

	last    map[string]int   // run -> its last line
	stopped map[string]bool  // runs that said that they ended
	gone    map[callID]int64 // when the caller of a call went away
	open    map[callID]*flight

	learnt   map[string]*learnt // by instance
	plugins  map[string]*plugin
	volumes  map[volumeKey]*volume
	creates  map[volumeKey]*edge // CreateVolume by name: the id is not known yet
	stagings map[placeKey]string // staging path -> the volume that it is of
}

type volumeKey struct{ plugin, id string }
type placeKey struct{ plugin, node, path string }

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
	case Start, Stop:
		c.cut(l)
	}
}

func (c *checker) begin(l Line) {
	c.inFlight(l)
	c.knowsCapabilities(l)
	c.paths(l)
	c.contexts(l)
	c.nodeID(l)
	f := &flight{Line: l, at: c.at}
	if e, up := c.edge(l); e != nil {
		c.order(l)
		c.retry(l, e, up)
		f.edge, f.up, f.before = e, up, e.state
		e.begin(l, up)
	}
	c.open[callID{l.Run, l.Call}] = f
}

// end applies an answer that the caller saw. An answer to a caller that had gone teaches nobody anything.
func (c *checker) end(l Line) {
	id := callID{l.Run, l.Call}
	f := c.open[id]
	delete(c.open, id)
	if f == nil || f.abandoned {
		return
	}
	if f.edge != nil {
		f.edge.end(l, f)
	}
	if l.Code == "OK" && l.Answer != nil {
		c.learn(f.Line, *l.Answer)
	}
}

// reboot: what was staged or published on the node is gone.
func (c *checker) reboot(l Line) {
	for key, v := range c.volumes {
		if key.plugin != l.Plugin {
			continue
		}
		if n := v.nodes[l.Node]; n != nil {
			n.stage, n.publish = edge{}, map[string]*edge{}
		}
	}
}

// cut: a run that started or stopped has no call open that was begun before it.
func (c *checker) cut(l Line) {
	for id := range c.open {
		if id.run == l.Run {
			delete(c.open, id)
		}
	}
}
