package registry_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestEventPaths causes every kind of event. It writes an event as kind, role, alloc and cause. It compares each with
// the records of the log.
func TestEventPaths(t *testing.T) {
	a, b := key("r", "p", "a"), key("r", "p", "b")
	put := func(i registry.Instance) func(*stage) error {
		return func(s *stage) error { return s.put(i) }
	}
	sick := func(k registry.InstanceKey) func(*stage) error {
		return func(s *stage) error { return s.setHealth(k, health(registry.Unhealthy)) }
	}
	changed := instance(a, registry.Healthy)
	changed.Endpoint.Host = "/run/elsewhere"
	upgraded := instance(a, registry.Unhealthy)
	upgraded.Fingerprint.Version = "2"
	gone := registry.Health{State: registry.Unhealthy, Cause: registry.CauseGone}
	s := empty(t)
	cursor := registry.Seq(0)
	for _, step := range []struct {
		name string
		do   func(*stage) error
		want []string
	}{
		{"first", put(instance(a, registry.Healthy)), []string{"registered r a", "activated r a"}},
		{"same again", put(instance(a, registry.Healthy)), nil},
		{"newer healthy", put(instance(b, registry.Healthy)), []string{"registered r b", "activated r b"}},
		{"endpoint of the older", put(changed), []string{"updated r a"}},
		{"sick active", sick(b), []string{"unhealthy r b: heartbeats missed", "activated r a"}},
		{"still sick", sick(b), nil},
		{"another cause", func(s *stage) error { return s.setHealth(b, gone) }, []string{"unhealthy r b: gone"}},
		{"last healthy one sick", sick(a), []string{"unhealthy r a: heartbeats missed", "activated r b"}},
		{"older well again", func(s *stage) error {
			return s.setHealth(a, health(registry.Healthy))
		}, []string{"healthy r a: probed", "activated r a"}},
		{"version and health at once", put(upgraded),
			[]string{"updated r a", "unhealthy r a: heartbeats missed", "activated r b"}},
		{"removal of the active", func(s *stage) error { return s.remove(b) },
			[]string{"deregistered r b", "activated r a"}},
		{"removal of the unknown", func(s *stage) error { return s.remove(b) }, nil},
		{"removal of the last", func(s *stage) error {
			return s.removeTask(a.TaskKey())
		}, []string{"deregistered r a"}},
		{"unknown task", func(s *stage) error { return s.removeTask(a.TaskKey()) }, nil},
	} {
		before := s.table.Index()
		must(t, step.do(s))
		var got []registry.Event
		for _, e := range s.after(t, cursor, registry.Filter{}) {
			checkEvent(t, s, e, before)
			got, cursor = append(got, e), e.Seq
		}
		same(t, step.name, brief(got), step.want...)
		if len(step.want) == 0 && s.table.Index() != before {
			t.Errorf("%s: the index moved from %d to %d", step.name, before, s.table.Index())
		}
	}
}

// checkEvent compares an event with what the log stored.
func checkEvent(t *testing.T, s *stage, e registry.Event, before registry.Seq) {
	t.Helper()
	stored, found := viewOf(t, s.log).Instance(e.Instance.InstanceKey)
	if removed := e.Kind == registry.EventDeregistered; removed == found || found &&
		!reflect.DeepEqual(stored, *e.Instance) {
		t.Errorf("%s has %+v, stored is %+v (%v)", e, *e.Instance, stored, found)
	}
	if e.Seq <= before || e.Instance.TaskKey() != (registry.TaskKey{Alloc: e.Alloc, Task: e.Task}) ||
		!e.At.Equal(start) || e.Generation != 1 {
		t.Errorf("event is %+v", e)
	}
	if table, found := s.table.Get(e.Instance.InstanceKey); found && !reflect.DeepEqual(table, *e.Instance) {
		t.Errorf("%s is delivered before the table has it: %+v", e, table)
	}
}

