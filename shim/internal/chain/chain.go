package chain

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"holdfast/registry"
)

// Longest is how long what was left stays unwritten.
const Longest = 50 * time.Millisecond

// grace is how long it may take to write what was left after its caller has gone.
const grace = 5 * time.Second

// Decision is what a commit decides.
type Decision = func(registry.View) (registry.Change, error)

// Over is log for whoever may work in a chain. Without one it is log.
func Over(log registry.Log) registry.Log { return linked{log} }

type linked struct{ registry.Log }

// Chain is the steps of one caller.
type Chain struct {
	log registry.Log

	mu    sync.Mutex // guards what follows; held while what is left is being written, so that nobody misses it
	left  []Decision // in their order
	timer *time.Timer
	ended bool
	late  sync.WaitGroup // the timer's function
}

// key is the context's key of a *Chain.
type key struct{}

// Begin is ctx of a new chain over a Log that Over has made; over another one nothing is ever left. It has to be ended.
func Begin(ctx context.Context, log registry.Log) (context.Context, *Chain) {
	c := &Chain{log: log}
	if l, is := log.(linked); is {
		c.log = l.Log
		ctx = context.WithValue(ctx, key{}, c)
	}
	return ctx, c
}

func of(ctx context.Context) *Chain {
	c, _ := ctx.Value(key{}).(*Chain)
	return c
}

// Leave leaves a decision to be written with the next commit of ctx's chain; false: there is none, or it has ended, and nothing was done. The decision
// is asked each time somebody reads before that, and once more when it is written. An error of it is that of who reads, commits or ends
// next; then all is dropped that was left.
func Leave(ctx context.Context, decide Decision) (left bool) {
	c := of(ctx)
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false
	}
	c.left = append(c.left, decide)
	if c.timer == nil {
		c.late.Add(1)
		c.timer = time.AfterFunc(Longest, func() {
			defer c.late.Done()
			c.overdue(ctx)
		})
	}
	return true
}

// overdue writes what is left, as no step has followed. That it does not stand is kept for who comes next.
func (c *Chain) overdue(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if dropped, err := c.write(ctx); dropped {
		c.left = []Decision{func(registry.View) (registry.Change, error) { return registry.Change{}, err }}
	}
}

// Write writes what the chain of ctx has left, if there is one, even if ctx has ended: for who is about to wait.
func Write(ctx context.Context) error {
	c := of(ctx)
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.write(ctx)
	return err
}

// End writes what is left, even if ctx has ended. From then on nothing is left any more.
func (c *Chain) End(ctx context.Context) error {
	c.mu.Lock()
	_, err := c.write(ctx)
	c.ended = true
	c.disarm()
	c.mu.Unlock()
	c.late.Wait()
	return err
}

// write writes what is left. mu is held.
func (c *Chain) write(ctx context.Context) (dropped bool, err error) {
	if len(c.left) == 0 {
		return false, nil
	}
	_, dropped, err = c.both(ctx, func(registry.View) (registry.Change, error) { return registry.Change{}, nil })
	return dropped, err
}

// both writes what is left and what decide wants in one transaction; what is left also if decide refuses. Once begun it does not end with ctx: whose
// outcome is not known could not be written once more. mu is held.
func (c *Chain) both(ctx context.Context, decide Decision) (at registry.Seq, dropped bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	left := c.left
	var undone atomic.Bool
	var refused error
	at, err = c.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		change, err := changes(left, v)
		if err != nil {
			undone.Store(true)
			return registry.Change{}, err
		}
		next, err := decide(registry.Over(v, change))
		if refused = err; refused != nil {
			return change, nil
		}
		return change.Then(next), nil
	})
	if dropped = undone.Load(); err == nil || dropped {
		c.clear()
	}
	if err == nil {
		err = refused
	}
	return at, dropped, err
}

func (c *Chain) clear() {
	c.left = nil
	c.disarm()
}

// disarm stops the timer. If it is too late for that, its function finds nothing left, or what was left since.
func (c *Chain) disarm() {
	if c.timer != nil && c.timer.Stop() {
		c.late.Done()
	}
	c.timer = nil
}

// changes is what the decisions that are left make of a state.
func changes(left []Decision, v registry.View) (change registry.Change, err error) {
	for _, decide := range left {
		next, err := decide(registry.Over(v, change))
		if err != nil {
			return registry.Change{}, err
		}
		change = change.Then(next)
	}
	return change, nil
}

// Commit is registry.Log's.
func (l linked) Commit(ctx context.Context, decide Decision) (registry.Seq, error) {
	c := of(ctx)
	if c == nil {
		return l.Log.Commit(ctx, decide)
	}
	c.mu.Lock()
	if len(c.left) == 0 {
		c.mu.Unlock()
		return c.log.Commit(ctx, decide)
	}
	defer c.mu.Unlock()
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	at, _, err := c.both(ctx, decide)
	return at, err
}

// View is registry.Log's. read must not ask the log again.
func (l linked) View(ctx context.Context, read func(registry.View) error) error {
	c := of(ctx)
	if c == nil {
		return l.Log.View(ctx, read)
	}
	c.mu.Lock()
	if len(c.left) == 0 {
		c.mu.Unlock()
		return c.log.View(ctx, read)
	}
	defer c.mu.Unlock()
	return c.log.View(ctx, func(v registry.View) error {
		change, err := changes(c.left, v)
		if err != nil {
			c.clear()
			return err
		}
		return read(registry.Over(v, change))
	})
}
