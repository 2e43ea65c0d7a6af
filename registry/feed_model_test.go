package registry_test

import (
	"context"
	"testing"

	"pgregory.net/rapid"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// feedModel is a feed with its log, the history of all events, and a few watchers. Other actions may happen between any
// two steps of a watcher.
type feedModel struct {
	log     *registrytest.Log
	table   *registry.Registry
	feed    *registry.Feed
	all     []registry.Event   // all that were ever committed
	pending []registry.Applied // durable, but neither the table nor the feed knows of it yet
	cursors [3]registry.Seq
	floor   registry.Seq // as last read
	left    int          // how many other actions may still happen while the current watcher runs
	reading bool         // the current watcher has a View open
}

// The numbers of events that the model's log and its feed keep.
const (
	modelKept   = 8
	modelRecent = 3
)

func newFeedModel() *feedModel {
	m := &feedModel{log: registrytest.NewLog(now)}
	m.log.KeepEvents(modelKept)
	return m
}

// open does what a new process does. Nothing is pending, as the process loads all durable changes.
func (m *feedModel) open(t *rapid.T) {
	m.log, m.pending = m.log.Reopen(), nil
	m.table = registry.New(m.log)
	must(t, m.table.Load(context.Background()))
	log := peeked{
		m.log, func() {
			m.happens(t)
			m.reading = true
		}, func() { m.reading = false }, func(_ int, floor registry.Seq) { m.floor = floor; m.happens(t) },
	}
	m.feed = registry.NewFeed(log, m.table, modelRecent)
	m.log.OnApplied(func(a registry.Applied) {
		m.all = append(m.all, a.Change.Events...)
		m.pending = append(m.pending, a)
	})
}

func (m *feedModel) commit(t *rapid.T) {
	c := registry.Change{Put: []registry.Record{registry.Alloc{ID: "a"}}}
	for range rapid.SampledFrom([]int{0, 1, 1, 2, modelRecent + 1, modelKept + 1}).Draw(t, "events") {
		c.Events = append(c.Events, registry.Event{Kind: "k", Plugin: rapid.SampledFrom(plugins).Draw(t, "plugin")})
	}
	_, err := m.log.Commit(context.Background(), func(registry.View) (registry.Change, error) { return c, nil })
	must(t, err)
}

// apply passes some or all pending changes to the table and the feed, in order.
func (m *feedModel) apply(t *rapid.T) {
	for range rapid.IntRange(0, len(m.pending)).Draw(t, "applied") {
		m.table.Applied(m.pending[0])
		m.feed.Applied(m.pending[0])
		m.pending = m.pending[1:]
	}
}

// happens commits and applies changes while a watcher runs.
func (m *feedModel) happens(t *rapid.T) {
	for m.left > 0 && rapid.Bool().Draw(t, "meanwhile") {
		m.left--
		if rapid.Bool().Draw(t, "commits") {
			m.commit(t)
		} else {
			m.apply(t)
		}
	}
}

// watch resumes one of the watchers at its cursor, or at another one.
func (m *feedModel) watch(t *rapid.T) {
	w := rapid.IntRange(0, len(m.cursors)-1).Draw(t, "watcher")
	if rapid.IntRange(0, 3).Draw(t, "anew") == 0 {
		m.cursors[w] = rapid.SampledFrom([]registry.Seq{
			registry.FromSnapshot, registry.Seq(rapid.IntRange(0, int(m.table.Index())+2).Draw(t, "cursor")),
		}).Draw(t, "from")
	}
	m.left = rapid.IntRange(0, 6).Draw(t, "much")
	filter := registry.Filter{Plugin: rapid.SampledFrom([]registry.PluginID{"", "p"}).Draw(t, "filter")}
	m.cursors[w] = m.follow(t, m.cursors[w], filter, rapid.IntRange(1, 20).Draw(t, "most"))
}

// follow watches until it has received all events, or as many as most says. It checks each against the guarantees of
// Watch, and returns the cursor.
func (m *feedModel) follow(t *rapid.T, cursor registry.Seq, filter registry.Filter, most int) registry.Seq {
	filter.Bookmarks = true
	ahead := cursor > m.feed.Index()
	err := m.feed.Watch(context.Background(), cursor, filter, func(e registry.Event) error {
		next := m.next(cursor, filter)
		switch {
		case m.reading:
			t.Fatalf("%s is delivered while the watcher has a View open", e)
		case e.Seq > m.table.Index():
			t.Fatalf("%s is delivered, but the table is at %d", e, m.table.Index())
		case e.Kind == registry.EventResync && !ahead && cursor >= m.floor:
			t.Fatalf("%s after %d, but the floor is %d", e, cursor, m.floor)
		case e.Kind == registry.EventResync:
		case ahead:
			t.Fatalf("%s after %d, which is ahead", e, cursor)
		case e.Kind == registry.EventBookmark && (e.Seq < cursor || next != 0 && next <= e.Seq):
			t.Fatalf("%s after %d, but %d was not delivered", e, cursor, next)
		case e.Kind != registry.EventBookmark && e.Seq != next:
			t.Fatalf("%s after %d, want %d", e, cursor, next)
		}
		cursor, ahead = e.Seq, false
		if most--; most == 0 || e.Kind == registry.EventBookmark {
			return errStop
		}
		m.happens(t)
		return nil
	})
	if err != errStop {
		t.Fatalf("watch: %v", err)
	}
	return cursor
}

// next returns the number of the first event after the cursor that the filter lets pass, or 0 if there is none.
func (m *feedModel) next(cursor registry.Seq, filter registry.Filter) registry.Seq {
	for _, e := range m.all {
		if e.Seq > cursor && filter.Pass(e) {
			return e.Seq
		}
	}
	return 0
}

// check runs a watcher without other actions, and checks that it reaches the index.
func (m *feedModel) check(t *rapid.T) {
	m.left = 0
	if at := m.follow(t, m.cursors[0], registry.Filter{}, 1000); at != m.table.Index() {
		t.Fatalf("a watcher without a filter is at %d, and the table at %d", at, m.table.Index())
	}
}

// The feed has few events in memory, and the log few more. A watcher gets exactly the events after its cursor, or a
// resync if they are pruned. The feed delivers nothing that is durable but not yet applied, and loses nothing over a
// reopen.
func TestFeedModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newFeedModel()
		m.open(t)
		t.Repeat(map[string]func(*rapid.T){
			"commit": m.commit, "apply": m.apply, "watch": m.watch, "watch again": m.watch, "reopen": m.open,
			"": m.check,
		})
	})
}
