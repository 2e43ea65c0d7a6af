package journal

import (
	"slices"
	"strings"
)

// learnGroup records the answer to CreateVolumeGroupSnapshot. A snapshot of the group exists as long as the group.
func (c *checker) learnGroup(l Line, a Answer) {
	group := named(c.groups, volumeKey{l.Plugin, l.Name}, down)
	c.members[group] = slices.Sorted(slices.Values(a.Snapshots))
	c.groupIDs[volumeKey{l.Plugin, a.Group}] = group
	for _, id := range a.Snapshots {
		c.snapshots[volumeKey{l.Plugin, id}], c.grouped[volumeKey{l.Plugin, id}] = group, true
	}
}

// wholeGroup checks R32.
func (c *checker) wholeGroup(l Line) {
	if l.RPC == "DeleteSnapshot" && c.grouped[volumeKey{l.Plugin, l.Snapshot}] {
		c.report("R32", "%s for snapshot %s, which belongs to a group", l.RPC, l.Snapshot)
	}
	members := c.members[c.groupIDs[volumeKey{l.Plugin, l.Group}]]
	if members != nil && !slices.Equal(slices.Sorted(slices.Values(l.Snapshots)), members) {
		c.report("R32", "%s for group %s with the snapshots %s, but it has %s", l.RPC, l.Group,
			strings.Join(l.Snapshots, " "), strings.Join(members, " "))
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
