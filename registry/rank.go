package registry

import (
	"cmp"
	"slices"
)

// group is what instances compete in: one of them is the active one.
type group struct {
	role   Role
	plugin PluginID
}

func (k InstanceKey) group() group { return group{k.Role, k.Plugin} }

// CompareRank orders instances newest first. Those of one transaction have one CreateIndex; their keys decide.
func CompareRank(a, b Instance) int { return compareRank(&a, &b) }

func compareRank(a, b *Instance) int {
	return cmp.Or(cmp.Compare(b.CreateIndex, a.CreateIndex), compareKey(a.InstanceKey, b.InstanceKey))
}

func compareKey(a, b InstanceKey) int {
	return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Plugin, b.Plugin), cmp.Compare(a.Alloc, b.Alloc),
		cmp.Compare(a.Task, b.Task))
}

// activeOf is the active one of a group's members, which are newest first: the newest healthy one, else the newest; nil
// if there is none.
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

// enrol is members with i in its rank, in place of one of the same key. It shares no array with members.
func enrol(members []*Instance, i *Instance) []*Instance {
	out := append(strike(members, i.InstanceKey), i)
	slices.SortFunc(out, compareRank)
	return out
}

// strike is members without the one of the key. It shares no array with members.
func strike(members []*Instance, k InstanceKey) []*Instance {
	out := make([]*Instance, 0, len(members)+1)
	for _, i := range members {
		if i.InstanceKey != k {
			out = append(out, i)
		}
	}
	return out
}

// member is the one of the key, nil if there is none.
func member(members []*Instance, k InstanceKey) *Instance {
	for _, i := range members {
		if i.InstanceKey == k {
			return i
		}
	}
	return nil
}
