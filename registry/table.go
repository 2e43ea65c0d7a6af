package registry

import (
	"slices"
	"sync/atomic"
)

// table holds every instance as of one index. The table and the instances that it points to are immutable.
type table struct {
	index   Seq
	groups  shards[PluginID, []roleMembers]
	ordered *atomic.Pointer[[]*Instance] // result of inOrder; shared by tables of the same instances
	changed chan struct{}                // closed when other instances are published
}

// roleMembers holds the instances of one role of a plugin.
type roleMembers struct {
	role    Role
	members []*Instance // newest first
}

func newTable(index Seq, instances []Instance) *table {
	empty := &table{groups: newShards[PluginID, []roleMembers]()}
	change := Change{}
	for _, i := range instances {
		change.Put = append(change.Put, i)
	}
	t := empty.with(change)
	t.index = index
	return t
}

// with returns the table after c, without its index.
func (t *table) with(c Change) *table {
	e := tableEdit{t.groups.edit()}
	for _, r := range c.Put {
		if i, ok := r.(Instance); ok {
			e.put(&i)
		}
	}
	for _, k := range c.Delete {
		if k.Bucket == BucketInstances {
			e.remove(instanceKeyOf(k.Path))
		}
	}
	return &table{
		groups:  e.groups.next,
		ordered: new(atomic.Pointer[[]*Instance]), changed: make(chan struct{}),
	}
}

// members returns the instances of one role of a plugin, newest first.
func (t *table) members(role Role, id PluginID) []*Instance { return membersOf(t.groups.get(id), role) }

func membersOf(roles []roleMembers, role Role) []*Instance {
	for _, l := range roles {
		if l.role == role {
			return l.members
		}
	}
	return nil
}

// inOrder returns every instance sorted by role, plugin, then rank.
func (t *table) inOrder() []*Instance {
	if known := t.ordered.Load(); known != nil {
		return *known
	}
	var all []*Instance
	for _, roles := range t.groups.all {
		for _, l := range roles {
			all = append(all, l.members...)
		}
	}
	slices.SortFunc(all, compareInstances)
	t.ordered.Store(&all)
	return all
}

type tableEdit struct {
	groups *shardEdit[PluginID, []roleMembers]
}

func (e *tableEdit) put(i *Instance) {
	e.setGroup(i.group(), insertRanked(membersOf(e.groups.next.get(i.Plugin), i.Role), i))
}

func (e *tableEdit) remove(k InstanceKey) {
	before := membersOf(e.groups.next.get(k.Plugin), k.Role)
	if member(before, k) == nil {
		return
	}
	e.setGroup(k.group(), withoutKey(before, k))
}

// setGroup replaces the instances of g. It removes an empty group, and a plugin without groups.
func (e *tableEdit) setGroup(g group, members []*Instance) {
	var roles []roleMembers
	for _, l := range e.groups.next.get(g.plugin) {
		if l.role != g.role {
			roles = append(roles, l)
		}
	}
	if len(members) > 0 {
		roles = append(roles, roleMembers{g.role, members})
	}
	if len(roles) > 0 {
		e.groups.set(g.plugin, roles)
	} else {
		e.groups.drop(g.plugin)
	}
}

// instanceKeyOf parses a path of BucketInstances. It returns zero for any other path.
func instanceKeyOf(path string) InstanceKey {
	p := partsOf(path)
	if len(p) != 4 {
		return InstanceKey{}
	}
	return InstanceKey{Role(p[0]), PluginID(p[1]), AllocID(p[2]), TaskName(p[3])}
}
