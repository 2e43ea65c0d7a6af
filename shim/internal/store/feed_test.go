package store

import (
	"errors"
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// BenchmarkPast is what it costs to be told all events that are kept, of before the feed's time.
func BenchmarkPast(b *testing.B) {
	s := start(b, Options{Path: statePath(b)})
	defer s.stop(b)
	for n := range registry.MaxEvents / 100 {
		events := make([]registry.Event, 100)
		for i := range events {
			events[i] = registrytest.Filled[registry.Event](b, n)
			events[i].Snapshot = nil
		}
		s.must(b, registry.Change{Events: events})
	}
	table := registry.New(s)
	if err := table.Load(b.Context()); err != nil {
		b.Fatal(err)
	}
	feed, caughtUp := registry.NewFeed(s, table, registry.RecentEvents), errors.New("caught up")
	b.ReportAllocs()
	for b.Loop() {
		told := 0
		err := feed.Watch(b.Context(), 0, registry.Filter{Bookmarks: true}, func(e registry.Event) error {
			if e.Kind == registry.EventBookmark {
				return caughtUp
			}
			told++
			return nil
		})
		if err != caughtUp || told != registry.MaxEvents {
			b.Fatalf("told %d events: %v", told, err)
		}
	}
}
