package registrytest

import (
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"

	"holdfast/registry"
)

func testEvents(t *testing.T, open Open) {
	log, reopen := open(t)
	event := Filled[registry.Event](t, 1)
	event.Snapshot = nil
	first := mustCommit(t, log, registry.Change{Events: []registry.Event{event, {Kind: "b"}, {Kind: "c"}}})
	second := mustCommit(t, log, putChange(registry.Alloc{ID: "a"}))
	third := mustCommit(t, log, registry.Change{Events: []registry.Event{{Kind: "d"}}})
	if second < first+3 || third <= second {
		t.Errorf("commits at %d, %d, %d: three events need three numbers", first, second, third)
	}
	log = reopen()
	view(t, log, func(v registry.View) {
		all, floor := v.Events(0, 10)
		var seqs []registry.Seq
		for _, e := range all {
			seqs = append(seqs, e.Seq)
		}
		if want := []registry.Seq{first, first + 1, first + 2, third}; !slices.Equal(seqs, want) || floor >= first {
			t.Fatalf("events have numbers %v, want %v; floor %d", seqs, want, floor)
		}
		event.Seq, event.Generation = first, all[0].Generation
		if !reflect.DeepEqual(all[0], event) {
			t.Errorf("event is\n%+v, want\n%+v", all[0], event)
		}
		if some, _ := v.Events(first, 2); len(some) != 2 || some[0].Seq != first+1 || some[1].Seq != first+2 {
			t.Errorf("two events after %d are %v", first, some)
		}
		if none, _ := v.Events(v.Index(), 10); len(none) != 0 {
			t.Errorf("events after the index: %v", none)
		}
		if v.Index() != third {
			t.Errorf("index is %d after one event at %d", v.Index(), third)
		}
	})
}

// testEventInstance checks that an event has the instance as it was written, with its indexes.
func testEventInstance(t *testing.T, open Open) {
	log, _ := open(t)
	i := Filled[registry.Instance](t, 1)
	event := i.Clone()
	other := Filled[registry.Instance](t, 2)
	first := mustCommit(t, log, putChange(i))
	second := mustCommit(t, log, registry.Change{Put: []registry.Record{i}, Events: []registry.Event{
		{Kind: registry.EventUpdated, Instance: &event}, {Kind: registry.EventActivated, Instance: &other},
	}})
	view(t, log, func(v registry.View) {
		stored, _ := v.Instance(i.InstanceKey)
		events, _ := v.Events(0, 2)
		if !reflect.DeepEqual(*events[0].Instance, stored) || stored.CreateIndex != first ||
			stored.ModifyIndex != second {
			t.Errorf("the event has\n%+v, stored is\n%+v", *events[0].Instance, stored)
		}
		if !reflect.DeepEqual(*events[1].Instance, other) {
			t.Errorf("an instance that was not put is reported as\n%+v, want\n%+v", *events[1].Instance, other)
		}
	})
}

func testPruning(t *testing.T, open Open) {
	log, reopen := open(t)
	const each = registry.MaxEvents / 4
	var last registry.Seq
	for range 5 {
		events := make([]registry.Event, each)
		for i := range events {
			events[i].Kind = registry.EventStaged
		}
		last = mustCommit(t, log, registry.Change{Events: events}) + each - 1
	}
	log = reopen()
	view(t, log, func(v registry.View) {
		kept, floor := v.Events(0, 2*registry.MaxEvents)
		if len(kept) != registry.MaxEvents || kept[0].Seq != last-registry.MaxEvents+1 ||
			kept[len(kept)-1].Seq != last {
			t.Fatalf("kept %d events, %d to %d; last is %d", len(kept), kept[0].Seq, kept[len(kept)-1].Seq, last)
		}
		if floor != kept[0].Seq-1 {
			t.Errorf("floor is %d below %d", floor, kept[0].Seq)
		}
	})
}

// listen collects the changes that the log reports. Its result is nil for a log without OnApplied.
func listen(log registry.State) func() []registry.Applied {
	source, ok := log.(interface{ OnApplied(func(registry.Applied)) })
	if !ok {
		return func() []registry.Applied { return nil }
	}
	var mu sync.Mutex
	reported := []registry.Applied{}
	source.OnApplied(func(a registry.Applied) {
		mu.Lock()
		defer mu.Unlock()
		reported = append(reported, a)
	})
	return func() []registry.Applied {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(reported)
	}
}

// testApplied checks that a listener gets each commit once, in order, with its records as written, before Commit
// returns.
func testApplied(t *testing.T, open Open) {
	log, _ := open(t)
	applied := listen(log)
	if applied() == nil {
		t.Skip("this log has no method OnApplied: its owner gets the changes in another way")
	}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for n := range 10 {
				id := registry.AllocID(fmt.Sprintf("%d-%d", w, n))
				seq, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
					return registry.Change{Put: []registry.Record{registry.Alloc{ID: id}},
						Events: make([]registry.Event, n%3)}, nil
				})
				if err != nil || !slices.ContainsFunc(applied(), func(a registry.Applied) bool {
					return a.Index == seq && a.Change.Put[0].(registry.Alloc).ID == id
				}) {
					t.Errorf("commit %s at %d was not reported before it returned; %v", id, seq, err)
				}
			}
		})
	}
	wg.Wait()
	reported := applied()
	if len(reported) != 40 {
		t.Errorf("%d changes were reported", len(reported))
	}
	var last registry.Seq
	for _, a := range reported {
		r := a.Change.Put[0].(registry.Alloc)
		if a.Index <= last || r.CreateIndex != a.Index || r.ModifyIndex != a.Index {
			t.Errorf("after %d: %+v", last, a)
		}
		for i, e := range a.Change.Events {
			if e.Seq != a.Index+registry.Seq(i) {
				t.Errorf("event %d of the change at %d has number %d", i, a.Index, e.Seq)
			}
		}
		last = a.Last()
	}
	view(t, log, func(v registry.View) {
		if v.Index() != last {
			t.Errorf("index is %d, the last change ended at %d", v.Index(), last)
		}
	})
}
