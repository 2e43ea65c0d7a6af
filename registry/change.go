package registry

import (
	"cmp"
	"slices"
	"time"
)

// The functions below return changes of the table of instances, for the decide function of a Commit. A change of
// several instances must be made by one call: each call sees only the View, not the change of another call.

// PutChange registers instances. An instance replaces the stored one of the same key and takes its rank. An instance
// that is the Same as the stored one is left out.
func PutChange(v View, now time.Time, instances ...Instance) Change {
	d := newDraft(v, now)
	for _, i := range instances {
		d.putInstance(i)
	}
	return d.finish()
}

// RemoveChange removes the instances with these keys. It ignores a key without an instance.
func RemoveChange(v View, now time.Time, keys ...InstanceKey) Change {
	d := newDraft(v, now)
	for _, k := range keys {
		d.remove(k)
	}
	return d.finish()
}

// RemoveTaskChange removes every instance of the task.
func RemoveTaskChange(v View, now time.Time, t TaskKey) Change {
	var keys []InstanceKey
	for _, i := range v.AllInstances() {
		if i.TaskKey() == t {
			keys = append(keys, i.InstanceKey)
		}
	}
	return RemoveChange(v, now, keys...)
}

// PreferChange makes existing instances the newest of their groups, as if they had just been created.
func PreferChange(v View, now time.Time, keys ...InstanceKey) Change {
	d := newDraft(v, now)
	for _, k := range keys {
		d.prefer(k)
	}
	return d.finish()
}

// draft is a change of the table under construction. Each step sees the result of the steps before it.
type draft struct {
	view    View
	now     time.Time
	groups  map[group]*draftGroup
	touched []*draftGroup // the groups, in the order of their first step
	put     []InstanceKey // without duplicates
	deleted []Key
	events  []Event
}

type draftGroup struct {
	members []*Instance // newest first
	active  InstanceKey // before the change; zero: none
}

func newDraft(v View, now time.Time) *draft {
	return &draft{view: v, now: now, groups: map[group]*draftGroup{}}
}

// group returns the group as the draft has changed it so far. The first call for a group reads it from the view.
func (d *draft) group(k group) *draftGroup {
	if g := d.groups[k]; g != nil {
		return g
	}
	g := &draftGroup{members: d.view.members(k.role, k.plugin)}
	if active := activeOf(g.members); active != nil {
		g.active = active.InstanceKey
	}
	d.groups[k], d.touched = g, append(d.touched, g)
	return g
}

// putInstance adds i to its group, or replaces the instance of the same key, and adds the events of this step.
func (d *draft) putInstance(i Instance) {
	i = i.Clone()
	g := d.group(i.group())
	old := member(g.members, i.InstanceKey)
	// The State sets these indexes when it commits. They are set here too, because compareRank reads them.
	i.CreateIndex, i.ModifyIndex = d.view.Index()+1, d.view.Index()+1
	if len(g.members) > 0 { // the condition is that of the node, whichever instance reports it
		i.Storage = g.members[0].Storage
	}
	switch {
	case old == nil:
		i.Since, i.Health.Since = cmp.Or(i.Since, d.now), cmp.Or(i.Health.Since, d.now)
		d.addEvent(EventRegistered, &i)
	case old.Same(i):
		return
	default:
		i.CreateIndex, i.Preferred, i.Since = old.CreateIndex, old.Preferred, old.Since
		d.addUpdateEvents(old, &i)
	}
	d.write(g, &i)
}

// write puts i at its rank in the group, and into the change.
func (d *draft) write(g *draftGroup, i *Instance) {
	g.members = insertRanked(g.members, i)
	if !slices.Contains(d.put, i.InstanceKey) {
		d.put = append(d.put, i.InstanceKey)
	}
}

// addUpdateEvents adds an event for the changed fields of i, and another one for its health.
func (d *draft) addUpdateEvents(old, i *Instance) {
	sameHealth := old.Health.State == i.Health.State && old.Health.Cause == i.Health.Cause
	if sameHealth {
		i.Health.Since = old.Health.Since
	} else {
		i.Health.Since = cmp.Or(i.Health.Since, d.now)
	}
	rest := *old
	rest.Health = i.Health
	if !rest.Same(*i) {
		d.addEvent(EventUpdated, i)
	}
	switch {
	case sameHealth:
	case i.Health.State == Healthy:
		d.addEvent(EventHealthy, i)
	default:
		d.addEvent(EventUnhealthy, i)
	}
}

func (d *draft) prefer(k InstanceKey) {
	g := d.group(k.group())
	old := member(g.members, k)
	if old == nil || g.members[0] == old {
		return
	}
	i := old.Clone()
	i.Preferred, i.ModifyIndex = d.view.Index()+1, d.view.Index()+1
	d.addEvent(EventUpdated, &i)
	d.write(g, &i)
}

func (d *draft) remove(k InstanceKey) {
	g := d.group(k.group())
	old := member(g.members, k)
	if old == nil {
		return
	}
	g.members = withoutKey(g.members, k)
	d.deleted = append(d.deleted, k.Key())
	d.addEvent(EventDeregistered, old)
}

// finish adds an event for each group whose active instance has changed, after the events of the steps.
func (d *draft) finish() Change {
	for _, g := range d.touched {
		if active := activeOf(g.members); active != nil && active.InstanceKey != g.active {
			d.addEvent(EventActivated, active)
		}
	}
	c := Change{Delete: d.deleted, Events: d.events}
	for _, k := range d.put {
		c.Put = append(c.Put, *member(d.groups[k.group()].members, k))
	}
	return c
}

// addEvent adds an event with i as it will be stored.
func (d *draft) addEvent(kind EventKind, i *Instance) {
	record := i.Clone()
	e := Event{
		Kind: kind, Role: i.Role, Plugin: i.Plugin, Alloc: i.Alloc, Task: i.Task, At: d.now, Instance: &record,
	}
	if kind == EventHealthy || kind == EventUnhealthy {
		e.Cause, e.Detail = i.Health.Cause, i.Health.Detail
	}
	d.events = append(d.events, e)
}
