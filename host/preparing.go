package host

import (
	"context"
	"maps"
	"slices"
	"sync"

	"holdfast/registry"
)

// preparing is the PrepareAlloc calls under way. A release ends those of its alloc, and waits for that: one that is held, made again at the
// next shim, or on its way could otherwise come after the release, and bring back what nobody would take down. The zero value is ready.
type preparing struct {
	mu    sync.Mutex // guards calls; held for no longer than a look-up
	calls map[registry.AllocID]map[*prepare]bool
}

type prepare struct {
	cancel context.CancelCauseFunc
	ended  chan struct{}
}

// begin is a context that a release of the alloc ends. Call done when the call has ended. Once ctx.Done was asked for, stop knows the call.
func (p *preparing) begin(ctx context.Context, id registry.AllocID) (limited context.Context, done func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	limited, cancel := context.WithCancelCause(ctx)
	call := &prepare{cancel, make(chan struct{})}
	if p.calls == nil {
		p.calls = map[registry.AllocID]map[*prepare]bool{}
	}
	if p.calls[id] == nil {
		p.calls[id] = map[*prepare]bool{}
	}
	p.calls[id][call] = true
	return limited, func() { cancel(nil); p.end(id, call) }
}

func (p *preparing) end(id registry.AllocID, call *prepare) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(call.ended)
	delete(p.calls[id], call)
	if len(p.calls[id]) == 0 {
		delete(p.calls, id)
	}
}

// stop ends what is under way for the alloc, and returns when all of it has ended, or ctx has: the shim hears of that before it hears of what
// is sent then.
func (p *preparing) stop(ctx context.Context, id registry.AllocID) {
	calls := p.under(id)
	for _, call := range calls {
		call.cancel(registry.Errorf(registry.ErrConflict, "alloc %s is being released", id))
	}
	for _, call := range calls {
		select {
		case <-call.ended:
		case <-ctx.Done():
		}
	}
}

func (p *preparing) under(id registry.AllocID) []*prepare {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.calls[id]))
}
