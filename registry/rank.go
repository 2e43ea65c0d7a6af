package registry

import (
	"cmp"
	"slices"
)

// group identifies the instances of one role of a plugin. One of them is active.
type group struct {
	role   Role
	plugin PluginID
}

func (k InstanceKey) group() group { return group{k.Role, k.Plugin} }

// compareRank orders instances newest first. Instances of one transaction share a CreateIndex and sort by key.
func compareRank(a, b *Instance) int {
	return cmp.Or(cmp.Compare(b.rank(), a.rank()), compareKey(a.InstanceKey, b.InstanceKey))
}

// rank returns the index that ranks the instance. To prefer an instance counts as creating it.
func (i *Instance) rank() Seq { return max(i.CreateIndex, i.Preferred) }

// compareInstances orders instances by role, plugin, then newest first.
func compareInstances(a, b *Instance) int {
	return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Plugin, b.Plugin), compareRank(a, b))
}

func compareKey(a, b InstanceKey) int {
	return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Plugin, b.Plugin), cmp.Compare(a.Alloc, b.Alloc),
		cmp.Compare(a.Task, b.Task))
}

// activeOf returns the newest healthy member of a group, else the newest, else nil. Members are sorted newest first.
func activeOf(members []*Instance) *Instance {
	for _, i := range members {
		if i.Health.State == Healthy {
			return i
		}
	}
	if len(members) == 0 {
		return nil
	}
	return members[0]
}

// insertRanked returns a copy of members with i at its rank. It replaces an instance of the same key.
func insertRanked(members []*Instance, i *Instance) []*Instance {
	out := append(withoutKey(members, i.InstanceKey), i)
	slices.SortFunc(out, compareRank)
	return out
}

// withoutKey returns a copy of members without the instance of key k.
func withoutKey(members []*Instance, k InstanceKey) []*Instance {
	out := make([]*Instance, 0, len(members)+1)
	for _, i := range members {
		if i.InstanceKey != k {
			out = append(out, i)
		}
	}
	return out
}

// member returns the instance of key k, or nil.
func member(members []*Instance, k InstanceKey) *Instance {
	for _, i := range members {
		if i.InstanceKey == k {
			return i
		}
	}
	return nil
}
