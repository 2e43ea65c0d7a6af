package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Claims takes and releases claims.
type Claims struct {
	state    registry.State
	plugins  intent.Plugins    // the plugins of this node
	thisNode registry.NodeName // empty: there are no other nodes
	now      func() time.Time
	limited  chan struct{} // of capacity 1; full while a claim is being taken at a plugin that limits volumes per node
}

// NewClaims returns the claims in the state of calls. The topology and the volume limit of a node are as its plugins
// report them; those of other nodes come from their records. In a cluster (calls.Node), no claim is granted before the
// cluster has formed.
func NewClaims(calls intent.Calls) *Claims {
	return &Claims{state: calls.State, plugins: calls.Plugins, thisNode: calls.Node, now: calls.Now,
		limited: make(chan struct{}, 1)}
}

func (l *Claims) clustered() bool { return l.thisNode != "" }

// Claim grants the claim and returns it as stored. Options that the usage leaves empty come from the volume. Repeating
// a claim returns the stored one. ErrConflict names the holders of the volume, or the state in which it cannot be used.
// ErrUnsupported means that the volume cannot be used on the node. ErrExhausted means that the node has its maximum of
// volumes. Topology and maximum are checked only if the node plugin is known. The decisions in before are part of the
// same commit, ahead of the claim.
func (l *Claims) Claim(ctx context.Context, c registry.Claim, before ...registry.Decision) (registry.Claim, error) {
	if node, known := l.plugins.Find(registry.RoleNode, c.Volume.Plugin); known && node.Fingerprint.MaxVolumes > 0 {
		select {
		case l.limited <- struct{}{}:
			defer func() { <-l.limited }()
		case <-ctx.Done():
			return registry.Claim{}, context.Cause(ctx)
		}
	}
	var taken registry.Claim
	take := func(view registry.View) (change registry.Change, err error) {
		taken, change, err = l.take(view, c)
		return change, err
	}
	at, err := l.state.Commit(ctx, append(before, take)...)
	if err != nil {
		return registry.Claim{}, err
	}
	if taken.CreateIndex == 0 {
		taken.CreateIndex, taken.ModifyIndex = at, at
	}
	return taken, nil
}

// take returns the claim as granted, and the change that stores it. A claim that is stored already needs no change.
func (l *Claims) take(view registry.View, c registry.Claim) (registry.Claim, registry.Change, error) {
	volume, found := view.VolumeByKey(c.Volume)
	if !found {
		return c, registry.Change{}, registry.Errorf(registry.ErrNotFound,
			"volume %s not found; create or register it first", c.Volume)
	}
	c, refused := l.Feasible(view, volume, c, nil)
	if len(refused) > 0 {
		return c, registry.Change{}, refused[0].Err()
	}
	if c.CreateIndex > 0 {
		return c, registry.Change{}, nil
	}
	c.Since = l.now()
	return c, registry.Change{Put: []registry.Record{c}, Events: []registry.Event{l.event(registry.EventClaimed, c)}},
		nil
}

