package registry

import (
	"context"
	"slices"
	"sort"
	"sync/atomic"
)

// FromSnapshot is the cursor of a watcher that knows nothing yet: it gets a snapshot first, as EventResync, and then
// every event after it.
const FromSnapshot = ^Seq(0)

// RecentEvents is how many events a Feed keeps in memory: those of some seconds on the busiest node, so that a watcher
// that keeps up, or that was away for a moment, has nothing read for it. They are a megabyte at most. For who is
// further behind there is the Log, which has MaxEvents.
const RecentEvents = 1000

// batchSize is how many events a watcher copies, or has read from the Log, at once: more than it is ever behind by,
// unless it is slow. Who closes the Log waits for no more than that, some milliseconds.
const batchSize = 256

// Filter says which events a watcher wants. What is empty lets everything pass. EventResync passes every filter, its
// snapshot holding the instances of Role and Plugin only.
type Filter struct {
	Role   Role
	Plugin PluginID
	Kinds  []EventKind
	// Bookmarks asks for EventBookmark: once when the watcher has caught up for the first time, and then whenever it
	// has come a good way without an event that passes. A watcher that resumes there later is not told to resync for
	// its filter's sake.
	Bookmarks bool
}

// Feed tells watchers the events of a Log: the newest from memory, older ones as the Log has them. A watcher is a
// cursor in its caller's goroutine, and what it needs of the Log is read there: the Feed knows none of them, so a slow
// or dead one, or one that begins long ago, delays nobody and costs nothing.
type Feed struct {
	log     State
	table   *Registry
	limit   int
	current atomic.Pointer[recent]
}

// recent is the events in memory as of one index. Later ones may share its array, beyond its own length.
type recent struct {
	events []Event       // all above after, ascending
	after  Seq           // events up to it are in the Log only, if they were not pruned
	index  Seq           // of the last change that was applied
	more   chan struct{} // closed when there are further events
}

// NewFeed keeps in memory up to limit of the events that follow the table's index: a table is loaded before its Feed is
// made. The Log has to tell the table of a change before the Feed.
func NewFeed(log State, table *Registry, limit int) *Feed {
	f := &Feed{log: log, table: table, limit: max(limit, 1)}
	at := table.Index()
	f.current.Store(&recent{after: at, index: at, more: make(chan struct{})})
	return f
}

// Applied takes over the events of a committed change and wakes those who wait for them. The Log calls it in commit
// order, one call after the other.
func (f *Feed) Applied(a Applied) {
	old := f.current.Load()
	if a.Last() <= old.index {
		return // the table was loaded with it
	}
	if len(a.Change.Events) == 0 {
		f.current.Store(&recent{old.events, old.after, a.Last(), old.more})
		return
	}
	f.current.Store(f.pruned(recent{append(old.events, a.Change.Events...), old.after, a.Last(), make(chan struct{})}))
	close(old.more)
}

// pruned is r without what is beyond the limit. The array goes with the next append that needs a larger one.
func (f *Feed) pruned(r recent) *recent {
	if over := len(r.events) - f.limit; over > 0 {
		r.after = r.events[over-1].Seq
		r.events = r.events[over:]
	}
	return &r
}

// Index is that of the last change that was applied.
func (f *Feed) Index() Seq { return f.current.Load().index }

// Watch calls fn, in its own goroutine and under no lock, with every event after the cursor that passes the filter, in
// order, until ctx ends or fn returns an error; it returns that error or the context's cause. An error of the Log ends
// it too. A cursor whose events the Log has pruned, or that is ahead of everything (FromSnapshot), gets one EventResync
// with the table of instances, then the events after that snapshot's index. No event is told before its change was
// applied: the table knows of it. The next cursor is the Seq of the last event that fn got. What events point to is
// shared: fn does not change it.
func (f *Feed) Watch(ctx context.Context, after Seq, filter Filter, fn func(Event) error) error {
	w := watcher{feed: f, filter: filter, fn: fn, cursor: after}
	if after > f.Index() {
		if err := w.resync(ctx); err != nil {
			return err
		}
	}
	for {
		now := f.current.Load()
		caughtUp, err := w.follow(ctx, now)
		if err != nil {
			return err
		}
		if !caughtUp {
			continue
		}
		select {
		case <-ctx.Done():
		case <-now.more:
		}
	}
}

