package journal

import (
	"maps"
	"strings"
)

// flight is a call that has begun and not ended.
type flight struct {
	Line
	at        int
	abandoned bool
	edge      *edge
	up        bool
	before    state // of the edge
	repeats   bool  // the last controller call for the same edge
}

// skew is how much later than another plugin's line the loss of a caller may be noticed. A caller that gave up a call
// at one process and turned to another is seen by the two in either order, and late on a busy machine.
const skew = 2_000_000_000 // nanoseconds

func (f *flight) keys() (keys []subjectKey) {
	for _, subject := range f.subjects() {
		keys = append(keys, subjectKey{f.Plugin, subject})
	}
	return keys
}

func (c *checker) takeOff(f *flight) {
	id := callID{f.Run, f.Call}
	c.open[id] = f
	for _, key := range f.keys() {
		if c.busy[key] == nil {
			c.busy[key] = map[callID]*flight{}
		}
		c.busy[key][id] = f
	}
	if f.edge != nil {
		f.edge.flights++
	}
}

// land is the end of a call, whatever it was; nil if there is none.
func (c *checker) land(id callID) *flight {
	f := c.open[id]
	if f == nil {
		return nil
	}
	delete(c.open, id)
	if c.opts.ByNode {
		c.ended[id] = f
	}
	for _, key := range f.keys() {
		if delete(c.busy[key], id); len(c.busy[key]) == 0 {
			delete(c.busy, key)
		}
	}
	if f.edge != nil {
		f.edge.flights--
	}
	return f
}

// inFlight is R3. A call that its caller gave up is no longer in flight for the caller, though it may still run.
func (c *checker) inFlight(l *flight) {
	for _, subject := range l.subjects() {
		c.alone(l, subject)
	}
}

// overlap reports whether two calls may overlap as several hosts share a volume: one on a node and one for another
// node, or a controller call that a host repeats, because it had begun it before another host did, and the same call or
// one on a node.
func (c *checker) overlap(a, b *flight) bool {
	node := a.Role == "node" || b.Role == "node"
	apart := a.Node != b.Node && a.Node != "" && b.Node != ""
	same := a.RPC == b.RPC && a.Hash == b.Hash && a.Run != b.Run
	return c.opts.ByNode && (node && apart || (a.repeats || b.repeats) && (node || same))
}

func (c *checker) alone(l *flight, subject string) {
	for id, f := range maps.Clone(c.busy[subjectKey{l.Plugin, subject}]) {
		if c.dead(id.run) {
			c.land(id)
			continue
		}
		if c.overlap(l, f) {
			continue
		}
		same := f.RPC == l.RPC && f.Hash == l.Hash
		switch {
		case !f.abandoned && !c.abandonedSoon(f, l.Line):
			c.report("R3", "%s for %s began while %s of line %d was in flight", l.RPC, subject, f.RPC, f.at)
		case c.opts.Strict && !same:
			c.report("R3", "%s for %s began while another call, the abandoned %s of line %d, was still running",
				l.RPC, subject, f.RPC, f.at)
		}
	}
	for _, n := range l.Beside {
		id := callID{l.Run, n}
		if f := c.ended[id]; c.open[id] == nil && (f == nil || !c.overlap(l, f)) {
			c.report("R3", "%s for %s arrived while call %d of the same plugin was in flight", l.RPC, subject, n)
		}
	}
}

// dead: the run wrote nothing after this line and never said that it stopped. It was killed, or its journal ends here:
// its open calls may have ended.
func (c *checker) dead(run string) bool { return c.last[run] < c.at && !c.stopped[run] }

func (c *checker) abandonedSoon(f *flight, l Line) bool {
	gone, ok := c.gone[callID{f.Run, f.Call}]
	return ok && f.Run != l.Run && gone-l.Mono < skew
}

// subjects are what at most one call may be in flight for.
func (l Line) subjects() (all []string) {
	for _, id := range l.AllVolumes() {
		all = append(all, "volume "+id)
	}
	switch {
	case l.RPC == "CreateVolume":
		all = append(all, "name "+l.Name)
	case l.RPC == "DeleteVolumeGroupSnapshot":
		all = append(all, "group "+l.Group)
	}
	return all
}

func (l Line) subject() string { return strings.Join(l.subjects(), " and ") }

// AllVolumes are the volumes that a request names.
func (l Line) AllVolumes() []string {
	if l.Volume != "" {
		return []string{l.Volume}
	}
	return l.Volumes
}
