package tenure

import (
	"context"
	"slices"
	"time"

	"holdfast/registry"
)

const (
	newest      = 1000 // numbers back from the last one: events since then are loaded before anybody is served who starts without having rehearsed
	latest      = 100  // the same for one that has: its watchers have come a moment ago
	olderAtOnce = 500  // events that are loaded together later, so that a swap does not wait for long
)

// fill gives the feed the newest events; older, if it is not nil, loads the rest. To decode ten thousand takes longer than all else that a shim
// has to do which starts after a crash, and in a swap calls are held. What was learnt is decoded already.
func (i inheritance) fill(ctx context.Context, log registry.Log, f *registry.Feed) (older func(context.Context) error, err error) {
	err = log.View(ctx, func(v registry.View) error {
		back, learnt := registry.Seq(newest), []registry.Event(nil)
		if i.learnt != nil {
			back, learnt = latest, i.learnt.events
		}
		after := v.Index() - min(v.Index(), back)
		events, floor := v.Events(after, registry.MaxEvents)
		if wanted := f.Load(events, after, floor, v.Index()); wanted != nil {
			older = func(ctx context.Context) error { return rest(ctx, log, f, learnt, after, wanted) }
		}
		return nil
	})
	return older, err
}

// rest gives the feed the events up to a number, after the calm or as soon as somebody wants them. The first of them are known.
func rest(ctx context.Context, log registry.Log, f *registry.Feed, known []registry.Event, upTo registry.Seq, wanted <-chan struct{}) error {
	select {
	case <-wanted:
	case <-time.After(calm):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	all := before(known, upTo)
	var cursor, floor registry.Seq
	for more := true; more; {
		if len(all) > 0 {
			cursor = all[len(all)-1].Seq
		}
		err := log.View(ctx, func(v registry.View) error {
			var events []registry.Event
			events, floor = v.Events(cursor, olderAtOnce)
			more = len(events) == olderAtOnce && events[len(events)-1].Seq < upTo
			all = append(all, before(events, upTo)...)
			return nil
		})
		if err != nil {
			return err
		}
	}
	f.LoadRest(all[len(before(all, floor)):], floor)
	return nil
}

// before is the events up to a number: the first of them.
func before(events []registry.Event, upTo registry.Seq) []registry.Event {
	if end := slices.IndexFunc(events, func(e registry.Event) bool { return e.Seq > upTo }); end >= 0 {
		return events[:end:end]
	}
	return events
}