// watcher is one Watch under way.
type watcher struct {
	feed    *Feed
	filter  Filter
	fn      func(Event) error
	cursor  Seq
	skipped int  // events that did not pass since fn was told anything
	caught  bool // up, for the first time
	batch   []Event
}

// follow brings the watcher closer to the index by one batch, and says whether it has come there.
func (w *watcher) follow(ctx context.Context, now *recent) (caughtUp bool, err error) {
	if w.cursor < now.after {
		return false, w.past(ctx, now.after)
	}
	rest := now.events[firstAfter(now.events, w.cursor):]
	// Copied, so that a watcher stuck in fn keeps a batch alive and not the whole log.
	w.batch = append(w.batch[:0], rest[:min(len(rest), batchSize)]...)
	for _, e := range w.batch {
		if err := w.tell(ctx, e, w.filter.Pass(e)); err != nil {
			return false, err
		}
	}
	if len(rest) > batchSize {
		return false, nil
	}
	w.cursor = max(w.cursor, now.index)
	if due := !w.caught || w.skipped >= max(w.feed.limit/8, 1); due && w.filter.Bookmarks {
		w.caught = true
		return true, w.tell(ctx, Event{Seq: w.cursor, Kind: EventBookmark}, true)
	}
	return true, ctxErr(ctx)
}

// past tells one batch of those events up to a number that only the Log has. fn is called when the View is over:
// whoever closes the Log does not wait for it. What the Log has above the number is left out: it may not have been
// applied yet.
func (w *watcher) past(ctx context.Context, upTo Seq) error {
	limit := int(min(upTo-w.cursor, batchSize))
	var events []Event
	var floor Seq
	err := w.feed.log.View(ctx, func(v View) error {
		events, floor = v.Events(w.cursor, limit)
		return nil
	})
	switch {
	case err != nil:
		return err
	case w.cursor < floor:
		return w.resync(ctx)
	}
	events = events[:firstAfter(events, upTo)]
	for _, e := range events {
		if err := w.tell(ctx, e, w.filter.Pass(e)); err != nil {
			return err
		}
	}
	if len(events) < limit { // there are no others
		w.cursor = upTo
	}
	return nil
}

// firstAfter is where those above a number begin.
func firstAfter(events []Event, n Seq) int {
	return sort.Search(len(events), func(i int) bool { return events[i].Seq > n })
}

func (w *watcher) resync(ctx context.Context) error {
	snapshot := w.feed.table.All()
	if w.filter.Role != "" || w.filter.Plugin != "" {
		snapshot.Instances = slices.DeleteFunc(snapshot.Instances, func(i Instance) bool {
			return !w.filter.concerns(i.Role, i.Plugin)
		})
	}
	return w.tell(ctx, Event{Seq: snapshot.Index, Kind: EventResync, Snapshot: &snapshot}, true)
}

// tell moves the cursor to e, and calls fn if e passes.
func (w *watcher) tell(ctx context.Context, e Event, passes bool) error {
	if err := ctxErr(ctx); err != nil {
		return err
	}
	w.cursor = e.Seq
	if !passes {
		w.skipped++
		return nil
	}
	w.skipped = 0
	return w.fn(e)
}

// Pass says whether an event is one that the filter asks for.
func (f Filter) Pass(e Event) bool {
	return f.concerns(e.Role, e.Plugin) && (len(f.Kinds) == 0 || slices.Contains(f.Kinds, e.Kind))
}

func (f Filter) concerns(role Role, id PluginID) bool {
	return (f.Role == "" || f.Role == role) && (f.Plugin == "" || f.Plugin == id)
}

// ctxErr is the cause of a finished context.
func ctxErr(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
