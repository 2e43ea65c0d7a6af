package registrytest

import (
	"fmt"
	"sync"
	"testing"

	"holdfast/registry"
)

// testConcurrency counts in a record: each decision must see all earlier ones.
func testConcurrency(t *testing.T, open Open) {
	log, reopen := open(t)
	const writers, each = 8, 25
	var mu sync.Mutex
	seen := map[registry.Seq]bool{}
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for range each {
				seq, err := log.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
					counter, _ := v.Alloc("counter")
					return putChange(registry.Alloc{ID: "counter", Index: counter.Index + 1},
						registry.Alloc{ID: registry.AllocID(fmt.Sprint("writer-", w))}), nil
				})
				mu.Lock()
				if err != nil || seen[seq] {
					t.Errorf("commit: index %d (used: %v), %v", seq, seen[seq], err)
				}
				seen[seq] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	log = reopen()
	view(t, log, func(v registry.View) {
		if counter, _ := v.Alloc("counter"); counter.Index != writers*each || len(v.Allocs()) != writers+1 {
			t.Errorf("counted to %d of %d; %d records", counter.Index, writers*each, len(v.Allocs()))
		}
	})
}

func testIsolation(t *testing.T, open Open) {
	log, _ := open(t)
	before := mustCommit(t, log, putChange(registry.Alloc{ID: "a", Job: "old"}))
	within(t, "a commit during a view", func() {
		err := log.View(t.Context(), func(v registry.View) error {
			if _, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
				return putChange(registry.Alloc{ID: "a", Job: "new"}, registry.Alloc{ID: "b"}), nil
			}); err != nil {
				return err
			}
			if a, _ := v.Alloc("a"); a.Job != "old" || len(v.Allocs()) != 1 || v.Index() != before {
				t.Errorf("the view changed under its reader: %+v, index %d", v.Allocs(), v.Index())
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	view(t, log, func(v registry.View) {
		if a, _ := v.Alloc("a"); a.Job != "new" {
			t.Errorf("the next view has %+v", a)
		}
	})
}

func testReaders(t *testing.T, open Open) {
	log, _ := open(t)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := log.View(t.Context(), func(v registry.View) error {
					a, _ := v.Alloc("a")
					b, _ := v.Alloc("b")
					if a.Index != b.Index || a.ModifyIndex != b.ModifyIndex {
						return fmt.Errorf("half a commit: %d and %d", a.Index, b.Index)
					}
					return nil
				}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for n := range 50 {
		a, b := registry.Alloc{ID: "a", Index: uint64(n)}, registry.Alloc{ID: "b", Index: uint64(n)}
		mustCommit(t, log, putChange(a, b))
	}
	close(stop)
	readers.Wait()
}

// testNothingShared changes values after they were written: the log must not notice. Values that are read may be shared
// with other readers.
func testNothingShared(t *testing.T, open Open) {
	log, _ := open(t)
	i := Filled[registry.Instance](t, 1)
	want := i.Clone()
	event := i.Clone()
	mustCommit(t, log, registry.Change{Put: []registry.Record{i},
		Events: []registry.Event{{Kind: registry.EventRegistered, Instance: &event}}})
	i.Options["x"], i.Fingerprint.Capabilities[0], event.Options["x"] = "changed", "changed", "changed"
	view(t, log, func(v registry.View) {
		if got, _ := v.Instance(i.InstanceKey); !got.Same(want) {
			t.Errorf("the record changed: %+v, want %+v", got, want)
		}
		if events, _ := v.Events(0, 1); !events[0].Instance.Same(want) {
			t.Errorf("the event's record changed: %+v", events[0].Instance)
		}
	})
}
