package tenure

import (
	"context"
	"slices"
	"time"

	"holdfast/registry"
)

const (
	newest      = 1000 // numbers back from the last one: events since then are loaded before anybody is served, where no rehearsal has loaded them
	olderAtOnce = 500  // events that are loaded together later, so that a swap does not wait for long
)

// fill gives the feed its events: those that were learnt, and what came since. If none were learnt these are the newest, and older loads the rest: to
// decode ten thousand takes longer than all else that a shim has to do which starts after a crash.
func (i inheritance) fill(ctx context.Context, log registry.Log, f *registry.Feed) (older func(context.Context) error, err error) {
	err = log.View(ctx, func(v registry.View) error {
		if i.learnt != nil {
			events, floor := i.learnt.with(v)
			f.Load(events, floor, v.Index())
			return nil
		}
		after := v.Index() - min(v.Index(), newest)
		events, floor := v.Events(after, registry.MaxEvents)
		wanted := f.LoadNewest(events, after, floor, v.Index())
		older = func(ctx context.Context) error { return rest(ctx, log, f, after, wanted) }
		return nil
	})
	return older, err
}

// with is what was learnt, and what came since.
func (l *learnt) with(v registry.View) (events []registry.Event, floor registry.Seq) {
	since, floor := v.Events(l.index, registry.MaxEvents)
	kept := slices.IndexFunc(l.events, func(e registry.Event) bool { return e.Seq > floor })
	if kept >= 0 {
		events = l.events[kept:]
	}
	return append(events, since...), floor
}

// rest gives the feed the events up to a number, after the calm or as soon as somebody wants them.
func rest(ctx context.Context, log registry.Log, f *registry.Feed, upTo registry.Seq, wanted <-chan struct{}) error {
	select {
	case <-wanted:
	case <-time.After(calm):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	var all []registry.Event
	var floor registry.Seq
	for cursor, more := registry.Seq(0), true; more; {
		err := log.View(ctx, func(v registry.View) error {
			var events []registry.Event
			events, floor = v.Events(cursor, olderAtOnce)
			end := slices.IndexFunc(events, func(e registry.Event) bool { return e.Seq > upTo })
			if more = end < 0 && len(events) == olderAtOnce; end >= 0 {
				events = events[:end]
			}
			if all = append(all, events...); len(all) > 0 {
				cursor = all[len(all)-1].Seq
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	f.LoadRest(all, floor)
	return nil
}
