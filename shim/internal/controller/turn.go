package controller

import (
	"context"
	"fmt"
	"sync"

	"holdfast/registry"
)

// turns lets one creation or deletion at a time happen to each volume. What else happens to a volume needs a claim, and a volume that is
// being created or deleted grants none. The zero value is ready.
type turns struct {
	mu    sync.Mutex // guards taken and the counts in it; held for no longer than a look-up
	taken map[registry.VolumeName]*turn
}

type turn struct {
	busy chan struct{} // holds one token while somebody has the turn
	uses int           // users and waiters
}

// take waits for the turn. Give it back by calling done.
func (ts *turns) take(ctx context.Context, name registry.VolumeName) (done func(), err error) {
	t := ts.join(name)
	select {
	case t.busy <- struct{}{}:
		return func() { <-t.busy; ts.part(name, t) }, nil
	case <-ctx.Done():
		ts.part(name, t)
		return nil, fmt.Errorf("another creation or deletion of volume %s is under way: %w", name, context.Cause(ctx))
	}
}

func (ts *turns) join(name registry.VolumeName) *turn {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if ts.taken == nil {
		ts.taken = map[registry.VolumeName]*turn{}
	}
	t := ts.taken[name]
	if t == nil {
		t = &turn{busy: make(chan struct{}, 1)}
		ts.taken[name] = t
	}
	t.uses++
	return t
}

func (ts *turns) part(name registry.VolumeName, t *turn) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if t.uses--; t.uses == 0 {
		delete(ts.taken, name)
	}
}
