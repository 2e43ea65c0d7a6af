package cluster

import (
	"context"
	"fmt"

	"holdfast/registry"
)

// mustTakeDown reports whether this node was declared lost and has not taken down its volumes since. The copy record
// has the last epoch whose volumes are taken down.
func (s *State) mustTakeDown(v registry.View) bool {
	node, _ := v.Node(s.node)
	return node.Lost() || node.Epoch > s.copyIn(v).Epoch
}

// mayHaveMounts reports whether a volume may be staged or published on this node.
func mayHaveMounts(v registry.View) bool {
	for _, p := range v.Stagings() {
		if p.State != registry.MarkNone {
			return true
		}
	}
	return len(v.AllRefs()) > 0
}

// Admitted returns nil if volumes may be staged and published on this node, because its claims in the view are still
// its own. For that, this node needs a valid lease that the view shows. A node with a valid lease loses its claims only
// if it comes back while another node fences it, so Admitted also checks that.
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
	if n.State.mustTakeDown(v) {
		return registry.Errorf(registry.ErrUnavailable, "%s; its volumes are being taken down", node)
	}
	return nil
}

// AwaitAdmitted waits until Admitted returns nil. It calls waits with each new reason for waiting.
func (n *Node) AwaitAdmitted(ctx context.Context, waits func(what string)) error {
	for reported := ""; ; {
		changed, valid := n.changes.next(), n.session.valid.next()
		why, err := viewed(ctx, n.State, n.Admitted)
		if err != nil || why == nil {
			return err
		}
		if why.Error() != reported {
			reported = why.Error()
			waits(reported)
		}
		select {
		case <-changed:
		case <-valid:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", why, context.Cause(ctx))
		}
	}
}
