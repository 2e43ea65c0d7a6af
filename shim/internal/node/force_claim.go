package node

import (
	"context"
	"fmt"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// ForceReleaseClaims releases the claims of an alloc on a volume that cannot be released in order. Either their node is
// not alive, or this node holds them without a record of the alloc and without a mount of the volume. Attachments that
// no other claim needs are detached first; if that fails, their records are deleted. f.Confirm is the ID of the alloc.
// ErrNotFound means that there is no such claim. ErrConflict says who can release the claim instead.
func (a *Allocs) ForceReleaseClaims(
	ctx context.Context, name registry.VolumeName, id registry.AllocID, f registry.Force,
) (steps []registry.ReleaseStep, err error) {
	claims, err := a.abandonedClaims(ctx, name, id)
	if err != nil {
		return nil, err
	}
	for _, c := range claims {
		detach, err := a.controller.AbandonSteps(ctx, registry.AttachmentKey{Volume: c.Volume, Node: c.Node})
		if err != nil {
			return nil, err
		}
		steps = append(steps, detach...)
		steps = append(steps, registry.ReleaseStep{Volume: name, Request: c.Request, Action: registry.ReleaseClaim})
	}
	switch {
	case f.DryRun:
		return steps, nil
	case f.By == "":
		return nil, registry.Invalid("a release by force must name its operator (By)")
	case f.Confirm != string(id):
		return nil, registry.Errorf(registry.ErrDenied, "a release of the claim of alloc %s on volume %s by force "+
			"needs a confirmation: nothing shows that the volume is unmounted on node %s, and two writers may "+
			"destroy its data; make sure that the machine is off, or that nothing uses the volume there, and add "+
			"--confirm %s", id, name, claims[0].Node, id)
	}
	for _, c := range claims {
		if err := a.forceUnclaim(ctx, c, f); err != nil {
			return nil, err
		}
	}
	return steps, nil
}

// abandonedClaims returns the claims of an alloc on a volume. If the normal release of one is still possible, it
// returns the error of checkAbandoned instead.
func (a *Allocs) abandonedClaims(
	ctx context.Context, name registry.VolumeName, id registry.AllocID,
) (claims []registry.Claim, err error) {
	err = registry.Confirm(ctx, a.State, func(v registry.View) error {
		claims = slices.DeleteFunc(v.ClaimsOf(id), func(c registry.Claim) bool { return c.Name != name })
		if _, known := v.Volume(name); len(claims) == 0 && !known {
			return registry.Errorf(registry.ErrNotFound, "volume %s not found", name)
		}
		if len(claims) == 0 {
			return registry.Errorf(registry.ErrNotFound, "alloc %s has no claim on volume %s", id, name)
		}
		for _, c := range claims {
			if err := a.checkAbandoned(v, c); err != nil {
				return err
			}
		}
		return nil
	})
	return claims, err
}

// checkAbandoned returns an ErrConflict if the normal release of the claim is still possible.
func (a *Allocs) checkAbandoned(v registry.View, c registry.Claim) error {
	_, alive := v.NodeLease(c.Node)
	_, known := v.Alloc(c.Alloc)
	ref, mounted := v.Ref(c.ClaimKey())
	switch {
	case c.Node != a.host.Node && alive:
		return conflict("node %s, which has the claim, is alive; stop alloc %s there, or run this command there if "+
			"the node does not know the alloc", c.Node, c.Alloc)
	case c.Node != a.host.Node:
		return nil
	case known:
		return conflict("this node knows alloc %s: stop it, which releases its volumes; if its plugin is gone for "+
			"good, run holdfast alloc release %s --force", c.Alloc, c.Alloc)
	case mounted:
		return conflict("the volume is, or may be, mounted at %s for alloc %s, which is not known any more; run "+
			"holdfast doctor --repair", ref.Target.Host, c.Alloc)
	}
	return nil
}

// forceUnclaim releases a claim. It first detaches the volume if no other claim of the node needs the attachment, and
// deletes the attachment's record if that fails.
func (a *Allocs) forceUnclaim(ctx context.Context, c registry.Claim, f registry.Force) error {
	unlock, err := a.Locks.Lock(ctx, c.Volume, "a release by force")
	if err != nil {
		return err
	}
	defer unlock()
	var last bool
	_, err = registry.Ensure(ctx, a.State, func(v registry.View) (change registry.Change, err error) {
		last = !slices.ContainsFunc(v.Claims(c.Volume), func(other registry.Claim) bool {
			return other.Node == c.Node && other.ClaimKey() != c.ClaimKey()
		})
		if err := a.checkAbandoned(v, c); err != nil {
			return change, err
		}
		return registry.Change{Events: []registry.Event{{
			Kind: registry.EventForced, Alloc: c.Alloc, Plugin: c.Volume.Plugin, Volume: c.Name,
			External: c.Volume.External,
			Request:  c.Request, Detail: fmt.Sprintf("claim of node %s, by %s", c.Node, f.By), At: a.Now(),
		}}}, nil
	})
	if err == nil && last {
		by := intent.Caller{RetryUntil: time.Now().Add(forceRound)}
		err = a.controller.Detach(ctx, by, c.Volume, c.Node)
		if err != nil && ctx.Err() == nil {
			err = a.controller.DetachOrAbandon(ctx, by, registry.AttachmentKey{Volume: c.Volume, Node: c.Node},
				registry.Forced{By: f.By, Since: a.Now()})
		}
	}
	if err == nil {
		_, err = a.State.Commit(ctx, func(v registry.View) (registry.Change, error) {
			if err := a.checkAbandoned(v, c); err != nil { // its node may be alive again
				return registry.Change{}, err
			}
			return a.controller.UnclaimChange(v, c.ClaimKey(), last)
		})
	}
	return err
}
