package registry

import (
	"context"
	"slices"
	"sort"
	"sync/atomic"
)

// FromSnapshot is the cursor of a new watcher. The watcher gets a snapshot as EventResync, then every later event.
const FromSnapshot = ^Seq(0)

// RecentEvents is how many events a Feed keeps in memory. They cover some seconds on the busiest node and take at most
// 1 MB. A watcher further behind reads from the State, which keeps MaxEvents.
const RecentEvents = 1000

// batchSize is how many events a watcher copies or reads from the State at once. Only a slow watcher is further behind.
// Closing the State waits for at most one such read, some milliseconds.
const batchSize = 256

// Filter selects the events of a watcher. An empty field matches every event. EventResync passes every filter; its
// snapshot holds only the instances of Role and Plugin.
type Filter struct {
	Role   Role
	Plugin PluginID
	Kinds  []EventKind
	// Bookmarks requests EventBookmark when the watcher first catches up, and after many events that did not pass.
	// A watcher that resumes at a bookmark avoids a resync that only its filter would cause.
	Bookmarks bool
}

// Feed delivers the events of a State to watchers: recent ones from memory, older ones from the State. A watcher is a
// cursor in its caller's goroutine, which also reads the State. The Feed keeps no list of watchers, so a slow watcher
// delays no other.
type Feed struct {
	state   State
	table   *Registry
	limit   int
	current atomic.Pointer[recent]
}

// recent holds the events in memory as of one index. Later values may share its array beyond its own length.
type recent struct {
	events []Event       // with Seq above after, ascending
	after  Seq           // events up to it are only in the State, unless pruned
	index  Seq           // of the last applied change
	more   chan struct{} // closed when later events exist
}

// NewFeed returns a Feed of the events after the table's index. It keeps the newest ones in memory, at most limit. The
// table must be loaded first. The State must apply each change to the table before it applies the change to the Feed.
func NewFeed(state State, table *Registry, limit int) *Feed {
	f := &Feed{state: state, table: table, limit: max(limit, 1)}
	at := table.Index()
	f.current.Store(&recent{after: at, index: at, more: make(chan struct{})})
	return f
}

// Applied adds the events of a committed change and wakes waiting watchers. The State calls it in commit order, one
// call at a time.
func (f *Feed) Applied(a Applied) {
	old := f.current.Load()
	if a.Last() <= old.index {
		return // the loaded table includes it
	}
	if len(a.Change.Events) == 0 {
		f.current.Store(&recent{old.events, old.after, a.Last(), old.more})
		return
	}
	f.current.Store(f.pruned(recent{append(old.events, a.Change.Events...), old.after, a.Last(), make(chan struct{})}))
	close(old.more)
}

// pruned returns r without its oldest events beyond the limit. The next append that grows the array frees them.
func (f *Feed) pruned(r recent) *recent {
	if over := len(r.events) - f.limit; over > 0 {
		r.after = r.events[over-1].Seq
		r.events = r.events[over:]
	}
	return &r
}

// Index returns the index of the last applied change.
func (f *Feed) Index() Seq { return f.current.Load().index }

// Watch calls fn in order with every event after the cursor that passes the filter. It calls fn in the caller's
// goroutine, without a lock. It ends when ctx ends, fn returns an error or the State fails, and returns the context's
// cause or that error.
//
// A pruned cursor, or one ahead of every event (FromSnapshot), gets an EventResync with the table of instances. The
// events after that snapshot's index follow. The table includes the change of every delivered event. To resume, pass
// the Seq of the last event that fn got. Events share the data that they point to, so fn must not modify it.
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

// watcher is the state of one Watch call.
type watcher struct {
	feed    *Feed
	filter  Filter
	fn      func(Event) error
	cursor  Seq
	skipped int  // events filtered out since the last call of fn
	synced  bool // the watcher has caught up at least once
	batch   []Event
}

// follow delivers one batch of events and reports whether the watcher has reached the index.
func (w *watcher) follow(ctx context.Context, now *recent) (caughtUp bool, err error) {
	if w.cursor < now.after {
		return false, w.followStored(ctx, now.after)
	}
	rest := now.events[firstAfter(now.events, w.cursor):]
	// The copy lets a watcher stuck in fn keep one batch alive instead of the whole array.
	w.batch = append(w.batch[:0], rest[:min(len(rest), batchSize)]...)
	for _, e := range w.batch {
		if err := w.deliver(ctx, e, w.filter.Pass(e)); err != nil {
			return false, err
		}
	}
	if len(rest) > batchSize {
		return false, nil
	}
	w.cursor = max(w.cursor, now.index)
	if due := !w.synced || w.skipped >= max(w.feed.limit/8, 1); due && w.filter.Bookmarks {
		w.synced = true
		return true, w.deliver(ctx, Event{Seq: w.cursor, Kind: EventBookmark}, true)
	}
	return true, ctxErr(ctx)
}

// followStored delivers one batch of the events up to upTo that only the State has. It calls fn after the View, so
// closing the State does not wait for fn. It omits later events, which may not be applied yet.
func (w *watcher) followStored(ctx context.Context, upTo Seq) error {
	limit := int(min(upTo-w.cursor, batchSize))
	var events []Event
	var floor Seq
	err := w.feed.state.View(ctx, func(v View) error {
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
		if err := w.deliver(ctx, e, w.filter.Pass(e)); err != nil {
			return err
		}
	}
	if len(events) < limit { // no others exist up to upTo
		w.cursor = upTo
	}
	return nil
}

// firstAfter returns the position of the first event with a Seq above n.
func firstAfter(events []Event, n Seq) int {
	return sort.Search(len(events), func(i int) bool { return events[i].Seq > n })
}

func (w *watcher) resync(ctx context.Context) error {
	snapshot := w.feed.table.All()
	if w.filter.Role != "" || w.filter.Plugin != "" {
		snapshot.Instances = slices.DeleteFunc(snapshot.Instances, func(i Instance) bool {
			return !w.filter.matches(i.Role, i.Plugin)
		})
	}
	return w.deliver(ctx, Event{Seq: snapshot.Index, Kind: EventResync, Snapshot: &snapshot}, true)
}

// deliver moves the cursor to e, and calls fn if e passes.
func (w *watcher) deliver(ctx context.Context, e Event, passes bool) error {
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

// Pass reports whether e matches the filter.
func (f Filter) Pass(e Event) bool {
	return f.matches(e.Role, e.Plugin) && (len(f.Kinds) == 0 || slices.Contains(f.Kinds, e.Kind))
}

func (f Filter) matches(role Role, id PluginID) bool {
	return (f.Role == "" || f.Role == role) && (f.Plugin == "" || f.Plugin == id)
}

// ctxErr returns the cause of a finished context, else nil.
func ctxErr(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
