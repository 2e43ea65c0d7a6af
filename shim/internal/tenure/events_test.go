package tenure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestFeedIsFilled: however many events there are, learnt or not, a watcher is told each of them, and the newest at once.
func TestFeedIsFilled(t *testing.T) {
	for _, events := range []int{0, 1, latest, newest - 1, newest + 1, newest + 3*olderAtOnce, newest + 3*olderAtOnce + 1} {
		for _, learnt := range []int{-1, 0, 1, events / 2, events} {
			t.Run(fmt.Sprintf("%d events, %d learnt", events, learnt), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { filled(t, events, learnt) })
			})
		}
	}
}

func filled(t *testing.T, events, learnt int) {
	log := registrytest.NewLog(time.Now)
	commit := func(n int) {
		_, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
			return registry.Change{Events: slices.Repeat([]registry.Event{{Kind: "k"}}, n)}, nil
		})
		must(t, err)
	}
	commit(events)
	var in inheritance
	if learnt >= 0 {
		in.learnt = learntOf(t, log, learnt)
	}
	table := registry.New(log, time.Now)
	feed := registry.NewFeed(registry.MaxEvents, table.All)
	older, err := in.fill(t.Context(), log, feed)
	must(t, err)
	log.OnApplied(feed.Applied)
	commit(1)
	begun := time.Now()
	if n, late := told(t, feed, registry.Seq(max(0, events-latest))), time.Since(begun); n != min(events, latest)+1 || late > toldFor {
		t.Errorf("of the newest %d were told, after %v", n, late)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	if (older == nil) != (events <= latest || learnt < 0 && events <= newest) {
		t.Errorf("there are older events: %v", older != nil)
	}
	if older == nil {
		older = func(context.Context) error { return nil }
	}
	go func() { ended <- older(ctx) }()
	all := make(chan int)
	go func() { all <- told(t, feed, 0) }()
	synctest.Wait()
	if n := <-all; n != events+1 || time.Since(begun) > 2*toldFor {
		t.Errorf("%d of %d events were told, after %v", n, events+1, time.Since(begun))
	}
	time.Sleep(2 * calm)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	cancel()
}

// learntOf is what a rehearsal has learnt that came after so many events.
func learntOf(t *testing.T, log registry.Log, n int) *learnt {
	t.Helper()
	l := &learnt{}
	must(t, log.View(t.Context(), func(v registry.View) error {
		all, _ := v.Events(0, registry.MaxEvents)
		l.events = all[:min(n, len(all))]
		return nil
	}))
	return l
}

const toldFor = time.Millisecond

// told counts the events after a cursor that a watcher is told in toldFor. They rise.
func told(t *testing.T, feed *registry.Feed, after registry.Seq) (n int) {
	ctx, cancel := context.WithTimeout(t.Context(), toldFor)
	defer cancel()
	err := feed.Watch(ctx, after, registry.Filter{}, func(e registry.Event) error {
		if e.Kind == registry.EventResync || e.Seq <= after {
			t.Errorf("after %d event %d is told: %s", after, e.Seq, e.Kind)
		}
		n, after = n+1, e.Seq
		return nil
	})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	return n
}
