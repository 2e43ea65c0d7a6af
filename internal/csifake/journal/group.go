package journal

import (
	"slices"
	"strings"
)

// group is a client's knowledge of one group snapshot.
type group struct {
	edge    edge
	members []string // ids of its snapshots; nil: no answer has named them
}

// groupNamed returns the group with a key. A new group gets the state unseen.
func groupNamed(of map[volumeKey]*group, key volumeKey, unseen state) *group {
	if of[key] == nil {
		of[key] = &group{edge: edge{state: unseen}}
	}
	return of[key]
}

// tookGroup records the answer to CreateVolumeGroupSnapshot. A snapshot of the group exists as long as the group.
func (c *checker) tookGroup(l Line, a Answer) {
	g := groupNamed(c.groups, volumeKey{l.Plugin, l.Name}, down)
	g.members = slices.Sorted(slices.Values(a.Snapshots))
	c.groupIDs[volumeKey{l.Plugin, a.Group}] = g
	for _, id := range a.Snapshots {
		c.snapshots[volumeKey{l.Plugin, id}], c.grouped[volumeKey{l.Plugin, id}] = &g.edge, true
	}
}

// wholeGroup checks R32.
func (c *checker) wholeGroup(l Line) {
	if l.RPC == "DeleteSnapshot" && c.grouped[volumeKey{l.Plugin, l.Snapshot}] {
		c.report("R32", "%s for snapshot %s, which belongs to a group", l.RPC, l.Snapshot)
	}
	g := c.groupIDs[volumeKey{l.Plugin, l.Group}]
	if g != nil && g.members != nil && !slices.Equal(slices.Sorted(slices.Values(l.Snapshots)), g.members) {
		c.report("R32", "%s for group %s with the snapshots %s, but it has %s", l.RPC, l.Group,
			strings.Join(l.Snapshots, " "), strings.Join(g.members, " "))
	}
}

// blocks checks R33.
func (c *checker) blocks(l Line) {
	if l.RPC != "GetMetadataAllocated" && l.RPC != "GetMetadataDelta" {
		return
	}
	for _, id := range []string{l.Snapshot, l.Base} {
		if id == "" {
			continue
		}
		c.mustBeUp(l, "R33", named(c.snapshots, volumeKey{l.Plugin, id}, up), "snapshot "+id)
	}
}
