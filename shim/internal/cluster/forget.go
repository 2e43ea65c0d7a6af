package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"holdfast/registry"
)

// Forget takes a node off the lists of nodes because it will never come back, and ends its drain. Calls that wait for
// the node end with ErrUncertain. After an error, this shim or the next one may repeat Forget. ErrNotFound: there has
// never been such a node. ErrConflict: the node is alive, or records depend on it; the error names them.
func (n *Node) Forget(ctx context.Context, node registry.NodeName, by, reason string) error {
	if node == n.State.node {
		return registry.Errorf(registry.ErrConflict, "node %s is this node; forget it at another one", node)
	}
	return n.forget(ctx, node, by, reason, forgetAdvice)
}

// forget makes the cluster forget a node that is not alive, and deletes the calls that wait for the node. advice says
// how an operator removes the records that depend on the node.
func (n *Node) forget(
	ctx context.Context, node registry.NodeName, by, reason string, advice func(registry.Node) string,
) error {
	_, err := n.State.Commit(ctx, func(v registry.View) (registry.Change, error) {
		r, found := v.Node(node)
		switch _, alive := v.NodeLease(node); {
		case !found:
			return registry.Change{}, n.unknown(node)
		case r.State == registry.NodeForgotten:
			return registry.Change{}, nil
		case alive:
			return registry.Change{}, registry.Errorf(registry.ErrConflict,
				"node %s is alive: stop its agent first, and try again %s later", node, n.session.ttl)
		}
		if err := n.checkUnneeded(v, node, advice(r)); err != nil {
			return registry.Change{}, err
		}
		if r.Lost() {
			return n.declareChange(r, registry.NodeForgotten, registry.EventNodeForgotten, by, reason), nil
		}
		return n.lostChange(v, r, registry.NodeForgotten, registry.EventNodeForgotten, by, reason), nil
	})
	if err != nil {
		return err
	}
	return registry.EnsureAll(ctx, n.State, func(v registry.View) (change registry.Change, err error) {
		for _, call := range v.Aside().RemoteCalls() {
			if call.To == node && !call.Done && len(change.Delete) < registry.Batch {
				change.Delete = append(change.Delete, call.Key())
			}
		}
		return change, nil
	})
}

// checkUnneeded returns an ErrConflict if records depend on the node.
func (n *Node) checkUnneeded(v registry.View, node registry.NodeName, advice string) error {
	if has := append(heldBy(v, node), executorFor(v, node)...); len(has) > 0 {
		return registry.Errorf(registry.ErrConflict, "node %s still has %s; %s", node, joinSome(has), advice)
	}
	return nil
}

// forgetAdvice says how an operator removes the records that depend on a node.
func forgetAdvice(r registry.Node) string {
	if r.Lost() {
		return fmt.Sprintf("it is %s, so its claims and attachments are being released: see holdfast claim list; "+
			"deregister what is stored there", r.State)
	}
	return fmt.Sprintf("if its machine is certainly off, release that first: "+
		"holdfast node out-of-service %[1]s --confirm %[1]s", r.Name)
}

// joinSome joins at most five of the texts, and counts the others.
func joinSome(texts []string) string {
	const most = 5
	if more := len(texts) - most; more > 0 {
		texts = append(texts[:most:most], fmt.Sprintf("%d more", more))
	}
	return strings.Join(texts, ", ")
}

// heldBy describes the records that depend on a node.
func heldBy(v registry.View, node registry.NodeName) (list []string) {
	add := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	for _, c := range v.AllClaims() {
		if c.Node == node {
			add("the claim of alloc %s on volume %s", c.Alloc, c.Name)
		}
	}
	for _, at := range v.AllAttachments() {
		if at.Node == node {
			add("an attachment of volume %s", at.Name)
		}
	}
	for _, use := range v.AllEndpointUses() {
		if use.Node == node {
			add("%s of %s by a client of its CSI endpoint", use, use.Volume.External)
		}
	}
	for _, open := range v.Intents() {
		if slices.Contains(open.Senders, node) {
			add("an open %s of volume %s", open.RPC, open.Name)
		}
	}
	for _, vol := range v.Volumes() {
		if vol.Node == node {
			add("volume %s, which is stored there", vol.VolumeName())
		}
	}
	for _, s := range v.SnapshotRecords() {
		kind := "snapshot"
		if s.IsGroup() {
			kind = "group snapshot"
		}
		if s.Node == node {
			add("%s %s, which is stored there", kind, s.SnapshotName())
		}
	}
	return list
}

// executorFor describes the plugins that have the node as the executor or a former executor.
func executorFor(v registry.View, node registry.NodeName) (list []string) {
	for _, e := range v.Executors() {
		if e.Holder == node || slices.Contains(e.Former, node) {
			list = append(list, fmt.Sprintf("the role of executor, or former executor, of plugin %s", e.Plugin))
		}
	}
	return list
}
