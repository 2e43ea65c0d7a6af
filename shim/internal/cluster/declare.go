package cluster

import (
	"context"
	"slices"
	"time"

	"holdfast/registry"
)

// Drain begins or ends the drain of a node, and returns the node's record. A draining node takes no new claims. by and
// reason are for people, the deadline is for the node's host. A drain that was under way when the node was lost
// continues once the node is back; until then it can be changed or ended. ErrNotFound: there is no such node.
// ErrConflict: the node is lost, and was not draining.
func (n *Node) Drain(
	ctx context.Context, node registry.NodeName, on bool, deadline time.Time, by, reason string,
) (registry.Node, error) {
	return n.declare(ctx, node, func(v registry.View, r registry.Node) (registry.Change, error) {
		want, kind := registry.NodeReady, registry.EventNodeReady
		if on {
			want, kind = registry.NodeDraining, registry.EventNodeDraining
		}
		switch _, drained := r.Drains(); {
		case r.Lost() && drained:
			r.Drain = registry.Drain{}
			if on {
				r.Drain = registry.Drain{By: by, Reason: reason, Deadline: deadline}
			}
			return registry.Change{Put: []registry.Record{r}}, nil
		case r.Lost():
			return registry.Change{}, registry.Errorf(registry.ErrConflict,
				"%s; it is ready once its shim runs again and has unmounted its volumes", r)
		case r.State == want && r.Deadline.Equal(deadline):
			return registry.Change{}, nil
		}
		r.Deadline = deadline
		return n.declareChange(r, want, kind, by, reason), nil
	})
}

// OutOfService records an operator's statement that nothing runs on a node any more, and returns the node's record.
// Other nodes then release the node's claims. If the node is lost already, nothing changes. ErrNotFound: there is no
// such node. ErrConflict: the node is alive.
func (n *Node) OutOfService(
	ctx context.Context, node registry.NodeName, by, reason string,
) (registry.Node, error) {
	return n.declare(ctx, node, func(v registry.View, r registry.Node) (registry.Change, error) {
		if err := n.checkNotAlive(v, node); err != nil || r.Lost() {
			return registry.Change{}, err
		}
		return n.lostChange(v, r, registry.NodeOutOfService, registry.EventNodeOutOfService, by, reason), nil
	})
}

// CheckOutOfService returns the error of OutOfService for a node that is unknown or alive.
func (n *Node) CheckOutOfService(ctx context.Context, node registry.NodeName) error {
	return registry.Confirm(ctx, n.State, func(v registry.View) error { return n.checkNotAlive(v, node) })
}

// checkNotAlive returns an error if the node is alive or unknown.
func (n *Node) checkNotAlive(v registry.View, node registry.NodeName) error {
	r, found := v.Node(node)
	_, alive := v.NodeLease(node)
	switch {
	case node == n.State.node:
		return registry.Errorf(registry.ErrConflict, "node %s is this node, and it is alive; drain it instead", node)
	case !found || r.State == registry.NodeForgotten:
		return n.unknown(node)
	case alive:
		return registry.Errorf(registry.ErrConflict, "node %s is alive: etcd has heard from it within the last %s; "+
			"drain it, or stop the machine and try again after that time", node, n.session.ttl)
	}
	return nil
}

// declare commits the change that decide returns for the node's record, and returns the new record. ErrNotFound: there
// is no such node.
func (n *Node) declare(
	ctx context.Context, node registry.NodeName,
	decide func(registry.View, registry.Node) (registry.Change, error),
) (r registry.Node, err error) {
	err = n.declareInBatches(ctx, func(v registry.View) (registry.Change, error) {
		r, found := v.Node(node)
		if !found || r.State == registry.NodeForgotten {
			return registry.Change{}, n.unknown(node)
		}
		return decide(v, r)
	})
	if err != nil {
		return registry.Node{}, err
	}
	return viewed(ctx, n.State, func(v registry.View) registry.Node { r, _ := v.Node(node); return r })
}

// declareInBatches commits the changes of decide until a change includes a node's record, or is empty.
func (n *Node) declareInBatches(ctx context.Context, decide registry.Decision) error {
	for more := true; more; {
		_, err := registry.Ensure(ctx, n.State, func(v registry.View) (registry.Change, error) {
			change, err := decide(v)
			more = !change.Empty() && !change.Touches(registry.BucketNodes)
			return change, err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// unknown returns the error for a node that the cluster does not have.
func (n *Node) unknown(node registry.NodeName) error {
	return registry.Errorf(registry.ErrNotFound, "no node of cluster %s is named %s", n.State.id, node)
}

// declareChange returns the change that sets the state of a node, with its event. It removes a fencing mark.
func (n *Node) declareChange(
	r registry.Node, state registry.NodeState, kind registry.EventKind, by, reason string,
) registry.Change {
	now := n.Executors.now()
	r.State, r.By, r.Reason, r.Since, r.Fencing = state, by, reason, now, registry.Fencing{}
	if state == registry.NodeForgotten {
		r.Drain = registry.Drain{}
	}
	return registry.Change{Put: []registry.Record{r},
		Events: []registry.Event{{Kind: kind, Node: r.Name, Detail: r.Declaration(), At: now}}}
}

// lostChange returns the change that declares a node lost and takes its executor records from it. A node without a
// lease sends no more controller calls, so other nodes may send theirs at once. A node that has a lease again becomes a
// former executor until it has settled its calls. If there are too many records for one change, the change has a first
// batch without the node's record: see declareInBatches.
func (n *Node) lostChange(
	v registry.View, r registry.Node, state registry.NodeState, kind registry.EventKind, by, reason string,
) registry.Change {
	r.Epoch++
	r.Drain, _ = r.Drains()
	r.Deadline = time.Time{}
	change := n.declareChange(r, state, kind, by, reason)
	_, alive := v.NodeLease(r.Name)
	for _, e := range v.Executors() {
		switch {
		case len(change.Put) > registry.Batch:
			return registry.Change{Put: change.Put[1:]} // the first batch, without the node's record
		case alive && e.Holder == r.Name:
			change.Put = append(change.Put, e.Dropped(n.Executors.now()))
		case !alive && (e.Holder == r.Name || slices.Contains(e.Former, r.Name)):
			change.Put = append(change.Put, e.Left(r.Name, n.Executors.now()))
		}
	}
	return change
}
