package registry

import (
	"context"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
)

// FromSnapshot is the cursor of a watcher that knows nothing yet: it gets a snapshot first, as EventResync, and then every event
// after it.
const FromSnapshot = ^Seq(0)

// batchSize is how many events a watcher copies at once: more than it is ever behind by, unless it is slow.
const batchSize = 256

// Filter says which events a watcher wants. What is empty lets everything pass. EventResync passes every filter, its snapshot
// holding the instances of Role and Plugin only.
type Filter struct {
	Role   Role
	Plugin PluginID
	Kinds  []EventKind
	// Bookmarks asks for EventBookmark: once when the watcher has caught up for the first time, and then whenever it has come a
	// good way without an event that passes. A watcher that resumes there later is not told to resync for its filter's sake.
	Bookmarks bool
}

// Feed is the newest events in memory, and who reads them. A watcher is a cursor in its caller's goroutine: the Feed knows none of
// them, so a slow or dead one delays nobody and costs nothing.
type Feed struct {
	limit    int
	snapshot func() Snapshot
	current  atomic.Pointer[eventLog]
	writing  sync.Mutex // of Load and Applied: held to compute the next eventLog, never while waiting
}

// eventLog is the kept events as of one index. Later ones may share its array, beyond its own length.
type eventLog struct {
	events []Event       // ascending
	floor  Seq           // events up to it are gone
	index  Seq           // of the last change that was applied
	more   chan struct{} // closed when there are further events
	rest   *rest         // nil: all events above the floor are there
}

// rest is the events that a Feed was loaded without.
type rest struct {
	upTo   Seq           // those above the floor and up to it
	come   chan struct{} // closed once they are there
	wanted chan struct{} // closed when the first watcher waits for them
	want   sync.Once
}

// NewFeed keeps up to limit events. snapshot is the table of instances, Registry.All, for watchers that fell behind; its list becomes theirs. The Log
// has to tell the table of a change before the Feed.
func NewFeed(limit int, snapshot func() Snapshot) *Feed {
	f := &Feed{limit: max(limit, 1), snapshot: snapshot}
	f.current.Store(&eventLog{more: make(chan struct{})})
	return f
}

// Load takes over the events that the Log holds after a number, their floor, and the Log's index. The list becomes the Feed's. If there are
// older ones, those above the floor and up to that number, whoever asks for them waits until LoadRest has them; wanted is closed when somebody
// does. It is nil if there are none.
func (f *Feed) Load(events []Event, after, floor, index Seq) (wanted <-chan struct{}) {
	l := eventLog{events: events, floor: floor, index: index, more: make(chan struct{})}
	if after > floor {
		l.rest = &rest{upTo: after, come: make(chan struct{}), wanted: make(chan struct{})}
		wanted = l.rest.wanted
	}
	f.writing.Lock()
	defer f.writing.Unlock()
	old := f.current.Load()
	f.current.Store(f.pruned(l))
	close(old.more)
	return wanted
}

// LoadRest takes over the events that Load was not given, in their order, and their floor.
func (f *Feed) LoadRest(events []Event, floor Seq) {
	f.writing.Lock()
	defer f.writing.Unlock()
	old := f.current.Load()
	if old.rest == nil {
		return
	}
	floor = max(floor, old.floor) // the newest may be so many by now that some were pruned
	kept := sort.Search(len(events), func(i int) bool { return events[i].Seq > floor })
	f.current.Store(f.pruned(eventLog{events: append(events[kept:], old.events...), floor: floor, index: old.index, more: make(chan struct{})}))
	close(old.rest.come)
	close(old.more)
}

// Applied takes over the events of a committed change and wakes those who wait for them. The Log calls it in commit order.
func (f *Feed) Applied(a Applied) {
	f.writing.Lock()
	defer f.writing.Unlock()
	old := f.current.Load()
	if a.Last() <= old.index {
		return // Load has seen it
	}
	if len(a.Change.Events) == 0 {
		f.current.Store(&eventLog{old.events, old.floor, a.Last(), old.more, old.rest})
		return
	}
	f.current.Store(f.pruned(eventLog{append(old.events, a.Change.Events...), old.floor, a.Last(), make(chan struct{}), old.rest}))
	close(old.more)
}

// pruned is the log without what is beyond the limit. The array goes with the next append that needs a larger one.
func (f *Feed) pruned(l eventLog) *eventLog {
	if over := len(l.events) - f.limit; over > 0 {
		l.floor = l.events[over-1].Seq
		l.events = l.events[over:]
	}
	return &l
}

// Index is that of the last change that was applied.
func (f *Feed) Index() Seq { return f.current.Load().index }

// Watch calls fn, in its own goroutine and under no lock, with every event after the cursor that passes the filter, in order, until
// ctx ends or fn returns an error; it returns that error or the context's cause. A cursor whose events are gone, or that is ahead
// of everything (FromSnapshot), gets one EventResync with the table of instances, then the events after that snapshot's index.
// The next cursor is the Seq of the last event that fn got. What events point to is shared: fn does not change it.
func (f *Feed) Watch(ctx context.Context, after Seq, filter Filter, fn func(Event) error) error {
	w := watcher{feed: f, filter: filter, fn: fn, cursor: after}
	if after > f.Index() {
		if err := w.resync(ctx); err != nil {
			return err
		}
	}
	for {
		log := f.current.Load()
		caughtUp, err := w.follow(ctx, log)
		if err != nil {
			return err
		}
		if !caughtUp {
			continue
		}
		select {
		case <-ctx.Done():
		case <-log.more:
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

// follow brings the watcher closer to the log's index by one batch, and says whether it has come there.
func (w *watcher) follow(ctx context.Context, log *eventLog) (caughtUp bool, err error) {
	if w.cursor < log.floor {
		return false, w.resync(ctx)
	}
	if r := log.rest; r != nil && w.cursor < r.upTo {
		r.want.Do(func() { close(r.wanted) })
		select {
		case <-r.come:
			return false, nil
		case <-ctx.Done():
			return false, ctxErr(ctx)
		}
	}
	from := sort.Search(len(log.events), func(i int) bool { return log.events[i].Seq > w.cursor })
	rest := log.events[from:]
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
	w.cursor = max(w.cursor, log.index)
	if due := !w.caught || w.skipped >= max(w.feed.limit/8, 1); due && w.filter.Bookmarks {
		w.caught = true
		return true, w.tell(ctx, Event{Seq: w.cursor, Kind: EventBookmark}, true)
	}
	return true, ctxErr(ctx)
}

func (w *watcher) resync(ctx context.Context) error {
	snapshot := w.feed.snapshot()
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
