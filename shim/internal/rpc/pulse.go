package rpc

import (
	"context"
	"sync"

	"holdfast/registry"
)

// Pulse tells that records of a bucket have changed, to those who wait for it. It keeps no list: who waits looks for itself what is new.
// The zero value is ready.
type Pulse struct {
	mu    sync.Mutex // guards both; held for no longer than a look-up
	beats uint64
	next  chan struct{} // closed at the next beat
}

// Applied beats if the change touches instances or tasks.
func (p *Pulse) Applied(a registry.Applied) {
	if a.Change.Touches(registry.BucketInstances, registry.BucketTasks) {
		p.beat()
	}
}

func (p *Pulse) beat() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.beats++
	if p.next != nil {
		close(p.next)
		p.next = nil
	}
}

// Count is how often it has beaten; take it before looking.
func (p *Pulse) Count() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.beats
}

// Wait returns once it has beaten more often than seen, or with the cause of ctx's end.
func (p *Pulse) Wait(ctx context.Context, seen uint64) error {
	p.mu.Lock()
	if p.beats > seen {
		p.mu.Unlock()
		return nil
	}
	if p.next == nil {
		p.next = make(chan struct{})
	}
	next := p.next
	p.mu.Unlock()
	select {
	case <-next:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
