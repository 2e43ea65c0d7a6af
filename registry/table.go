package registry

import (
	"maps"
	"slices"
	"sync"
)

// table holds every instance as of one index. The table and the instances that it points to are immutable.
type table struct {
	index   Seq
	groups  map[group][]*Instance // newest first; no group is empty
	ordered func() []*Instance    // returns every instance, by role, plugin, then rank; sorts them once
	changed chan struct{}         // closed when other instances are published
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
	ordered := sync.OnceValue(func() []*Instance {
		all := slices.Concat(slices.Collect(maps.Values(groups))...)
		slices.SortFunc(all, compareInstances)
		return all
	})
	return &table{groups: groups, ordered: ordered, changed: make(chan struct{})}
}

// members returns the instances of one role of a plugin, newest first.
func (t *table) members(role Role, id PluginID) []*Instance { return t.groups[group{role, id}] }

// instanceKeyOf parses a path of BucketInstances. It returns zero for any other path.
func instanceKeyOf(path string) InstanceKey {
	p := partsOf(path)
	if len(p) != 4 {
		return InstanceKey{}
	}
	return InstanceKey{Role(p[0]), PluginID(p[1]), AllocID(p[2]), TaskName(p[3])}
}