// Several allocs of one plugin start and stop. Each stop removes its own instance only.
func TestInterleavedAllocs(t *testing.T) {
	s := empty(t)
	start := func(alloc registry.AllocID) { must(t, s.put(instance(key("r", "p", alloc), registry.Healthy))) }
	stop := func(alloc registry.AllocID) {
		must(t, s.removeTask(registry.TaskKey{Alloc: alloc, Task: "plugin"}))
	}
	active := func(want registry.AllocID) {
		t.Helper()
		if i, found := s.table.Find("r", "p"); i.Alloc != want || found != (want != "") {
			t.Errorf("active is %q, want %q", i.Alloc, want)
		}
	}
	start("a")
	start("b")
	active("b")
	stop("a")
	active("b")
	start("c")
	stop("b")
	active("c")
	start("a")
	active("a")
	stop("a")
	active("c")
	stop("c")
	active("")
	stop("c")
	same(t, "events", brief(s.after(t, 0, registry.Filter{})),
		"registered r a", "activated r a", "registered r b", "activated r b", "deregistered r a", "registered r c",
		"activated r c",
		"deregistered r b", "registered r a", "activated r a", "deregistered r a", "activated r c", "deregistered r c")
}

// A change that Load has read is not applied again, and an older change does not undo it.
func TestAppliedAfterLoad(t *testing.T) {
	s := empty(t)
	var applied []registry.Applied
	s.log.OnApplied(func(a registry.Applied) { applied = append(applied, a) })
	must(t, s.put(instance(key("r", "p", "a"), registry.Healthy)))
	must(t, s.remove(key("r", "p", "a")))
	late := registry.New(s.log)
	must(t, late.Load(t.Context()))
	late.Applied(applied[0])
	if _, found := late.Find("r", "p"); found {
		t.Error("a removed instance came back")
	}
}

// slowView is a log that changes after a view has begun and before it is read.
type slowView struct {
	*registrytest.Log
	meanwhile func()
}

func (l slowView) View(ctx context.Context, read func(registry.View) error) error {
	return l.Log.View(ctx, func(v registry.View) error { l.meanwhile(); return read(v) })
}

func TestLoadDoesNotUndoWhatWasApplied(t *testing.T) {
	s := empty(t)
	table := registry.New(slowView{s.log, func() { must(t, s.put(instance(key("r", "p", "a"), registry.Healthy))) }})
	s.log.OnApplied(table.Applied)
	must(t, table.Load(t.Context()))
	if _, found := table.Find("r", "p"); !found {
		t.Error("an old view replaced a newer table")
	}
}

// Since changes with the health, and with nothing else.
func TestSince(t *testing.T) {
	clock := start
	s := empty(t)
	s.now = func() time.Time { clock = clock.Add(time.Minute); return clock }
	put := func(i registry.Instance) registry.Instance {
		must(t, s.put(i))
		stored, _ := s.table.Get(i.InstanceKey)
		return stored
	}
	i := instance(key("r", "p", "a"), registry.Healthy)
	first := put(i)
	i.Attempt = 2
	second := put(i)
	i.Health = health(registry.Unhealthy)
	third := put(i)
	if first.Since.IsZero() || !first.Health.Since.Equal(first.Since) {
		t.Errorf("first: since %v, healthy since %v", first.Since, first.Health.Since)
	}
	if !second.Since.Equal(first.Since) || !second.Health.Since.Equal(first.Since) || !third.Since.Equal(first.Since) {
		t.Errorf("since %v became %v (healthy since %v), then %v", first.Since, second.Since, second.Health.Since,
			third.Since)
	}
	if !third.Health.Since.After(second.Health.Since) {
		t.Errorf("unhealthy since %v, healthy since %v", third.Health.Since, second.Health.Since)
	}
}

// Reads and views do not wait for a commit that hangs at the disk.
func TestReadersDoNotWait(t *testing.T) {
	s := empty(t)
	must(t, s.put(instance(key("r", "p", "a"), registry.Healthy)))
	release := s.log.Hold()
	put := make(chan error, 1)
	go func() { put <- s.put(instance(key("r", "p", "b"), registry.Healthy)) }()
	for range 1000 {
		if i, _ := s.table.Find("r", "p"); i.Alloc != "a" {
			t.Fatalf("active is %s before the commit", i.Alloc)
		}
		if len(s.table.All().Instances) != 1 {
			t.Fatal("the table changed before the commit")
		}
		if _, err := s.table.Await(t.Context(), "r", "p"); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case err := <-put:
		t.Fatalf("the put did not wait: %v", err)
	default:
	}
	release()
	must(t, <-put)
	if i, _ := s.table.Find("r", "p"); i.Alloc != "b" {
		t.Errorf("active is %s after the commit", i.Alloc)
	}
}

