package host

import (
	"context"
	"sync"

	"holdfast/registry"
)

// preparing is the PrepareAlloc calls under way. A release ends those of its alloc: one that is held, or made again at the next shim, could
// otherwise come after the release, and bring back what nobody would take down. The zero value is ready.
type preparing struct {
	mu    sync.Mutex // guards calls; held for no longer than a look-up
	calls map[registry.AllocID]map[*prepare]bool
}

type prepare struct{ cancel context.CancelCauseFunc }

// begin is a context that a release of the alloc ends. Call done when the call has ended.
func (p *preparing) begin(ctx context.Context, id registry.AllocID) (limited context.Context, done func()) {
	limited, cancel := context.WithCancelCause(ctx)
	call := &prepare{cancel}
	p.mu.Lock()
	defer p.mu.Unlock()
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
	delete(p.calls[id], call)
	if len(p.calls[id]) == 0 {
		delete(p.calls, id)
	}
}

// stop ends what is under way for the alloc.
func (p *preparing) stop(id registry.AllocID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for call := range p.calls[id] {
		call.cancel(registry.Errorf(registry.ErrConflict, "alloc %s is being released", id))
	}
}
