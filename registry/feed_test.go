package registry_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// tell commits n events that concern no instance.
func (s *stage) tell(t fataler, n int, kind registry.EventKind) {
	t.Helper()
	for range n {
		_, err := s.log.Commit(context.Background(), func(registry.View) (registry.Change, error) {
			return registry.Change{Events: []registry.Event{{Kind: kind, Role: "r", Plugin: "p"}}}, nil
		})
		must(t, err)
	}
}

func small(limit int) *stage { return newStage(registrytest.NewLog(now), limit) }

func kindsOf(events []registry.Event) (out []string) {
	for _, e := range events {
		out = append(out, string(e.Kind))
	}
	return out
}

func TestWatchFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := empty()
		s.tell(t, 3, "early")
		ctx, cancel := context.WithCancelCause(t.Context())
		var got []registry.Seq
		ended := make(chan error)
		go func() {
			ended <- s.feed.Watch(ctx, 1, registry.Filter{}, func(e registry.Event) error {
				got = append(got, e.Seq)
				return nil
			})
		}()
		synctest.Wait()
		s.tell(t, 2, "late")
		synctest.Wait()
		reason := errors.New("the host went away")
		cancel(reason)
		if err := <-ended; err != reason {
			t.Errorf("Watch returned %v", err)
		}
		if want := []registry.Seq{2, 3, 4, 5}; !reflect.DeepEqual(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
}

func TestWatchReturnsTheCallbacksError(t *testing.T) {
	s := empty()
	s.tell(t, 3, "x")
	calls := 0
	reason := errors.New("enough")
	if err := s.feed.Watch(t.Context(), 0, registry.Filter{}, func(registry.Event) error { calls++; return reason }); err != reason || calls != 1 {
		t.Errorf("Watch returned %v after %d calls", err, calls)
	}
}

// A finished context ends a watch in the middle of what it is behind by.
func TestWatchStopsWhileBehind(t *testing.T) {
	s := empty()
	s.tell(t, 10, "x")
	ctx, cancel := context.WithCancel(t.Context())
	calls := 0
	err := s.feed.Watch(ctx, 0, registry.Filter{}, func(registry.Event) error { calls++; cancel(); return nil })
	if err != context.Canceled || calls != 1 {
		t.Errorf("Watch returned %v after %d calls", err, calls)
	}
}

func TestSnapshotThenFollow(t *testing.T) {
	s := empty()
	s.put(t, instance(key("r", "p", "a"), registry.Healthy))
	s.put(t, instance(key("q", "p", "b"), registry.Healthy))
	events := s.after(t, registry.FromSnapshot, registry.Filter{})
	if len(events) != 1 || events[0].Kind != registry.EventResync || !reflect.DeepEqual(*events[0].Snapshot, s.table.All()) || events[0].Seq != s.table.Index() {
		t.Fatalf("got %v", events)
	}
	s.put(t, instance(key("r", "p", "c"), registry.Healthy))
	same(t, "then", brief(s.after(t, events[0].Seq, registry.Filter{})), "registered r c", "activated r c")
	filtered := s.after(t, registry.FromSnapshot, registry.Filter{Role: "q", Kinds: []registry.EventKind{registry.EventHealthy}})
	if len(filtered) != 1 || len(filtered[0].Snapshot.Instances) != 1 || filtered[0].Snapshot.Instances[0].Alloc != "b" {
		t.Errorf("filtered: %+v", filtered[0].Snapshot)
	}
	if len(s.table.All().Instances) != 3 {
		t.Error("the filter changed the table")
	}
}

// A cursor that nobody gave out, as after a restored backup: a resync, not silence.
func TestCursorAheadOfEverything(t *testing.T) {
	s := empty()
	s.tell(t, 1, "x")
	same(t, "events", kindsOf(s.after(t, 999, registry.Filter{})), "resync")
}

func TestLaggingWatcherResyncs(t *testing.T) {
	s := small(5)
	s.put(t, instance(key("r", "p", "a"), registry.Healthy)) // 1, 2
	s.tell(t, 5, "x")                                        // 3 to 7
	same(t, "at the floor", kindsOf(s.after(t, 2, registry.Filter{})), "x", "x", "x", "x", "x")
	events := s.after(t, 1, registry.Filter{Plugin: "other"})
	same(t, "below it", kindsOf(events), "resync")
	if events[0].Seq != 7 || len(events[0].Snapshot.Instances) != 0 {
		t.Errorf("resync at %d with %+v", events[0].Seq, events[0].Snapshot)
	}
	events = s.after(t, 0, registry.Filter{Plugin: "p"})
	if len(events) != 1 || len(events[0].Snapshot.Instances) != 1 {
		t.Errorf("got %v", events)
	}
}

