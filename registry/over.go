package registry

import (
	"cmp"
	"slices"
	"strings"
)

// Then is the change that makes of the state what c and after it next would make of it, with the events of both in that order. Instances that both
// put for the first time are of one age, though.
func (c Change) Then(next Change) Change {
	if c.Empty() {
		return next
	}
	if next.Empty() {
		return c
	}
	later := keysOf(next)
	out := Change{Events: slices.Concat(c.Events, next.Events)}
	for _, r := range c.Put {
		if !later[r.Key()] {
			out.Put = append(out.Put, r)
		}
	}
	for _, k := range c.Delete {
		if !later[k] {
			out.Delete = append(out.Delete, k)
		}
	}
	out.Put, out.Delete = append(out.Put, next.Put...), append(out.Delete, next.Delete...)
	return out
}

// keysOf is the keys of all that a change puts or deletes.
func keysOf(c Change) map[Key]bool {
	keys := map[Key]bool{}
	for _, r := range c.Put {
		keys[r.Key()] = true
	}
	for _, k := range c.Delete {
		keys[k] = true
	}
	return keys
}

// Over is the state of v with the records of a change that has not been committed yet. Its events are not there. The ModifyIndex of what is put is one
// that no commit has given yet, and so is the CreateIndex where the record itself has none.
func Over(v View, c Change) View {
	if len(c.Put)+len(c.Delete) == 0 {
		return v
	}
	o := over{v, keysOf(c), map[Key]Record{}}
	for _, r := range c.Put {
		created, _ := r.Indexes()
		if i, is := r.(Instance); is { // whose rank it is
			old, _ := v.Instance(i.InstanceKey)
			created = old.CreateIndex
		}
		o.put[r.Key()] = r.Indexed(created, v.Index()+1)
	}
	for _, k := range c.Delete { // a Log deletes after it has put
		delete(o.put, k)
	}
	return o
}

// over is a View with some records in place of those that have their keys.
type over struct {
	View
	changed map[Key]bool
	put     map[Key]Record
}

// one is the record of a key, which the View has beneath.
func one[R Record](o over, k Key, beneath func() (R, bool)) (r R, found bool) {
	if o.changed[k] {
		r, found = o.put[k].(R)
		return r, found
	}
	return beneath()
}

// many is a list in key order, which the View has so beneath, of those that pass.
func many[R Record](o over, beneath []R, pass func(R) bool) []R {
	list := slices.DeleteFunc(slices.Clone(beneath), func(r R) bool { return o.changed[r.Key()] })
	for _, r := range o.put {
		if r, is := r.(R); is && pass(r) {
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b R) int { return strings.Compare(a.Key().Path, b.Key().Path) })
	return list
}

func all[R Record](R) bool { return true }

func (o over) Instance(k InstanceKey) (Instance, bool) {
	return one(o, k.Key(), func() (Instance, bool) { return o.View.Instance(k) })
}

func (o over) Instances(role Role, id PluginID) []Instance {
	list := many(o, o.View.Instances(role, id), func(i Instance) bool { return i.Role == role && i.Plugin == id })
	slices.SortFunc(list, CompareRank)
	return list
}

func (o over) AllInstances() []Instance {
	list := many(o, o.View.AllInstances(), all)
	slices.SortFunc(list, func(a, b Instance) int {
		return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Plugin, b.Plugin), CompareRank(a, b))
	})
	return list
}

func (o over) Task(k TaskKey) (Task, bool) {
	return one(o, k.Key(), func() (Task, bool) { return o.View.Task(k) })
}
func (o over) Tasks() []Task { return many(o, o.View.Tasks(), all) }

func (o over) Alloc(id AllocID) (Alloc, bool) {
	return one(o, AllocRecord(id), func() (Alloc, bool) { return o.View.Alloc(id) })
}
func (o over) Allocs() []Alloc { return many(o, o.View.Allocs(), all) }
func (o over) AllocsWhere(pass func(Alloc) bool) []Alloc {
	return many(o, o.View.AllocsWhere(pass), pass)
}

func (o over) Volume(n VolumeName) (Volume, bool) {
	return one(o, n.Key(), func() (Volume, bool) { return o.View.Volume(n) })
}

// VolumeByKey is the first by name, should two names be given to one volume.
func (o over) VolumeByKey(k VolumeKey) (Volume, bool) {
	named := func(v Volume) bool { return v.VolumeKey() == k && k.External != "" }
	var beneath []Volume
	if v, found := o.View.VolumeByKey(k); found && o.changed[v.Key()] {
		beneath = o.View.VolumesWhere(named)
	} else if found {
		beneath = []Volume{v}
	}
	if list := many(o, beneath, named); len(list) > 0 {
		return list[0], true
	}
	return Volume{}, false
}
func (o over) VolumesNamed(plugin PluginID, name string) []Volume {
	return many(o, o.View.VolumesNamed(plugin, name), func(v Volume) bool { return v.CreatedAs(plugin, name) })
}
func (o over) Volumes() []Volume { return many(o, o.View.Volumes(), all) }
func (o over) VolumesWhere(pass func(Volume) bool) []Volume {
	return many(o, o.View.VolumesWhere(pass), pass)
}
func (o over) VolumesOf(id AllocID) []Volume {
	return many(o, o.View.VolumesOf(id), func(v Volume) bool { return v.InlineOf(id) })
}

func (o over) Claims(k VolumeKey) []Claim {
	return many(o, o.View.Claims(k), func(c Claim) bool { return c.Volume == k })
}
func (o over) ClaimsOf(id AllocID) []Claim {
	return many(o, o.View.ClaimsOf(id), func(c Claim) bool { return c.Alloc == id })
}
func (o over) AllClaims() []Claim { return many(o, o.View.AllClaims(), all) }

func (o over) Placement(k VolumeKey) (Placement, bool) {
	return one(o, k.PlacementRecord(), func() (Placement, bool) { return o.View.Placement(k) })
}
func (o over) Placements() []Placement { return many(o, o.View.Placements(), all) }

func (o over) Refs(k VolumeKey) []Ref {
	return many(o, o.View.Refs(k), func(r Ref) bool { return r.Volume == k })
}
func (o over) AllRefs() []Ref { return many(o, o.View.AllRefs(), all) }

func (o over) Intent(k VolumeKey) (Intent, bool) {
	return one(o, k.IntentRecord(), func() (Intent, bool) { return o.View.Intent(k) })
}
func (o over) Intents() []Intent { return many(o, o.View.Intents(), all) }

func (o over) Operation(id OperationID) (Operation, bool) {
	return one(o, OperationRecord(id), func() (Operation, bool) { return o.View.Operation(id) })
}