func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := empty(t)
		got := make(chan registry.Instance)
		go func() {
			i, err := s.table.Await(t.Context(), "r", "p")
			if err != nil {
				t.Error(err)
			}
			got <- i
		}()
		waits := func(what string) {
			t.Helper()
			synctest.Wait()
			select {
			case i := <-got:
				t.Fatalf("%s: Await returned %+v", what, i)
			default:
			}
		}
		waits("nothing there")
		must(t, s.put(instance(key("r", "q", "a"), registry.Healthy)))
		must(t, s.put(instance(key("q", "p", "a"), registry.Healthy)))
		waits("others there")
		must(t, s.put(instance(key("r", "p", "a"), registry.Unhealthy)))
		waits("unhealthy")
		must(t, s.setHealth(key("r", "p", "a"), health(registry.Healthy)))
		if i := <-got; i.Alloc != "a" || i.Health.State != registry.Healthy {
			t.Errorf("Await returned %+v", i)
		}
	})
}

func TestAwaitSaysWhatThereIs(t *testing.T) {
	s := empty(t)
	reason := errors.New("the alloc was stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(reason)
	fails := func(words ...string) {
		t.Helper()
		_, err := s.table.Await(ctx, "csi-node", "ebs")
		if !errors.Is(err, registry.ErrUnavailable) || !errors.Is(err, reason) {
			t.Errorf("kinds of %v", err)
		}
		for _, w := range append(words, "ebs", "csi-node", reason.Error()) {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q does not say %q", err, w)
			}
		}
	}
	fails("none is registered")
	must(t, s.put(instance(key("csi-controller", "ebs", "ctrl"), registry.Healthy)))
	fails("none is registered", "serves only csi-controller here")
	must(t, s.put(instance(key("csi-node", "ebs", "old"), registry.Unhealthy)))
	must(t, s.put(instance(key("csi-node", "ebs", "new"), registry.Unhealthy)))
	fails("2 registered", "new/plugin", "unhealthy", "heartbeats missed", "3 in a row")
}

// With writers, readers and watchers at once, every snapshot of the table is the result of the events up to its index,
// and every watcher gets every event once, in order.
func TestSnapshotsAreConsistent(t *testing.T) {
	const writers, each = 4, 40
	s := small(t, registry.MaxEvents, 20)
	var writing, others sync.WaitGroup
	for w := range writers {
		writing.Go(func() {
			k := key("r", registry.PluginID(fmt.Sprint("p", w%2)), registry.AllocID(fmt.Sprint("a", w)))
			for n := range each {
				i := instance(k, registry.Healthy)
				i.Attempt = uint64(n)
				if n%5 == 4 {
					must(t, s.remove(k))
				} else {
					must(t, s.put(i))
				}
			}
		})
	}
	watched := make([][]registry.Event, 2)
	for w := range watched {
		others.Go(func() {
			_ = s.feed.Watch(context.Background(), 0, registry.Filter{}, func(e registry.Event) error {
				if e.Kind == "end" {
					return errStop
				}
				watched[w] = append(watched[w], e)
				return nil
			})
		})
	}
	snapshots := make([]map[registry.Seq]registry.Snapshot, 2)
	done := make(chan struct{})
	for r := range snapshots {
		snapshots[r] = map[registry.Seq]registry.Snapshot{}
		others.Go(func() {
			for {
				snapshot := s.table.All()
				snapshots[r][snapshot.Index] = snapshot
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	writing.Wait()
	close(done)
	events := s.after(t, 0, registry.Filter{})
	s.commitEvents(t, 1, "end")
	others.Wait()
	for w, got := range watched {
		if !reflect.DeepEqual(got, events) {
			t.Errorf("watcher %d got %d events, and not the %d that there are", w, len(got), len(events))
		}
	}
	for _, list := range snapshots {
		for index, snapshot := range list {
			r := newReplay()
			r.apply(slices.DeleteFunc(slices.Clone(events), func(e registry.Event) bool { return e.Seq > index }))
			table := map[registry.InstanceKey]registry.Instance{}
			for _, i := range snapshot.Instances {
				table[i.InstanceKey] = i
			}
			if !reflect.DeepEqual(r.table, table) {
				t.Fatalf("snapshot at %d has %+v, the events lead to %+v", index, table, r.table)
			}
		}
	}
}
