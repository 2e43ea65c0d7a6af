package rpc

import (
	"context"
	"sync"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// Notifier wakes calls that wait for a change of the records in some buckets. A waiting call costs nothing.
type Notifier struct {
	mu      sync.Mutex // guards all fields below; held only briefly
	began   registry.Seq
	index   registry.Seq
	changed map[registry.Bucket]registry.Seq // index of the last change of a bucket since began
	waiting map[registry.Bucket]map[chan struct{}]bool
}

// NewNotifier returns a Notifier for changes after the index at. It assumes that each bucket has changed at that index.
func NewNotifier(at registry.Seq) *Notifier {
	return &Notifier{began: at, index: at, changed: map[registry.Bucket]registry.Seq{},
		waiting: map[registry.Bucket]map[chan struct{}]bool{}}
}

// Applied wakes the calls that wait for a bucket that the change touches.
func (n *Notifier) Applied(a registry.Applied) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.index = a.Last()
	for _, k := range a.Change.Keys() {
		n.changed[k.Bucket] = n.index
		for wake := range n.waiting[k.Bucket] {
			select {
			case wake <- struct{}{}:
			default: // the call is awake already, because of another bucket or an earlier change
			}
		}
	}
}

// Index returns the index of the last change.
func (n *Notifier) Index() registry.Seq {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.index
}

// Wait waits until a record in one of the buckets has changed after an index. If ctx ends first, it returns the cause.
// If the index is higher than the current one, Wait returns at once: the index belongs to a lost state or to another
// node.
func (n *Notifier) Wait(ctx context.Context, after registry.Seq, buckets ...registry.Bucket) error {
	wake := make(chan struct{}, 1)
	if n.subscribe(wake, after, buckets) {
		return nil
	}
	defer n.unsubscribe(wake, buckets)
	select {
	case <-wake:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// subscribe reports whether Wait has nothing to wait for: one of the buckets has changed after the index, or the index
// is higher than the current one. If not, the next change of one of the buckets sends to wake, until unsubscribe.
func (n *Notifier) subscribe(wake chan struct{}, after registry.Seq, buckets []registry.Bucket) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if after > n.index {
		return true
	}
	for _, b := range buckets {
		if max(n.began, n.changed[b]) > after {
			return true
		}
	}
	for _, b := range buckets {
		if n.waiting[b] == nil {
			n.waiting[b] = map[chan struct{}]bool{}
		}
		n.waiting[b][wake] = true
	}
	return false
}

func (n *Notifier) unsubscribe(wake chan struct{}, buckets []registry.Bucket) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, b := range buckets {
		delete(n.waiting[b], wake)
	}
}

// awaitChange waits for a change of a record in the buckets after the page's min_index. It returns at once if the page
// has no min_index or is not the first. It also returns nil once the page's time to wait is over.
func (a *Active) awaitChange(ctx context.Context, p *pb.Page, buckets []registry.Bucket) error {
	if p.GetMinIndex() == 0 || p.GetToken() != "" {
		return nil
	}
	wait := wire.MaxWait
	if p.GetWait() != nil {
		wait = min(wait, p.GetWait().AsDuration())
	}
	ctx, cancel := a.whileActive(ctx)
	defer cancel()
	limited, stop := context.WithTimeout(ctx, wait)
	defer stop()
	err := a.Notifier.Wait(limited, registry.Seq(p.GetMinIndex()), buckets...)
	if ctx.Err() == nil {
		return nil
	}
	return err
}
