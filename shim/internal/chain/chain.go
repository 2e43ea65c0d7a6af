package chain

import (
	"context"
	"errors"
	"sync"
	"time"

	"holdfast/registry"
)

// Longest is how long what was left stays unwritten.
const Longest = 50 * time.Millisecond

// grace is how long it may take to write what was left, whoever has gone meanwhile.
const grace = 5 * time.Second

var errSlow = registry.Errorf(registry.ErrUnavailable, "the state could not be written within %s", grace)

// Decision is what a commit decides.
type Decision = func(registry.View) (registry.Change, error)

// Over is log for whoever may work in a chain. Without one it is log.
func Over(log registry.State) registry.State { return linked{log} }

type linked struct{ registry.State }

// Chain is the steps of one caller.
type Chain struct {
	log registry.State

	turn  chan struct{} // holds a token while what follows is used, and while what is left is being written: so nobody misses it
	left  []Decision    // in their order
	timer *time.Timer
	ended bool
	late  sync.WaitGroup // the timer's function
}

// key is the context's key of a *Chain.
type key struct{}

// Begin is ctx of a new chain over a Log that Over has made; over another one nothing is ever left. It has to be ended.
func Begin(ctx context.Context, log registry.State) (context.Context, *Chain) {
	c := &Chain{log: log, turn: make(chan struct{}, 1)}
	if l, is := log.(linked); is {
		c.log = l.State
		ctx = context.WithValue(ctx, key{}, c)
	}
	return ctx, c
}

func of(ctx context.Context) *Chain {
	c, _ := ctx.Value(key{}).(*Chain)
	return c
}

func (c *Chain) lock()   { c.turn <- struct{}{} }
func (c *Chain) unlock() { <-c.turn }

// lockFor is lock, unless ctx ends before.
func (c *Chain) lockFor(ctx context.Context) error {
	if ctx.Err() == nil {
		select {
		case c.turn <- struct{}{}:
			return nil
		case <-ctx.Done():
		}
	}
	return context.Cause(ctx)
}

// Leave leaves a decision to be written with the next commit of ctx's chain; false: there is none, or it has ended, and nothing was done. The decision
// is asked each time somebody reads before that, and once more when it is written. Should it refuse then, it and what was left after it are
// dropped, and its error is that of who commits, writes or ends.
func Leave(ctx context.Context, decide Decision) (left bool) {
	c := of(ctx)
	if c == nil {
		return false
	}
	c.lock()
	defer c.unlock()
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

// overdue writes what is left, as no step has followed. If that fails, whoever comes next learns it.
func (c *Chain) overdue(ctx context.Context) {
	c.lock()
	defer c.unlock()
	c.timer = nil
	if err := c.write(ctx); err != nil {
		c.spoil(err)
	}
}

// Write writes what ctx's chain has left, if there is one, even if ctx has ended: for who is about to wait, or leaves the volume's lane. What cannot be
// written is dropped, as others may act from then on; err, if it is not nil, is told why.
func Write(ctx context.Context, err *error) {
	if c := of(ctx); c != nil {
		c.lock()
		defer c.unlock()
		c.writeOrDrop(ctx, err)
	}
}

// End is Write; and from then on nothing is left any more.
func (c *Chain) End(ctx context.Context, err *error) {
	c.lock()
	c.writeOrDrop(ctx, err)
	c.ended = true
	c.unlock()
	c.late.Wait()
}

func (c *Chain) writeOrDrop(ctx context.Context, err *error) {
	failed := c.write(ctx)
	c.clear()
	if failed != nil && *err == nil {
		*err = failed
	} else if failed != nil {
		*err = errors.Join(*err, failed)
	}
}

// write writes what is left.
func (c *Chain) write(ctx context.Context) error {
	if len(c.left) == 0 {
		return nil
	}
	_, err := c.both(ctx, func(registry.View) (registry.Change, error) { return registry.Change{}, nil })
	return err
}

// both writes what is left and what decide wants in one transaction; what is left also if decide refuses. It does not end with ctx. If nothing was
// written, all stays left; and if nobody knows, nothing does: it might be written twice.
func (c *Chain) both(ctx context.Context, decide Decision) (registry.Seq, error) {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), grace, errSlow)
	defer cancel()
	left := c.left
	var refused error
	at, err := c.log.Commit(ctx, func(v registry.View) (change registry.Change, _ error) {
		if change, refused = changes(left, v); refused != nil {
			return change, nil
		}
		next, err := decide(registry.Over(v, change))
		if refused = err; refused != nil {
			return change, nil
		}
		return change.Then(next), nil
	})
	switch {
	case err == nil:
		c.clear()
		return at, refused
	case errors.Is(err, registry.ErrUncertain):
		c.spoil(err)
	}
	return at, err
}

// spoil has whoever comes next fail, in place of what was left.
func (c *Chain) spoil(err error) {
	c.clear()
	c.left = []Decision{func(registry.View) (registry.Change, error) { return registry.Change{}, err }}
}

// clear forgets what is left. If it is too late to stop the timer, its function finds nothing left, or what was left since.
func (c *Chain) clear() {
	c.left = nil
	if c.timer != nil && c.timer.Stop() {
		c.late.Done()
	}
	c.timer = nil
}

// changes is what the decisions that are left make of a state, up to the first that does not stand any more.
func changes(left []Decision, v registry.View) (change registry.Change, err error) {
	for _, decide := range left {
		next, err := decide(registry.Over(v, change))
		if err != nil {
			return change, err
		}
		change = change.Then(next)
	}
	return change, nil
}

// Commit is registry.Log's.
func (l linked) Commit(ctx context.Context, decide Decision) (registry.Seq, error) {
	c := of(ctx)
	if c == nil {
		return l.State.Commit(ctx, decide)
	}
	if err := c.lockFor(ctx); err != nil {
		return 0, err
	}
	if len(c.left) == 0 {
		c.unlock()
		return c.log.Commit(ctx, decide)
	}
	defer c.unlock()
	return c.both(ctx, decide)
}

// View is registry.Log's. read must not ask the log again. What was left and does not stand any more is an error here too, and stays one until
// somebody commits, writes or ends: not everybody who reads looks at errors.
func (l linked) View(ctx context.Context, read func(registry.View) error) error {
	c := of(ctx)
	if c == nil {
		return l.State.View(ctx, read)
	}
	if err := c.lockFor(ctx); err != nil {
		return err
	}
	if len(c.left) == 0 {
		c.unlock()
		return c.log.View(ctx, read)
	}
	defer c.unlock()
	return c.log.View(ctx, func(v registry.View) error {
		change, err := changes(c.left, v)
		if err != nil {
			return err
		}
		return read(registry.Over(v, change))
	})
}
