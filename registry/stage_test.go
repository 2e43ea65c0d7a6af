package registry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func now() time.Time { return start }

// stage is a table and a feed over one log, wired as in a shim.
type stage struct {
	log   *registrytest.Log
	table *registry.Registry
	feed  *registry.Feed
	now   func() time.Time
}

// newStage does what a shim does at its start. The feed has up to limit events in memory.
func newStage(t fataler, log *registrytest.Log, limit int) *stage {
	t.Helper()
	s := &stage{log: log, table: registry.New(log), now: now}
	must(t, s.table.Load(context.Background()))
	s.feed = registry.NewFeed(log, s.table, limit)
	log.OnApplied(s.table.Applied)
	log.OnApplied(s.feed.Applied)
	return s
}

func empty(t fataler) *stage { return newStage(t, registrytest.NewLog(now), registry.RecentEvents) }

// small returns a stage whose log keeps the last kept events, and whose feed holds up to limit of them in memory.
func small(t fataler, kept, limit int) *stage {
	log := registrytest.NewLog(now)
	log.KeepEvents(kept)
	return newStage(t, log, limit)
}

func (s *stage) commit(decide registry.Decision) error {
	_, err := s.log.Commit(context.Background(), decide)
	return err
}

func (s *stage) put(instances ...registry.Instance) error {
	return s.commit(func(v registry.View) (registry.Change, error) {
		return registry.PutChange(v, s.now(), instances...), nil
	})
}

func (s *stage) remove(keys ...registry.InstanceKey) error {
	return s.commit(func(v registry.View) (registry.Change, error) {
		return registry.RemoveChange(v, s.now(), keys...), nil
	})
}

func (s *stage) removeTask(task registry.TaskKey) error {
	return s.commit(func(v registry.View) (registry.Change, error) {
		return registry.RemoveTaskChange(v, s.now(), task), nil
	})
}

// setHealth puts an instance with another health, as a heartbeat does. ErrNotFound: it is not registered.
func (s *stage) setHealth(k registry.InstanceKey, h registry.Health) error {
	return s.commit(func(v registry.View) (registry.Change, error) {
		i, found := v.Instance(k)
		if !found {
			return registry.Change{}, registry.Errorf(registry.ErrNotFound, "instance %s is not registered", k)
		}
		i.Health = h
		return registry.PutChange(v, s.now(), i), nil
	})
}

// fataler is a *testing.T or a *rapid.T.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

var errStop = errors.New("enough")

// after returns every event after the cursor that the feed has now, read as a watcher reads.
func (s *stage) after(t fataler, cursor registry.Seq, filter registry.Filter) []registry.Event {
	t.Helper()
	var got []registry.Event
	filter.Bookmarks = true
	err := s.feed.Watch(context.Background(), cursor, filter, func(e registry.Event) error {
		if e.Kind == registry.EventBookmark {
			return errStop
		}
		got = append(got, e)
		return nil
	})
	if err != errStop {
		t.Fatalf("watch: %v", err)
	}
	return got
}

func key(role registry.Role, plugin registry.PluginID, alloc registry.AllocID) registry.InstanceKey {
	return registry.InstanceKey{Role: role, Plugin: plugin, Alloc: alloc, Task: "plugin"}
}

func instance(k registry.InstanceKey, state registry.HealthState) registry.Instance {
	return registry.Instance{
		InstanceKey: k, Attempt: 1, Endpoint: registry.Endpoint{Host: "/run/" + string(k.Alloc), Task: "/csi/csi.sock"},
		Fingerprint: registry.Fingerprint{Provider: "test", Version: "1"}, Health: health(state),
	}
}

func health(state registry.HealthState) registry.Health {
	if state == registry.Healthy {
		return registry.Health{State: state, Cause: registry.CauseProbed}
	}
	return registry.Health{State: state, Cause: registry.CauseMissed, Detail: "3 in a row"}
}

func must(t fataler, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%v", err)
	}
}

// brief writes events in one line each: what happened to whom.
func brief(events []registry.Event) []string {
	var out []string
	for _, e := range events {
		line := fmt.Sprintf("%s %s %s", e.Kind, e.Role, e.Alloc)
		if e.Cause != "" {
			line += ": " + string(e.Cause)
		}
		out = append(out, line)
	}
	return out
}

func same(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s:\n got %q\nwant %q", what, got, want)
	}
}

// replay is the table of instances, computed from the events alone.
type replay struct {
	table  map[registry.InstanceKey]registry.Instance
	active map[string]registry.InstanceKey
}

func newReplay() *replay {
	return &replay{map[registry.InstanceKey]registry.Instance{}, map[string]registry.InstanceKey{}}
}

func (r *replay) apply(events []registry.Event) {
	for _, e := range events {
		switch e.Kind {
		case registry.EventResync:
			*r = *newReplay()
			for _, i := range e.Snapshot.Instances {
				r.table[i.InstanceKey] = i
			}
		case registry.EventDeregistered:
			delete(r.table, e.Instance.InstanceKey)
			if r.active[group(e.Instance.InstanceKey)] == e.Instance.InstanceKey {
				delete(r.active, group(e.Instance.InstanceKey))
			}
		case registry.EventActivated:
			r.active[group(e.Instance.InstanceKey)] = e.Instance.InstanceKey
		default:
			r.table[e.Instance.InstanceKey] = *e.Instance
		}
	}
}

func group(k registry.InstanceKey) string { return string(k.Role) + " " + string(k.Plugin) }