// Feasible returns the claim as it would be granted, or every reason why it would not be. A stored claim is returned as
// stored, without reasons. planned are further claims, which count as granted. The claim must have the key of the
// volume.
func (l *Claims) Feasible(
	view registry.View, volume registry.Volume, c registry.Claim, planned []registry.Claim,
) (registry.Claim, []registry.Infeasible) {
	r := refusals{claim: c}
	if c.Alloc == "" || c.Request == "" || c.Node == "" {
		return c, r.add(registry.InfeasibleRequest, "a claim of %s names its alloc, request and node; got %q, %q, %q",
			c.Volume, c.Alloc, c.Request, c.Node)
	}
	if err := Check(c.Usage); err != nil {
		return c, r.add(registry.InfeasibleRequest, "%v", err)
	}
	c.Name, c.Usage = volume.VolumeName(), withVolumeOptions(volume, c.Usage)
	r.claim = c
	claims := append(view.Claims(c.Volume), planned...)
	for _, held := range claims {
		switch {
		case held.ClaimKey() != c.ClaimKey():
		case held.Usage == c.Usage && held.Node == c.Node:
			return held, nil
		default:
			return c, r.add(registry.InfeasibleClaimed,
				"alloc %s already holds volume %s as %q on node %s with another usage: %s, not %s on node %s",
				held.Alloc, held.Name, held.Request, held.Node, held.Usage, c.Usage, c.Node)
		}
	}
	if why := view.Unformed(); l.clustered() && why != "" {
		r.add(registry.InfeasibleNotFormed, "%s", why)
	}
	if l.clustered() && volume.Node != "" && volume.Node != c.Node {
		r.add(registry.InfeasibleTopology, "volume %s is on node %s, and plugin %s keeps volumes on their node "+
			"(controller_scope = %q): it can be used on node %s only, not on node %s", c.Name, volume.Node,
			volume.Plugin, registry.ScopeNode, volume.Node, c.Node)
	}
	if node, _ := view.Node(c.Node); node.State != registry.NodeReady && node.State != "" {
		why := string(node.State)
		if node.Reason != "" {
			why += " (" + node.Reason + ")"
		}
		r.add(registry.InfeasibleNode, "node %s is %s", c.Node, why)
	}
	if volume.State != registry.VolumeReady {
		r.add(registry.InfeasibleNotReady, "volume %s is %s; it must be %s to be used", c.Name, volume.State,
			registry.VolumeReady)
	}
	r.checkCapability(volume)
	r.checkCompatible(claims)
	if node, known := l.nodeInstance(view, c.Node, c.Volume.Plugin); known && !volume.Ephemeral {
		r.checkTopology(volume, node)
		r.checkLimit(view, node, planned, l.isThisNode(c.Node))
	}
	return c, r.list
}

// isThisNode reports whether a node is this one.
func (l *Claims) isThisNode(node registry.NodeName) bool { return !l.clustered() || l.thisNode == node }

// nodeInstance returns the instance of a node plugin on a node.
func (l *Claims) nodeInstance(
	view registry.View, node registry.NodeName, plugin registry.PluginID,
) (registry.Instance, bool) {
	if l.isThisNode(node) {
		return l.plugins.Find(registry.RoleNode, plugin)
	}
	other, _ := view.Node(node)
	return other.Find(registry.RoleNode, plugin)
}

// refusals collects the reasons why a claim is not granted.
type refusals struct {
	claim registry.Claim
	list  []registry.Infeasible
}

func (r *refusals) add(kind registry.InfeasibleKind, format string, args ...any) []registry.Infeasible {
	r.list = append(r.list, registry.Infeasible{
		Request: r.claim.Request, Volume: r.claim.Name, Plugin: r.claim.Volume.Plugin, Kind: kind,
		Detail: fmt.Sprintf(format, args...),
	})
	return r.list
}

// addHeld adds a reason, with the claims that are in the way.
func (r *refusals) addHeld(holders []registry.Claim, kind registry.InfeasibleKind, format string, args ...any) {
	r.add(kind, format, args...)
	r.list[len(r.list)-1].Holders = holders
}

// withVolumeOptions returns the usage with its empty mount options taken from the volume. MountGroup and
// Ownership.Group exclude each other: if the usage has one of them, both of the volume are ignored.
func withVolumeOptions(v registry.Volume, u registry.Usage) registry.Usage {
	if u.Attachment != registry.FileSystem {
		return u
	}
	if u.FSType == "" {
		u.FSType = v.FSType
	}
	if u.MountFlags == "" {
		u.MountFlags = v.MountFlags
	}
	if u.MountGroup == "" && u.Ownership.Group == "" {
		u.MountGroup = v.MountGroup
	}
	u.Ownership = u.Ownership.Over(v.Ownership)
	if u.MountGroup != "" {
		u.Ownership.Group = ""
	}
	return u
}