// A watcher that falls behind while its callback works is told, and misses nothing after.
func TestSlowWatcherIsTold(t *testing.T) {
	s := small(300)
	s.tell(t, 1, "first")
	var got []registry.Event
	err := s.feed.Watch(t.Context(), 0, registry.Filter{}, func(e registry.Event) error {
		got = append(got, e)
		switch len(got) {
		case 1:
			s.tell(t, 320, "missed")
		case 2:
			s.tell(t, 2, "after")
		case 4:
			return errStop
		}
		return nil
	})
	if err != errStop {
		t.Fatal(err)
	}
	same(t, "events", kindsOf(got), "first", "resync", "after", "after")
	if got[2].Seq != got[1].Seq+1 {
		t.Errorf("resync at %d, then %d", got[1].Seq, got[2].Seq)
	}
}

// A dead watcher, stuck in its callback for ever, delays neither commits nor others.
func TestDeadWatcherBlocksNobody(t *testing.T) {
	s := small(100)
	dead, stuck := make(chan struct{}), make(chan struct{})
	var watcher sync.WaitGroup
	watcher.Go(func() {
		_ = s.feed.Watch(context.Background(), 0, registry.Filter{}, func(registry.Event) error {
			close(stuck)
			<-dead
			return errStop
		})
	})
	s.tell(t, 1, "x")
	<-stuck
	s.tell(t, 300, "x")
	if n := len(s.after(t, s.feed.Index()-50, registry.Filter{})); n != 50 {
		t.Errorf("another watcher got %d events", n)
	}
	close(dead)
	watcher.Wait()
}

func TestFilter(t *testing.T) {
	s := empty()
	s.put(t, instance(key("r", "p", "a"), registry.Healthy))
	s.put(t, instance(key("q", "p", "b"), registry.Healthy))
	s.put(t, instance(key("r", "q", "c"), registry.Healthy))
	same(t, "role", brief(s.after(t, 0, registry.Filter{Role: "r"})), "registered r a", "activated r a", "registered r c", "activated r c")
	same(t, "plugin", brief(s.after(t, 0, registry.Filter{Plugin: "p"})), "registered r a", "activated r a", "registered q b", "activated q b")
	same(t, "all three", brief(s.after(t, 0, registry.Filter{Role: "r", Plugin: "p", Kinds: []registry.EventKind{"activated", "x"}})), "activated r a")
	same(t, "none", brief(s.after(t, 0, registry.Filter{Plugin: "z"})))
}

// A watcher whose filter lets nothing pass gets to know how far it is, so that its cursor stays good.
func TestBookmarks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := small(80)
		ctx, cancel := context.WithCancel(t.Context())
		var got []registry.Event
		ended := make(chan error)
		go func() {
			ended <- s.feed.Watch(ctx, 0, registry.Filter{Plugin: "none", Bookmarks: true}, func(e registry.Event) error {
				got = append(got, e)
				return nil
			})
		}()
		for range 300 {
			s.tell(t, 1, "x")
			synctest.Wait()
		}
		cancel()
		<-ended
		last := registry.Seq(0)
		for _, e := range got {
			if e.Kind != registry.EventBookmark || e.Seq < last || e.Seq > last+10 && last > 0 {
				t.Errorf("after %d: %v", last, e)
			}
			last = e.Seq
		}
		if last < 290 || len(got) > 40 {
			t.Errorf("%d bookmarks, the last at %d of 300", len(got), last)
		}
	})
}

// Commits without events move the cursor of those who watch, too.
func TestBookmarkIsAtTheIndex(t *testing.T) {
	s := empty()
	s.tell(t, 1, "x")
	for range 3 {
		_, err := s.log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
			return registry.Change{Put: []registry.Record{registry.Alloc{ID: "a"}}}, nil
		})
		must(t, err)
	}
	var last registry.Event
	_ = s.feed.Watch(t.Context(), 0, registry.Filter{Bookmarks: true}, func(e registry.Event) error {
		if last = e; e.Kind == registry.EventBookmark {
			return errStop
		}
		return nil
	})
	if last.Seq != 4 || s.feed.Index() != 4 || s.table.Index() != 4 {
		t.Errorf("bookmark at %d, feed at %d, table at %d, want 4", last.Seq, s.feed.Index(), s.table.Index())
	}
}

