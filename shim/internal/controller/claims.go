package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/registry"
)

// Claims takes and releases claims.
type Claims struct {
	log registry.State
	now func() time.Time
}

// NewClaims returns the claims in log. now returns the wall time, for display.
func NewClaims(log registry.State, now func() time.Time) *Claims { return &Claims{log, now} }

// Claim grants the claim and returns it as stored. Options that the usage leaves empty come from the volume. Repeating
// a claim returns the stored one. ErrConflict names the holders of the volume, or the state in which it cannot be used.
func (l *Claims) Claim(ctx context.Context, c registry.Claim) (registry.Claim, error) {
	if err := completeClaim(c); err != nil {
		return registry.Claim{}, err
	}
	var taken registry.Claim
	at, err := registry.Ensure(ctx, l.log, func(view registry.View) (change registry.Change, err error) {
		taken, change, err = l.take(view, c)
		return change, err
	})
	if err != nil {
		return registry.Claim{}, err
	}
	if taken.CreateIndex == 0 {
		taken.CreateIndex, taken.ModifyIndex = at, at
	}
	return taken, nil
}

func completeClaim(c registry.Claim) error {
	if c.Alloc == "" || c.Request == "" || c.Node == "" {
		return registry.Invalid("a claim of %s names its alloc, request and node; got %q, %q, %q",
			c.Volume, c.Alloc, c.Request, c.Node)
	}
	return Check(c.Usage)
}

func (l *Claims) take(view registry.View, c registry.Claim) (registry.Claim, registry.Change, error) {
	volume, found := view.VolumeByKey(c.Volume)
	if !found {
		return c, registry.Change{}, registry.Errorf(registry.ErrNotFound,
			"volume %s not found; create or register it first", c.Volume)
	}
	c.Name, c.Usage = volume.VolumeName(), overlay(volume, c.Usage)
	claims := view.Claims(c.Volume)
	for _, held := range claims {
		if held.ClaimKey() == c.ClaimKey() {
			return held, registry.Change{}, again(held, c)
		}
	}
	if err := checkUsable(volume, c.Usage); err != nil {
		return c, registry.Change{}, err
	}
	if err := checkCompatible(claims, c); err != nil {
		return c, registry.Change{}, err
	}
	c.Since = l.now()
	return c, registry.Change{Put: []registry.Record{c}, Events: []registry.Event{l.event(registry.EventClaimed, c)}},
		nil
}

// overlay returns the usage with its empty mount options taken from the volume.
func overlay(v registry.Volume, u registry.Usage) registry.Usage {
	if u.Attachment != registry.FileSystem {
		return u
	}
	if u.FSType == "" {
		u.FSType = v.FSType
	}
	if u.MountFlags == "" {
		u.MountFlags = v.MountFlags
	}
	if u.MountGroup == "" {
		u.MountGroup = v.MountGroup
	}
	return u
}

// again returns an ErrConflict unless c repeats the claim held.
func again(held, c registry.Claim) error {
	if held.Usage == c.Usage && held.Node == c.Node {
		return nil
	}
	return registry.Errorf(registry.ErrConflict,
		"alloc %s already holds volume %s as %q on node %s with another usage: %s, not %s on node %s",
		held.Alloc, held.Name, held.Request, held.Node, held.Usage, c.Usage, c.Node)
}

// checkUsable returns an error if the volume is not ready or does not support the usage.
func checkUsable(v registry.Volume, u registry.Usage) error {
	if v.State != registry.VolumeReady {
		return registry.Errorf(registry.ErrConflict, "volume %s is %s; it must be %s to be used",
			v.VolumeName(), v.State, registry.VolumeReady)
	}
	if v.Supports(registry.VolumeCapability{Access: u.Access, Attachment: u.Attachment}) {
		return nil
	}
	var can []string
	for _, c := range v.Capabilities {
		can = append(can, fmt.Sprintf("%s as %s", c.Access, c.Attachment))
	}
	return registry.Errorf(registry.ErrUnsupported, "volume %s does not support %s as %s; it supports: %s",
		v.VolumeName(), u.Access, u.Attachment, strings.Join(can, ", "))
}

// checkCompatible returns nil if c is compatible with all claims. Otherwise its ErrConflict names each incompatible
// claim and the reason.
func checkCompatible(claims []registry.Claim, c registry.Claim) error {
	var holders []string
	for _, held := range claims {
		if why := Compatible(held, c); why != "" {
			holders = append(holders, fmt.Sprintf("alloc %s (as %q on node %s, %s, since %s): %s",
				held.Alloc, held.Request, held.Node, held.Usage, held.Since.UTC().Format(time.RFC3339), why))
		}
	}
	if len(holders) == 0 {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "volume %s cannot be used as %s on node %s while it is held by %s",
		c.Name, c.Usage, c.Node, strings.Join(holders, "; "))
}

// Unclaim releases the claim and reports whether it existed. last means that the node has unpublished the volume for
// the claim, and has unstaged it if this is its last claim. Without last, another claim of the node must remain.
// ErrConflict means that the volume is still attached, or that no other claim remains.
func (l *Claims) Unclaim(ctx context.Context, key registry.ClaimKey, last bool) (existed bool, err error) {
	_, err = registry.Ensure(ctx, l.log, func(view registry.View) (registry.Change, error) {
		change, err := l.release(view, key, last)
		existed = err == nil && !change.Empty()
		return change, err
	})
	return existed && err == nil, err
}

func (l *Claims) release(view registry.View, key registry.ClaimKey, last bool) (registry.Change, error) {
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

// checkDetached returns nil if c is not the last claim of its node, or if the volume is no longer attached there.
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
