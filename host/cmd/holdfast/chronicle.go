package main

import (
	"context"
	"sync"
	"time"

	"holdfast/host"
)

// chronicle says every event after a number, once and in order.
type chronicle struct {
	watch func(context.Context, host.WatchOptions, func(host.Event) error) error
	say   func(host.Event) error
	at    host.Seq // of the last that was said
}

// lastWords bounds how long is waited for what has happened and is not said yet.
const lastWords = 5 * time.Second

// follow says events as they happen. It is to be finished before ctx ends: that says those that have happened by then and were not said yet.
func (c *chronicle) follow(ctx context.Context) (finish func() error) {
	following, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { _ = c.tell(following, false) })
	return func() error {
		stop()
		wg.Wait()
		limited, done := context.WithTimeout(ctx, lastWords)
		defer done()
		return c.tell(limited, true)
	}
}

func (c *chronicle) tell(ctx context.Context, past bool) error {
	return c.watch(ctx, host.WatchOptions{After: c.at, Past: past}, func(e host.Event) error {
		c.at = e.Seq
		return c.say(e)
	})
}