// Many watchers with cursors of their own see every event once and in order, whatever the commits do meanwhile.
func TestWatchersUnderLoad(t *testing.T) {
	s := empty()
	const events = 400
	var watchers, writers sync.WaitGroup
	for w := range 6 {
		watchers.Go(func() {
			next := registry.Seq(1)
			err := s.feed.Watch(context.Background(), 0, registry.Filter{}, func(e registry.Event) error {
				if e.Seq != next {
					return fmt.Errorf("watcher %d: event %d, want %d", w, e.Seq, next)
				}
				if next++; next > events {
					return errStop
				}
				return nil
			})
			if err != errStop {
				t.Error(err)
			}
		})
	}
	for range 4 {
		writers.Go(func() { s.tell(t, events/4, "x") })
	}
	writers.Wait()
	watchers.Wait()
}

// The feed goes on after a reopen where it was: no event twice, none missing.
func TestFeedAfterReopen(t *testing.T) {
	s := empty()
	s.tell(t, 3, "old")
	next := newStage(s.log.Reopen(), 2)
	must(t, next.load(t.Context()))
	same(t, "kept", kindsOf(next.after(t, 1, registry.Filter{})), "old", "old")
	same(t, "cut", kindsOf(next.after(t, 0, registry.Filter{})), "resync")
	next.tell(t, 1, "new")
	events := next.after(t, 3, registry.Filter{})
	if len(events) != 1 || events[0].Seq != 4 || events[0].Generation != 2 {
		t.Errorf("got %+v", events)
	}
}

// TestOlderEventsComeLater: a feed that has only the newest events tells those at once. Who asks for older ones waits until they have come, and
// misses none; what happens meanwhile is told after them.
func TestOlderEventsComeLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := empty()
		s.tell(t, 10, "early")
		var older, newer []registry.Event
		must(t, s.log.View(t.Context(), func(v registry.View) error {
			all, _ := v.Events(0, 100)
			older, newer = all[:6], all[6:]
			return nil
		}))
		feed := registry.NewFeed(100, s.table.All)
		wanted := feed.Load(newer, older[5].Seq, 2, newer[3].Seq)
		told := func(after registry.Seq) func() []registry.Seq {
			var got []registry.Seq
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() {
				ended <- feed.Watch(ctx, after, registry.Filter{}, func(e registry.Event) error {
					if e.Kind == registry.EventResync {
						got = append(got, 0)
						return nil
					}
					got = append(got, e.Seq)
					return nil
				})
			}()
			return func() []registry.Seq {
				synctest.Wait()
				cancel()
				<-ended
				return got
			}
		}
		recent := told(7)
		if got := recent(); !reflect.DeepEqual(got, []registry.Seq{8, 9, 10}) {
			t.Errorf("the newest: %v", got)
		}
		select {
		case <-wanted:
			t.Error("nobody wants older ones yet")
		default:
		}
		if got := told(4)(); got != nil {
			t.Errorf("who gives up waiting was told %v", got)
		}
		<-wanted
		old, lost := told(4), told(1)
		synctest.Wait()
		feed.Applied(registry.Applied{Index: 11, Change: registry.Change{Events: []registry.Event{{Seq: 11, Kind: "late"}}}})
		synctest.Wait()
		feed.LoadRest(older[2:], 2)
		if got := old(); !reflect.DeepEqual(got, []registry.Seq{5, 6, 7, 8, 9, 10, 11}) {
			t.Errorf("older ones: %v", got)
		}
		if got := lost(); len(got) == 0 || got[0] != 0 {
			t.Errorf("whose events are gone was told %v", got)
		}
	})
}

// TestOlderEventsMayHaveGone: where so much has happened since that the newest events were pruned already, older ones do not come back, and a
// watcher in between is told that it has missed some.
func TestOlderEventsMayHaveGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events := func(from, to registry.Seq) (list []registry.Event) {
			for seq := from; seq <= to; seq++ {
				list = append(list, registry.Event{Seq: seq, Kind: "k"})
			}
			return list
		}
		feed := registry.NewFeed(10, func() registry.Snapshot { return registry.Snapshot{Index: 35} })
		feed.Load(events(11, 15), 10, 0, 15)
		feed.Applied(registry.Applied{Index: 16, Change: registry.Change{Events: events(16, 35)}})
		feed.LoadRest(events(1, 10), 0)
		var got []registry.Event
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() {
			ended <- feed.Watch(ctx, 12, registry.Filter{}, func(e registry.Event) error { got = append(got, e); return nil })
		}()
		synctest.Wait()
		cancel()
		<-ended
		if len(got) != 1 || got[0].Kind != registry.EventResync {
			t.Errorf("told %v", got)
		}
	})
}
