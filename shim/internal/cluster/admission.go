package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
)

// broadcast wakes everything that waits for a change.
type broadcast struct {
	mu sync.Mutex // guards ch
	ch chan struct{}
}

// next returns a channel that is closed at the next change.
func (b *broadcast) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

func (b *broadcast) fire() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}

// reports logs an error that a loop meets again and again once, until there is another one or none.
type reports struct{ last string }

func (r *reports) log(log hclog.Logger, what string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != r.last && text != "" {
		log.Warn(what, "error", err)
	}
	r.last = text
}

// follow calls step at once, after each change, when the lease is valid again, and a second after an error of step. It
// logs the error with what, and ends when ctx does or this node is fenced.
func (s *session) follow(
	ctx context.Context, changes *broadcast, log hclog.Logger, what string, step func(context.Context) error,
) error {
	for said := (reports{}); ; {
		changed, valid := changes.next(), s.valid.next()
		err := step(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, registry.ErrFenced) {
			return err
		}
		said.log(log, what, err)
		var again <-chan time.Time
		if err != nil {
			again = time.After(time.Second)
		}
		select {
		case <-changed:
		case <-valid:
		case <-again:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// behind reports whether this node was declared lost, and has not taken down its volumes since.
func (s *State) behind(v registry.View) bool {
	node, _ := v.Node(s.node)
	return node.Lost() || node.Epoch > s.copyIn(v).Epoch
}

// mounted reports whether a volume may be mounted on this node.
func mounted(v registry.View) bool {
	for _, p := range v.Stagings() {
		if p.State != registry.MarkNone {
			return true
		}
	}
	return len(v.AllRefs()) > 0
}

// Admitted returns nil if volumes may be staged and published on this node: its claims in the view are its own. That
// is certain while it has a lease that the view shows: no node with a valid lease is declared lost, unless it came back
// while another one fenced it.
func (n *Node) Admitted(v registry.View) error {
	own, _ := v.NodeLease(n.State.node)
	if lease := n.session.Lease(); lease == 0 || own.Lease != lease {
		text := fmt.Sprintf("node %s has no lease in etcd, so its claims may have been released", n.State.node)
		if why := n.State.Problem(); why != "" {
			text += ": " + why
		}
		return registry.Errorf(registry.ErrUnavailable, "%s", text)
	}
	node, _ := v.Node(n.State.node)
	if node.Fencing.By != "" {
		return registry.Errorf(registry.ErrUnavailable, "node %s is being fenced by node %s, and waits for the outcome",
			node.Name, node.Fencing.By)
	}
	if n.State.behind(v) {
		return registry.Errorf(registry.ErrUnavailable, "%s; its volumes are being taken down", node)
	}
	return nil
}

// AwaitAdmitted waits until Admitted returns nil. It calls waits with what it waits for.
func (n *Node) AwaitAdmitted(ctx context.Context, waits func(what string)) error {
	for said := ""; ; {
		changed, valid := n.changes.next(), n.session.valid.next()
		var why error
		err := n.State.View(ctx, func(v registry.View) error { why = n.Admitted(v); return nil })
		if err != nil || why == nil {
			return err
		}
		if why.Error() != said {
			said = why.Error()
			waits(said)
		}
		select {
		case <-changed:
		case <-valid:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", why, context.Cause(ctx))
		}
	}
}
