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
	before    state // state of the edge before the call
	repeats   bool  // the call repeats the last controller call for the same edge
	needless  bool  // the call undoes on a node what is down already, as after a reboot
}

// skew bounds how long after the begin of a call a second process may note that the caller has given up an earlier call
// to it. The two processes notice these events in either order, and late on a busy machine.
const skew = 2_000_000_000 // nanoseconds

func (f *flight) keys() (keys []subjectKey) {
	for _, subject := range f.subjects() {
		keys = append(keys, subjectKey{f.Plugin, subject})
	}
	return keys
}

func (c *checker) addOpen(f *flight) {
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

// removeOpen ends a call with any outcome. It returns nil if there is no such call.
func (c *checker) removeOpen(id callID) *flight {
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

// checkOverlaps checks R3 for each subject of a call: no other call is in flight for it, except as overlap allows. A
// call that its caller has given up does not count, even if it still runs. With Strict it counts, unless the request is
// identical.
func (c *checker) checkOverlaps(l *flight) {
	for _, subject := range l.subjects() {
		c.checkOverlap(l, subject)
	}
}

// overlap reports whether two calls may overlap because several hosts share a volume. A call on a node may overlap a
// call for another node. A controller call that a host repeats, because it had begun that call before another host did,
// may overlap the same call or a call on a node. While a host detaches the volumes of a lost node, that node may be
// back and unmount what a reboot has ended.
func (c *checker) overlap(a, b *flight) bool {
	node := a.Role == "node" || b.Role == "node"
	apart := a.Node != b.Node && a.Node != "" && b.Node != ""
	same := a.RPC == b.RPC && a.Hash == b.Hash && a.Run != b.Run
	back := a.needless && b.Role != "node" || b.needless && a.Role != "node"
	return c.opts.ByNode && (node && apart || (a.repeats || b.repeats) && (node || same) || back)
}

func (c *checker) checkOverlap(l *flight, subject string) {
	for id, f := range maps.Clone(c.busy[subjectKey{l.Plugin, subject}]) {
		if c.dead(id.run) {
			c.removeOpen(id)
			continue
		}
		if c.overlap(l, f) {
			continue
		}
		same := f.RPC == l.RPC && f.Hash == l.Hash
		switch {
		case !f.abandoned && !c.abandonedSoonAfter(f, l.Line):
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

// dead reports whether the run wrote nothing after the current line and did not write that it stopped. It was then
// killed, or its journal ends here, and its open calls may have ended.
func (c *checker) dead(run string) bool { return c.last[run] < c.at && !c.stopped[run] }

func (c *checker) abandonedSoonAfter(f *flight, l Line) bool {
	gone, ok := c.gone[callID{f.Run, f.Call}]
	return ok && f.Run != l.Run && gone-l.Mono < skew
}

// subjects returns the objects for which at most one call may be in flight.
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

// AllVolumes returns the volumes that a request names.
func (l Line) AllVolumes() []string {
	if l.Volume != "" {
		return []string{l.Volume}
	}
	return l.Volumes
}
