package rpc

import (
	"context"
	"sync"

	"holdfast/registry"
)

// Notifier wakes streams when records of instances or tasks change. The zero value is ready to use.
type Notifier struct {
	mu    sync.Mutex // guards the fields below
	count uint64
	next  chan struct{} // closed at the next change; nil without a waiter
}

// Applied notifies the waiters if the change touches instances or tasks.
func (n *Notifier) Applied(a registry.Applied) {
	if a.Change.Touches(registry.BucketInstances, registry.BucketTasks) {
		n.notify()
	}
}

func (n *Notifier) notify() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.count++
	if n.next != nil {
		close(n.next)
		n.next = nil
	}
}

// Count returns the number of changes so far. Call it before reading the records.
func (n *Notifier) Count() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.count
}

// Wait returns nil once there were more than seen changes, or the cause of the end of ctx.
func (n *Notifier) Wait(ctx context.Context, seen uint64) error {
	n.mu.Lock()
	if n.count > seen {
		n.mu.Unlock()
		return nil
	}
	if n.next == nil {
		n.next = make(chan struct{})
	}
	next := n.next
	n.mu.Unlock()
	select {
	case <-next:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
