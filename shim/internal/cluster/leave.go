package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/config"
	"holdfast/registry"
)

// leaveTimeout bounds how long Leave waits for etcd.
const leaveTimeout = 30 * time.Second

// Leave ends the membership of a node: the cluster forgets the node as with Node.Forget, and then the node's store
// forgets the cluster. No shim of the node may run. An interrupted Leave can be repeated. ErrConflict: the node is no
// member of the cluster, or records depend on it; the error names them.
func Leave(
	ctx context.Context, local registry.State, c config.Cluster, node registry.NodeName, log hclog.Logger,
) error {
	n, err := NewNode(Options{Cluster: c, Node: node, Local: local, Now: time.Now, Logger: log})
	if err != nil {
		return err
	}
	n.State.expect = 0 // what the cluster expects does not matter
	defer func() { _ = n.Close() }()
	if err := local.View(ctx, func(v registry.View) error {
		if len(v.Copies()) == 0 {
			return errNoMember
		}
		return errors.Join(CheckMember(v, c.ID), checkIdle(v, node))
	}); err != nil {
		return err
	}
	if err := n.leave(ctx); err != nil {
		return err
	}
	return forgetCluster(ctx, local, c.ID, node, "")
}

var errNoMember = registry.Errorf(registry.ErrConflict, "this node is a member of no cluster")

// leave makes the cluster forget this node. No shim of the node runs.
func (n *Node) leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	member, err := viewed(ctx, n.State.local, func(v registry.View) string { return n.State.copyIn(v).Member })
	if err != nil {
		return err
	}
	if _, err := n.State.formation(ctx); errors.Is(err, registry.ErrConflict) {
		return err
	}
	name, _, err := n.State.memberName(ctx, member)
	switch {
	case err != nil:
		return n.noAnswer(unavailable(err))
	case name == "": // another machine has taken the name
		return nil
	case name != n.State.node:
		return n.State.wrongName(name)
	}
	running, stop := context.WithCancel(ctx)
	var copying sync.WaitGroup
	copying.Go(func() { _ = n.State.Run(running) })
	defer copying.Wait()
	defer stop()
	if err := n.State.awaitReady(ctx); err != nil {
		return n.noAnswer(err)
	}
	var lease clientv3.LeaseID
	known := false
	err = n.State.View(ctx, func(v registry.View) error {
		var r registry.Node
		r, known = v.Node(n.State.node)
		lease = clientv3.LeaseID(n.State.leaseIn(v))
		if r.State == registry.NodeForgotten {
			return nil
		}
		return n.checkUnneeded(v, n.State.node, leaveAdvice(n.State.node))
	})
	if err != nil || !known {
		return err
	}
	if lease != 0 { // the lease of the shim that has ended
		_, err := n.client.Revoke(ctx, lease)
		if err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return unavailable(err)
		}
	}
	return n.forget(ctx, n.State.node, "its operator", "holdfast cluster leave",
		func(registry.Node) string { return leaveAdvice(n.State.node) })
}

func (n *Node) noAnswer(err error) error {
	return fmt.Errorf("%w; if the cluster is gone for good, add --force --confirm %s", err, n.State.id)
}

// leaveAdvice says how an operator removes the records that depend on a node.
func leaveAdvice(node registry.NodeName) string {
	return fmt.Sprintf("start its agent, run holdfast node drain %s, delete or deregister what is stored there, and "+
		"stop the agent when holdfast node status %[1]s shows no claims and no executor", node)
}

// checkIdle returns an ErrConflict if the node has volumes mounted, or has open calls for volumes.
func checkIdle(v registry.View, node registry.NodeName) error {
	var has []string
	for _, p := range v.Stagings() {
		if p.State != registry.MarkNone {
			has = append(has, fmt.Sprintf("volume %s staged", p.Name))
		}
	}
	for _, r := range v.AllRefs() {
		has = append(has, fmt.Sprintf("volume %s published for alloc %s", r.Volume.External, r.Alloc))
	}
	for _, open := range v.Intents() {
		if open.RPC.OnNode() {
			has = append(has, fmt.Sprintf("an open %s of volume %s", open.RPC, open.Name))
		}
	}
	if len(has) == 0 {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "node %s still has %s; %s", node, joinSome(has), leaveAdvice(node))
}

// LeaveLost makes the store of a node forget a cluster that does not exist any more. confirm is the cluster's ID.
// Without it, LeaveLost returns an ErrDenied that says what may be lost. No shim of the node may run. ErrConflict: the
// node is no member, or has volumes mounted.
func LeaveLost(
	ctx context.Context, local registry.State, node registry.NodeName, confirm string,
) (cluster string, err error) {
	var lost string
	err = local.View(ctx, func(v registry.View) error {
		copies := v.Copies()
		if len(copies) == 0 {
			return errNoMember
		}
		cluster, lost = copies[0].Cluster, lossOf(v, node)
		return checkIdle(v, node)
	})
	switch {
	case err != nil:
		return "", err
	case confirm != cluster:
		return "", registry.Errorf(registry.ErrDenied, "this node would forget cluster %s with %s; "+
			"if its etcd is gone for good, add --force --confirm %[1]s; "+
			"if other nodes still run, declare this one out of service there, and forget it",
			cluster, lost)
	}
	return cluster, forgetCluster(ctx, local, cluster, node, "by force, with "+lost)
}

// lossOf describes the records that the node's store loses with its copy.
func lossOf(v registry.View, node registry.NodeName) string {
	volumes := v.Volumes()
	text := fmt.Sprintf("the records of %d volumes and %d snapshots, which stay at their plugins", len(volumes),
		len(v.Snapshots()))
	var attached []string
	for _, at := range v.AllAttachments() {
		if at.Node == node {
			attached = append(attached, at.Name.String())
		}
	}
	slices.Sort(attached)
	if len(attached) > 0 {
		text += fmt.Sprintf(" (still attached to this node: %s)", joinSome(attached))
	}
	claims := 0
	for _, c := range v.AllClaims() {
		if c.Node == node {
			claims++
		}
	}
	if claims > 0 {
		text += fmt.Sprintf(", and %d claims of this node", claims)
	}
	return text
}

// forgetCluster deletes all records of a cluster, and the node's membership, from the node's store.
func forgetCluster(
	ctx context.Context, local registry.State, cluster string, node registry.NodeName, how string,
) error {
	_, err := local.Commit(ctx, func(v registry.View) (change registry.Change, err error) {
		change.Delete = append(slices.Collect(sharedKeys(v)), registry.CopyRecord(cluster))
		change.Events = []registry.Event{{Kind: registry.EventNodeForgotten, Node: node, At: time.Now(),
			Detail: strings.TrimSpace(fmt.Sprintf("it has left cluster %s %s", cluster, how))}}
		return change, nil
	})
	return err
}
