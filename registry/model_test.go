package registry_test

import (
	"cmp"
	"errors"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"holdfast/registry"
)

// model is the table as a list, in the order of the first put of each member.
type model struct {
	*stage
	list   []entry
	commit int
	events *replay
	cursor registry.Seq
}

type entry struct {
	registry.Instance
	rank int
}

func (m *model) find(k registry.InstanceKey) int {
	return slices.IndexFunc(m.list, func(e entry) bool { return e.InstanceKey == k })
}

func (m *model) put(instances ...registry.Instance) {
	m.commit++
	for _, i := range instances {
		if at := m.find(i.InstanceKey); at >= 0 {
			m.list[at].Instance = i
		} else {
			m.list = append(m.list, entry{i, m.commit})
		}
	}
}

// ranked returns a group's members, newest first, and the active one.
func (m *model) ranked(
	role registry.Role, plugin registry.PluginID,
) (members []registry.InstanceKey, active registry.InstanceKey) {
	list := slices.Clone(m.list)
	slices.SortFunc(list, func(a, b entry) int { return cmp.Or(b.rank-a.rank, cmp.Compare(a.Alloc, b.Alloc)) })
	healthy := false
	for _, e := range list {
		if e.Role != role || e.Plugin != plugin {
			continue
		}
		members = append(members, e.InstanceKey)
		if len(members) == 1 || !healthy && e.Health.State == registry.Healthy {
			active = e.InstanceKey
		}
		healthy = healthy || e.Health.State == registry.Healthy
	}
	return members, active
}

var (
	roles   = []registry.Role{registry.RoleController, registry.RoleNode}
	plugins = []registry.PluginID{"p", "q"}
	allocs  = []registry.AllocID{"a", "b", "c", "d"}
)

func drawKey(t *rapid.T) registry.InstanceKey {
	return key(rapid.SampledFrom(roles).Draw(t, "role"), rapid.SampledFrom(plugins).Draw(t, "plugin"),
		rapid.SampledFrom(allocs).Draw(t, "alloc"))
}

func drawHealth(t *rapid.T) registry.Health {
	return registry.Health{
		State: rapid.SampledFrom([]registry.HealthState{registry.Healthy, registry.Unhealthy}).Draw(t, "state"),
		Cause: rapid.SampledFrom([]registry.Cause{registry.CauseProbed, registry.CauseGone}).Draw(t, "cause"),
	}
}

func drawInstance(t *rapid.T) registry.Instance {
	i := instance(drawKey(t), registry.Healthy)
	i.Health = drawHealth(t)
	i.Attempt = rapid.Uint64Range(1, 2).Draw(t, "attempt")
	i.Fingerprint.Version = rapid.SampledFrom([]string{"1", "2"}).Draw(t, "version")
	i.Options = map[string]string{"k": rapid.SampledFrom([]string{"1", "2"}).Draw(t, "option")}
	return i
}

func (m *model) Put(t *rapid.T) {
	i := drawInstance(t)
	must(t, m.stage.put(i))
	m.put(i)
}

func (m *model) PutAll(t *rapid.T) {
	list := []registry.Instance{drawInstance(t), drawInstance(t), drawInstance(t)}
	must(t, m.stage.put(list...))
	m.put(list...)
}

func (m *model) Remove(t *rapid.T) {
	k := drawKey(t)
	must(t, m.remove(k))
	m.list = slices.DeleteFunc(m.list, func(e entry) bool { return e.InstanceKey == k })
}

func (m *model) RemoveTask(t *rapid.T) {
	task := registry.TaskKey{Alloc: rapid.SampledFrom(allocs).Draw(t, "alloc"), Task: "plugin"}
	must(t, m.removeTask(task))
	m.list = slices.DeleteFunc(m.list, func(e entry) bool { return e.TaskKey() == task })
}

func (m *model) SetHealth(t *rapid.T) {
	k, h := drawKey(t), drawHealth(t)
	err := m.setHealth(k, h)
	at := m.find(k)
	if (at < 0) != errors.Is(err, registry.ErrNotFound) || at >= 0 && err != nil {
		t.Fatalf("health of %s (known: %v): %v", k, at >= 0, err)
	}
	if at >= 0 {
		m.list[at].Health = h
	}
}

func (m *model) Prefer(t *rapid.T) {
	k := drawKey(t)
	must(t, m.stage.commit(func(v registry.View) (registry.Change, error) {
		return registry.PreferChange(v, now(), k), nil
	}))
	at := m.find(k)
	if at < 0 {
		return
	}
	if members, _ := m.ranked(k.Role, k.Plugin); members[0] != k {
		m.commit++
		m.list[at].rank = m.commit
	}
}

