package node

import (
	"context"
	"sync"
)

// crew is the goroutines that outlive the call that wanted them. They start when run does and have all ended when it
// returns.
type crew struct {
	mu      sync.Mutex
	ctx     context.Context // set while running
	waiting []func(context.Context)
	ended   bool
	wg      sync.WaitGroup
}

// start runs f on a goroutine of its own, as soon as the crew runs. A crew that has ended runs nothing more, and says
// false.
func (c *crew) start(f func(context.Context)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.ended:
		return false
	case c.ctx == nil:
		c.waiting = append(c.waiting, f)
	default:
		ctx := c.ctx
		c.wg.Go(func() { f(ctx) })
	}
	return true
}

// run lets the crew work until ctx ends, and waits for all of it.
func (c *crew) run(ctx context.Context) error {
	c.mu.Lock()
	c.ctx = ctx
	waiting := c.waiting
	c.waiting = nil
	for _, f := range waiting {
		c.wg.Go(func() { f(ctx) })
	}
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	c.wg.Wait()
	return context.Cause(ctx)
}
