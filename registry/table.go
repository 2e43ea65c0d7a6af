package registry

import (
	"maps"
	"slices"
	"sync/atomic"
)

// table holds every instance as of one index. The table and the instances that it points to are immutable.
type table struct {
	index   Seq
	groups  map[group][]*Instance        // newest first; no group is empty
	ordered *atomic.Pointer[[]*Instance] // result of inOrder; shared by tables of the same instances
	changed chan struct{}                // closed when other instances are published
}

func newTable(index Seq, instances []Instance) *table {
	change := Change{}
	for _, i := range instances {
		change.Put = append(change.Put, i)
	}
	t := (&table{groups: map[group][]*Instance{}}).with(change)
	t.index = index
	return t
}

// with returns the table after c. It does not set the index.
func (t *table) with(c Change) *table {
	groups := maps.Clone(t.groups)
	for _, r := range c.Put {
		if i, ok := r.(Instance); ok {
			groups[i.group()] = insertRanked(groups[i.group()], &i)
		}
	}
	for _, k := range c.Delete {
		if k.Bucket != BucketInstances {
			continue
		}
		key := instanceKeyOf(k.Path)
		groups[key.group()] = withoutKey(groups[key.group()], key)
		if len(groups[key.group()]) == 0 {
			delete(groups, key.group())
		}
	}
	return &table{groups: groups, ordered: new(atomic.Pointer[[]*Instance]), changed: make(chan struct{})}
}

// members returns the instances of one role of a plugin, newest first.
func (t *table) members(role Role, id PluginID) []*Instance { return t.groups[group{role, id}] }

// inOrder returns every instance sorted by role, plugin, then rank.
func (t *table) inOrder() []*Instance {
	if known := t.ordered.Load(); known != nil {
		return *known
	}
	var all []*Instance
	for _, members := range t.groups {
		all = append(all, members...)
	}
	slices.SortFunc(all, compareInstances)
	t.ordered.Store(&all)
	return all
}

// instanceKeyOf parses a path of BucketInstances. It returns zero for any other path.
func instanceKeyOf(path string) InstanceKey {
	p := partsOf(path)
	if len(p) != 4 {
		return InstanceKey{}
	}
	return InstanceKey{Role(p[0]), PluginID(p[1]), AllocID(p[2]), TaskName(p[3])}
}
