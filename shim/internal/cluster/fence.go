package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

var fenceBackoff = intent.Backoff{First: time.Second, Max: time.Minute}

// suspect is a node that may have to be fenced. Times are readings of CLOCK_BOOTTIME.
type suspect struct {
	due     time.Duration // when to fence the node, or to try again
	alive   bool          // the node is alive again, so its mark has to be removed
	tries   uint64        // tries so far, those of earlier shims included
	running bool          // a try is under way
}

// fencer fences nodes that stay suspect for as long as a lease lives.
type fencer struct {
	*Node
	all      sync.WaitGroup
	mu       sync.Mutex // guards suspects
	suspects map[registry.NodeName]*suspect
}

// fenceLost fences suspect nodes until ctx ends. An earlier shim of this node may have left fencing marks on nodes that
// are alive again. fenceLost removes these marks, even if this node does not fence.
func (n *Node) fenceLost(ctx context.Context) error {
	f := fencer{Node: n, suspects: map[registry.NodeName]*suspect{}}
	defer f.all.Wait()
	for {
		changed, valid := n.changes.next(), n.session.valid.next()
		wait, err := f.review(ctx)
		if err != nil {
			return err
		}
		var next <-chan time.Time
		if wait > 0 {
			next = time.After(wait)
		}
		select {
		case <-changed:
		case <-valid:
		case <-next:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// review starts to fence each node that is due, and to remove this node's mark from each node that is alive again. It
// returns the time until the next node is due; 0: there is none.
func (f *fencer) review(ctx context.Context) (wait time.Duration, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.session.boot()
	known := f.suspects
	f.suspects = map[registry.NodeName]*suspect{}
	err = f.State.View(ctx, func(v registry.View) error {
		for _, r := range v.Nodes() {
			_, alive := v.NodeLease(r.Name)
			toFence := !alive && f.fence != nil
			toUnmark := alive && r.Fencing.By == f.State.node
			if r.Name == f.State.node || r.Lost() || !toFence && !toUnmark {
				continue
			}
			s := known[r.Name]
			if s == nil {
				due := now + max(f.grace(v, r.Name), f.pause(r.Fencing))
				s = &suspect{due: due, tries: r.Fencing.Tries}
			}
			s.alive = alive
			f.suspects[r.Name] = s
		}
		return nil
	})
	for name, s := range f.suspects {
		switch {
		case s.running:
		case s.due <= now || s.alive:
			s.running = true
			f.all.Go(func() { f.try(ctx, name, s) })
		case wait == 0 || s.due-now < wait:
			wait = s.due - now
		}
	}
	return wait, err
}

// grace returns how much longer to wait before a suspect node is fenced. The time that it has been suspect counts.
func (f *fencer) grace(v registry.View, node registry.NodeName) time.Duration {
	since := v.SuspectSince(node)
	if since.IsZero() {
		return f.session.ttl
	}
	return min(max(f.session.ttl-f.Executors.now().Sub(since), 0), f.session.ttl)
}

// pause returns how long to wait before the next try to fence. Failed tries of earlier shims count.
func (f *fencer) pause(last registry.Fencing) time.Duration {
	if last.Tries == 0 {
		return 0
	}
	whole := fenceBackoff.Delay(last.Tries, rand.Float64())
	return min(max(whole-f.Executors.now().Sub(last.Tried), 0), whole)
}

// try tries once to fence a node, and wakes fenceLost.
func (f *fencer) try(ctx context.Context, node registry.NodeName, s *suspect) {
	err := f.fenceOnce(ctx, node)
	if err != nil && ctx.Err() == nil {
		f.log.Warn("cannot fence a node", "node", node, "error", err)
	}
	f.mu.Lock()
	s.tries++
	s.due, s.running = f.session.boot()+fenceBackoff.Delay(s.tries, rand.Float64()), false
	f.mu.Unlock()
	f.changes.fire()
}

// fenceOnce has the host fence a node and declares it fenced, unless the node is alive or another live node fences it.
func (f *fencer) fenceOnce(ctx context.Context, node registry.NodeName) error {
	marked, err := f.mark(ctx, node)
	if err != nil || !marked {
		return err
	}
	failed := f.fence(ctx, node)
	own := fmt.Sprintf("node %s", f.State.node)
	err = f.declareInBatches(ctx, func(v registry.View) (registry.Change, error) {
		r, _ := v.Node(node)
		if r.Fencing.By != f.State.node || r.Lost() {
			return registry.Change{}, nil
		}
		if failed == nil {
			const why = "etcd had not heard from it"
			return f.lostChange(v, r, registry.NodeFenced, registry.EventNodeFenced, own, why), nil
		}
		now := f.Executors.now()
		why := fmt.Sprintf("%s cannot fence it: %v", own, failed)
		change := registry.Change{}
		if r.Fencing.Failed != why {
			change.Events = []registry.Event{{
				Kind: registry.EventFenceFailed, Node: node, Detail: why + "; it is tried again", At: now,
			}}
		}
		r.Fencing.Failed, r.Fencing.Tries, r.Fencing.Tried = why, r.Fencing.Tries+1, now
		change.Put = []registry.Record{r}
		return change, nil
	})
	return errors.Join(failed, err)
}

// mark records that this node fences the other node, and reports whether that is recorded. If the other node is alive,
// it removes the mark of this node instead. It marks nothing if the other node is lost already, if this node has no
// lease or does not fence, or while a third node that is alive fences the other one.
func (f *fencer) mark(ctx context.Context, node registry.NodeName) (marked bool, err error) {
	own, lease := f.State.node, f.session.Lease()
	_, err = registry.Ensure(ctx, f.State, func(v registry.View) (registry.Change, error) {
		r, _ := v.Node(node)
		_, alive := v.NodeLease(node)
		here, _ := v.NodeLease(own)
		marked = false
		switch {
		case alive && r.Fencing.By == own:
			r.Fencing = registry.Fencing{}
			return registry.Change{Put: []registry.Record{r}}, nil
		case alive, r.Lost(), lease == 0, here.Lease != lease, f.fence == nil:
			return registry.Change{}, nil
		case r.Fencing.By != own && fencerAlive(v, r.Fencing):
			return registry.Change{}, nil
		}
		marked = true
		if r.Fencing.By == own && r.Fencing.Lease == lease {
			return registry.Change{}, nil
		}
		r.Fencing.By, r.Fencing.Lease = own, lease
		return registry.Change{Put: []registry.Record{r}}, nil
	})
	return marked && err == nil, err
}

// fencerAlive reports whether the node that set the mark is alive, with the same lease.
func fencerAlive(v registry.View, f registry.Fencing) bool {
	lease, alive := v.NodeLease(f.By)
	return alive && lease.Lease == f.Lease
}
