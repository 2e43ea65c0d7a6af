package registry_test

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// commitEvents commits n events that concern no instance.
func (s *stage) commitEvents(t fataler, n int, kind registry.EventKind) {
	t.Helper()
	for range n {
		must(t, s.commit(func(registry.View) (registry.Change, error) {
			return registry.Change{Events: []registry.Event{{Kind: kind, Role: "r", Plugin: "p"}}}, nil
		}))
	}
}

// commitOthers commits n changes without events.
func (s *stage) commitOthers(t fataler, n int) {
	t.Helper()
	for range n {
		must(t, s.commit(func(registry.View) (registry.Change, error) {
			return registry.Change{Put: []registry.Record{registry.Alloc{ID: "a"}}}, nil
		}))
	}
}

func kindsOf(events []registry.Event) (out []string) {
	for _, e := range events {
		out = append(out, string(e.Kind))
	}
	return out
}

func TestWatchFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := empty(t)
		s.commitEvents(t, 3, "early")
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
		s.commitEvents(t, 2, "late")
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

// The end of the context ends a watch that has not caught up.
func TestWatchStopsWhileBehind(t *testing.T) {
	s := empty(t)
	s.commitEvents(t, 10, "x")
	ctx, cancel := context.WithCancel(t.Context())
	calls := 0
	err := s.feed.Watch(ctx, 0, registry.Filter{}, func(registry.Event) error { calls++; cancel(); return nil })
	if err != context.Canceled || calls != 1 {
		t.Errorf("Watch returned %v after %d calls", err, calls)
	}
}

func TestSnapshotThenFollow(t *testing.T) {
	s := empty(t)
	must(t, s.put(instance(key("r", "p", "a"), registry.Healthy)))
	must(t, s.put(instance(key("q", "p", "b"), registry.Healthy)))
	events := s.after(t, registry.FromSnapshot, registry.Filter{})
	if len(events) != 1 || events[0].Kind != registry.EventResync ||
		!reflect.DeepEqual(*events[0].Snapshot, s.table.All()) || events[0].Seq != s.table.Index() {
		t.Fatalf("got %v", events)
	}
	must(t, s.put(instance(key("r", "p", "c"), registry.Healthy)))
	same(t, "then", brief(s.after(t, events[0].Seq, registry.Filter{})), "registered r c", "activated r c")
	filtered := s.after(t, registry.FromSnapshot, registry.Filter{Role: "q",
		Kinds: []registry.EventKind{registry.EventHealthy}})
	if len(filtered) != 1 || len(filtered[0].Snapshot.Instances) != 1 ||
		filtered[0].Snapshot.Instances[0].Alloc != "b" {
		t.Errorf("filtered: %+v", filtered[0].Snapshot)
	}
	if len(s.table.All().Instances) != 3 {
		t.Error("the filter changed the table")
	}
}