// Other is a commit that does not concern the table.
func (m *model) Other(t *rapid.T) { m.commitOthers(t, 1) }

func (m *model) Fail(t *rapid.T) {
	i := drawInstance(t)
	full := registry.Errorf(registry.ErrExhausted, "full")
	m.log.Fail(full)
	if err := m.stage.put(i); err != nil && !errors.Is(err, registry.ErrExhausted) {
		t.Fatalf("put to a full disk: %v", err)
	}
	m.log.Heal() // the put may have changed nothing, and so not have failed
}

func (m *model) Reopen(t *rapid.T) { m.reopen(t) }

// Lose makes the last put's outcome unknown: after the reopen, the log may have the put or not.
func (m *model) Lose(t *rapid.T) {
	i, written := drawInstance(t), rapid.Bool().Draw(t, "written")
	m.log.Lose(written)
	err := m.stage.put(i)
	if err != nil && !errors.Is(err, registry.ErrUncertain) {
		t.Fatalf("lost put: %v", err)
	}
	if written && err != nil {
		m.put(i)
	}
	m.reopen(t)
}

func (m *model) reopen(t *rapid.T) {
	m.stage = newStage(t, m.log.Reopen(), registry.RecentEvents)
}

// Check compares the table, the model and the replay of the events.
func (m *model) Check(t *rapid.T) {
	events := m.after(t, m.cursor, registry.Filter{})
	for _, e := range events {
		if e.Seq <= m.cursor || e.Kind == registry.EventResync {
			t.Fatalf("event %s after %d", e, m.cursor)
		}
		m.cursor = e.Seq
	}
	m.events.apply(events)
	snapshot := m.table.All()
	if len(snapshot.Instances) != len(m.list) || len(m.events.table) != len(m.list) {
		t.Fatalf("%d instances in the table, %d by events, %d in the model", len(snapshot.Instances),
			len(m.events.table), len(m.list))
	}
	for _, i := range snapshot.Instances {
		if replayed := m.events.table[i.InstanceKey]; !reflect.DeepEqual(replayed, i) {
			t.Fatalf("the table has\n%+v, the events lead to\n%+v", i, replayed)
		}
		if at := m.find(i.InstanceKey); at < 0 || !m.list[at].Same(i) {
			t.Fatalf("the table has %+v, the model has it at %d", i, at)
		}
	}
	m.checkGroups(t)
}

func (m *model) checkGroups(t *rapid.T) {
	for _, role := range roles {
		for _, plugin := range plugins {
			want, wantActive := m.ranked(role, plugin)
			var got []registry.InstanceKey
			for _, i := range m.table.Members(role, plugin) {
				got = append(got, i.InstanceKey)
			}
			active, found := m.table.Find(role, plugin)
			if !slices.Equal(got, want) || active.InstanceKey != wantActive || found != (len(want) > 0) {
				t.Fatalf("%s %s: members %v, active %s; want %v, %s", role, plugin, got, active.InstanceKey, want,
					wantActive)
			}
			if m.events.active[string(role)+" "+string(plugin)] != wantActive {
				t.Fatalf("%s %s: events say active is %s, want %s", role, plugin,
					m.events.active[string(role)+" "+string(plugin)], wantActive)
			}
		}
	}
}

func TestTableAgreesWithItsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{stage: empty(t), events: newReplay()}
		t.Repeat(map[string]func(*rapid.T){
			"put": m.Put, "put again": m.Put, "put all": m.PutAll, "remove": m.Remove, "remove task": m.RemoveTask,
			"health": m.SetHealth, "prefer": m.Prefer,
			"other": m.Other, "fail": m.Fail, "reopen": m.Reopen, "lose": m.Lose, "": m.Check,
		})
	})
}

// TestReplayNeedsEveryEvent is the negative control of the model: it notices if any one event of a history is left out.
func TestReplayNeedsEveryEvent(t *testing.T) {
	s := empty(t)
	must(t, s.put(instance(key("r", "p", "a"), registry.Healthy)))
	must(t, s.put(instance(key("r", "p", "b"), registry.Healthy)))
	must(t, s.setHealth(key("r", "p", "b"), health(registry.Unhealthy)))
	must(t, s.remove(key("r", "p", "a")))
	events := s.after(t, 0, registry.Filter{})
	for leave := range events {
		all, without := newReplay(), newReplay()
		diverged := false
		for i, e := range events {
			all.apply([]registry.Event{e})
			if i != leave {
				without.apply([]registry.Event{e})
			}
			diverged = diverged || !reflect.DeepEqual(all, without)
		}
		if !diverged {
			t.Errorf("leaving out event %d (%s) is not noticed", leave, events[leave])
		}
	}
}