// checkCapability adds a reason if the volume does not support the usage.
func (r *refusals) checkCapability(v registry.Volume) {
	u := r.claim.Usage
	if v.Supports(registry.VolumeCapability{Access: u.Access, Attachment: u.Attachment}) {
		return
	}
	var can []string
	for _, c := range v.Capabilities {
		can = append(can, fmt.Sprintf("%s as %s", c.Access, c.Attachment))
	}
	r.add(registry.InfeasibleUnsupported, "volume %s does not support %s as %s; it supports: %s",
		v.VolumeName(), u.Access, u.Attachment, strings.Join(can, ", "))
}

// checkCompatible adds a reason for each claim of the volume that excludes this one.
func (r *refusals) checkCompatible(claims []registry.Claim) {
	c := r.claim
	var holders []registry.Claim
	var texts []string
	for _, held := range claims {
		if why := Compatible(held, c); held.Volume == c.Volume && why != "" {
			holders = append(holders, held)
			texts = append(texts, fmt.Sprintf("alloc %s (as %q on node %s, %s, since %s): %s",
				held.Alloc, held.Request, held.Node, held.Usage, held.Since.UTC().Format(time.RFC3339), why))
		}
	}
	if len(holders) > 0 {
		r.addHeld(holders, registry.InfeasibleClaimed,
			"volume %s cannot be used as %s on node %s while it is held by %s",
			c.Name, c.Usage, c.Node, strings.Join(texts, "; "))
	}
}

// SettleClaims does nothing, because on a single node the outcome of each commit is known.
func (l *Claims) SettleClaims(context.Context) error { return nil }

// Unclaim releases the claim and reports whether it existed. Unless last is set, another claim of the node must remain.
// A caller that sets last has unpublished the volume for the claim, and has unstaged it if no other claim remains.
// ErrConflict means that the volume is still attached, or that no other claim remains.
func (l *Claims) Unclaim(ctx context.Context, key registry.ClaimKey, last bool) (existed bool, err error) {
	_, err = l.state.Commit(ctx, func(view registry.View) (registry.Change, error) {
		change, err := l.UnclaimChange(view, key, last)
		existed = err == nil && !change.Empty()
		return change, err
	})
	return existed && err == nil, err
}

// UnclaimChange returns the change that Unclaim commits. It is empty if there is no such claim.
func (l *Claims) UnclaimChange(view registry.View, key registry.ClaimKey, last bool) (registry.Change, error) {
	claims := view.Claims(key.Volume)
	at := slices.IndexFunc(claims, func(c registry.Claim) bool { return c.ClaimKey() == key })
	if at < 0 {
		return registry.Change{}, nil
	}
	if err := checkDetached(view, claims, claims[at], last); err != nil {
		return registry.Change{}, err
	}
	return registry.Change{
		Delete: []registry.Key{key.ClaimRecord()},
		Events: []registry.Event{l.event(registry.EventReleased, claims[at])},
	}, nil
}

// checkDetached returns an ErrConflict if c is the last claim of its node, and the volume is still attached there or
// last is false.
func checkDetached(view registry.View, claims []registry.Claim, c registry.Claim, last bool) error {
	for _, other := range claims {
		if other.ClaimKey() != c.ClaimKey() && other.Node == c.Node {
			return nil
		}
	}
	if !last {
		return registry.Errorf(registry.ErrConflict, "alloc %s is the last user of volume %s on node %s", c.Alloc,
			c.Name, c.Node)
	}
	if at, attached := view.Attachment(registry.AttachmentKey{Volume: c.Volume, Node: c.Node}); attached {
		return registry.Errorf(registry.ErrConflict,
			"volume %s is still attached to node %s, and alloc %s is its last user; detach the volume first",
			c.Name, at.NodeID, c.Alloc)
	}
	return nil
}

func (l *Claims) event(kind registry.EventKind, c registry.Claim) registry.Event {
	return registry.Event{
		Kind: kind, Plugin: c.Volume.Plugin, Alloc: c.Alloc, Volume: c.Name, External: c.Volume.External,
		Request: c.Request,
		Detail:  fmt.Sprintf("%s on node %s", c.Usage, c.Node), At: l.now(),
	}
}
