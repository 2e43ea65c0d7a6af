package main

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/host"
)

// tardy is a feed that delivers its newest events only to a caller that asks for past events.
type tardy struct {
	events []host.Event
	takes  time.Duration // for each event
	newest host.Seq      // delivered to followers
}

func (f *tardy) watch(ctx context.Context, o host.WatchOptions, fn func(host.Event) error) error {
	for _, e := range f.events {
		if e.Seq <= o.After || !o.Past && e.Seq > f.newest {
			continue
		}
		select {
		case <-time.After(f.takes):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := fn(e); err != nil {
			return err
		}
	}
	if o.Past {
		return nil
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

// The last events of a run are printed once, also late ones; a feed that never delivers them does not block the end.
func TestRunSaysItsLastEvents(t *testing.T) {
	for what, c := range map[string]struct {
		takes time.Duration
		want  []host.Seq
		err   error
	}{
		"at once": {0, []host.Seq{3, 4, 5, 6}, nil},
		"late":    {time.Second, []host.Seq{3, 4, 5, 6}, nil},
		"never":   {time.Hour, nil, context.DeadlineExceeded},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := &tardy{takes: c.takes, newest: 4}
			for i := range 6 {
				f.events = append(f.events, host.Event{Seq: host.Seq(i + 1)})
			}
			var said []host.Seq
			finish := (&eventFollower{watch: f.watch, at: 2,
				say: func(e host.Event) error { said = append(said, e.Seq); return nil }}).follow(t.Context())
			time.Sleep(3 * time.Second)
			synctest.Wait()
			if err := finish(); !errors.Is(err, c.err) || !slices.Equal(said, c.want) {
				t.Errorf("%s: said %v, %v", what, said, err)
			}
		})
	}
}
