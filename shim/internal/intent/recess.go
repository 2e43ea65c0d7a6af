package intent

import (
	"context"
	"sync"
)

// Recess is a time in which no CSI call is begun that changes something, as the shim is about to let go of the state: one that would begin waits for
// the end of the recess, or of its context, which comes first where the shim lets go. So what is under way ends soon, and the next shim goes on
// from there. The zero value is none.
type Recess struct {
	mu   sync.Mutex // guards over; held for no longer than a look-up
	over chan struct{}
}

// Begin begins it, if it has not begun.
func (r *Recess) Begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over == nil {
		r.over = make(chan struct{})
	}
}

// End has whoever waits go on.
func (r *Recess) End() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over != nil {
		close(r.over)
		r.over = nil
	}
}

// end is what is closed when the recess ends; nil: there is none.
func (r *Recess) end() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.over
}

// recessKey is the context's key of an observer.
type recessKey struct{}

type observer struct {
	recess *Recess
	waits  func(bool)
}

// Observing is ctx of calls that keep the recess. waits is told when one begins to wait for its end, and when it has waited. Both may be nil.
func Observing(ctx context.Context, r *Recess, waits func(bool)) context.Context {
	if r == nil {
		return ctx
	}
	if waits == nil {
		waits = func(bool) {}
	}
	return context.WithValue(ctx, recessKey{}, observer{r, waits})
}

// resumed returns when there is no recess, or with the cause of ctx's end.
func resumed(ctx context.Context) error {
	o, observes := ctx.Value(recessKey{}).(observer)
	for observes {
		over := o.recess.end()
		if over == nil {
			break
		}
		o.waits(true)
		select {
		case <-over:
		case <-ctx.Done():
		}
		o.waits(false)
		if ctx.Err() != nil {
			break
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