func TestLaggingWatcherResyncs(t *testing.T) {
	s := small(t, 5, 2)
	must(t, s.put(instance(key("r", "p", "a"), registry.Healthy))) // 1, 2
	s.commitEvents(t, 5, "x")                                      // 3 to 7
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

// A watcher that falls behind during its callback gets a resync, and every event after it.
func TestSlowWatcherGetsAResync(t *testing.T) {
	s := small(t, 300, 100)
	s.commitEvents(t, 1, "first")
	var got []registry.Event
	err := s.feed.Watch(t.Context(), 0, registry.Filter{}, func(e registry.Event) error {
		got = append(got, e)
		switch len(got) {
		case 1:
			s.commitEvents(t, 320, "missed")
		case 2:
			s.commitEvents(t, 2, "after")
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

// A watcher that hangs in its callback delays neither commits nor other watchers.
func TestDeadWatcherBlocksNobody(t *testing.T) {
	s := small(t, registry.MaxEvents, 100)
	dead, stuck := make(chan struct{}), make(chan struct{})
	var watcher sync.WaitGroup
	watcher.Go(func() {
		_ = s.feed.Watch(context.Background(), 0, registry.Filter{}, func(registry.Event) error {
			close(stuck)
			<-dead
			return errStop
		})
	})
	s.commitEvents(t, 1, "x")
	<-stuck
	s.commitEvents(t, 300, "x")
	if n := len(s.after(t, 0, registry.Filter{})); n != 301 {
		t.Errorf("another watcher got %d events", n)
	}
	close(dead)
	watcher.Wait()
}

func TestFilter(t *testing.T) {
	s := empty(t)
	must(t, s.put(instance(key("r", "p", "a"), registry.Healthy)))
	must(t, s.put(instance(key("q", "p", "b"), registry.Healthy)))
	must(t, s.put(instance(key("r", "q", "c"), registry.Healthy)))
	same(t, "role", brief(s.after(t, 0, registry.Filter{Role: "r"})), "registered r a", "activated r a",
		"registered r c", "activated r c")
	same(t, "plugin", brief(s.after(t, 0, registry.Filter{Plugin: "p"})), "registered r a", "activated r a",
		"registered q b", "activated q b")
	same(t, "all three", brief(s.after(t, 0, registry.Filter{Role: "r", Plugin: "p",
		Kinds: []registry.EventKind{"activated", "x"}})), "activated r a")
	same(t, "none", brief(s.after(t, 0, registry.Filter{Plugin: "z"})))
}

// A watcher whose filter passes no event gets bookmarks, so its cursor stays above the floor.
func TestBookmarks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := small(t, registry.MaxEvents, 80)
		ctx, cancel := context.WithCancel(t.Context())
		var got []registry.Event
		ended := make(chan error)
		go func() {
			ended <- s.feed.Watch(ctx, 0, registry.Filter{Plugin: "none", Bookmarks: true},
				func(e registry.Event) error {
					got = append(got, e)
					return nil
				})
		}()
		for range 300 {
			s.commitEvents(t, 1, "x")
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

// peeked is a log that reports the begin and end of each View, and each read of events.
type peeked struct {
	*registrytest.Log
	begins, ends func()
	read         func(limit int, floor registry.Seq)
}

func (p peeked) View(ctx context.Context, read func(registry.View) error) error {
	p.begins()
	defer p.ends()
	return p.Log.View(ctx, func(v registry.View) error {
		return read(registry.View{Reader: peekedReader{v.Reader, p.read}})
	})
}

type peekedReader struct {
	registry.Reader
	read func(limit int, floor registry.Seq)
}

func (r peekedReader) Events(after registry.Seq, limit int) ([]registry.Event, registry.Seq) {
	events, floor := r.Reader.Events(after, limit)
	r.read(limit, floor)
	return events, floor
}

// A watcher gets the events from before the start of the feed from any cursor, and reads few of them at once. A watcher
// at the index reads nothing from the log.
func TestPastIsReadInBatches(t *testing.T) {
	const most = 256
	for _, past := range []int{0, 1, most - 1, most, most + 1, 2*most + 1} {
		s := empty(t)
		s.commitEvents(t, past, "past")
		s.commitOthers(t, 3)
		s = newStage(t, s.log.Reopen(), 100)
		views, reads := 0, 0
		log := peeked{s.log, func() { views++ }, func() {}, func(limit int, _ registry.Seq) {
			if reads++; limit > most {
				t.Errorf("%d events are read at once", limit)
			}
		}}
		s.feed = registry.NewFeed(log, s.table, 100)
		s.log.OnApplied(s.feed.Applied)
		start := s.feed.Index()
		s.commitEvents(t, 3, "recent")
		for _, after := range []registry.Seq{0, registry.Seq(past / 2), start} {
			views, reads = 0, 0
			want, _ := viewOf(t, s.log).Events(after, 10*most)
			if got := s.after(t, after, registry.Filter{}); !reflect.DeepEqual(got, want) {
				t.Errorf("%d events, after %d: got %d, want %d", past, after, len(got), len(want))
			}
			if after == start && views > 0 || reads > past/most+1 {
				t.Errorf("%d events, after %d: %d reads in %d views", past, after, reads, views)
			}
		}
	}
}

// An error of the log ends the watchers that need to read it, and no others.
func TestWatchEndsWithTheLog(t *testing.T) {
	s := empty(t)
	s.commitEvents(t, 3, "past")
	s = newStage(t, s.log.Reopen(), 100)
	closed := registry.Errorf(registry.ErrUnavailable, "the log is closed")
	feed := registry.NewFeed(shut{s.log, closed}, s.table, 100)
	s.log.OnApplied(feed.Applied)
	s.commitEvents(t, 1, "recent")
	calls := 0
	count := func(registry.Event) error { calls++; return errStop }
	if err := feed.Watch(t.Context(), 1, registry.Filter{}, count); err != closed || calls != 0 {
		t.Errorf("of the past: %v after %d events", err, calls)
	}
	if err := feed.Watch(t.Context(), 3, registry.Filter{}, count); err != errStop || calls != 1 {
		t.Errorf("of what is in memory: %v after %d events", err, calls)
	}
}

// shut is a log that cannot be read.
type shut struct {
	*registrytest.Log
	err error
}

func (s shut) View(context.Context, func(registry.View) error) error { return s.err }
