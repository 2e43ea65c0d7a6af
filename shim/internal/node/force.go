package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// forceRound bounds the waits and retries of a release by force, for each volume. Calls that fail until then are
// skipped. A call that is under way still runs to its own deadline, because the plugin may be writing.
const forceRound = 10 * time.Second

var errForced = errors.New("the release continues by force")

// ForceRelease ends the release of an alloc whose volumes cannot be released because a plugin or its backend is gone
// for good. It sends each call that it can. It skips calls that fail or have no healthy plugin, and unmounts mounts
// that nothing uses. A mount in use stays: ErrConflict names its users. f.Confirm is the ID of the alloc. The release
// must have begun, and an alloc that has lost its volumes must have been stopped. Like any release, it continues after
// a restart. ForceRelease returns the planned steps; with f.DryRun it does nothing else.
func (a *Allocs) ForceRelease(
	ctx context.Context, id registry.AllocID, f registry.Force,
) ([]registry.ReleaseStep, error) {
	steps, err := a.forceSteps(ctx, id)
	if err != nil || f.DryRun {
		return steps, err
	}
	if err := checkForce(id, f, steps); err != nil {
		return nil, err
	}
	_, err = registry.Ensure(ctx, a.State, func(v registry.View) (registry.Change, error) {
		al, known := v.Alloc(id)
		if !known || al.Forced.By != "" {
			return registry.Change{}, nil
		}
		al.Forced = registry.Forced{By: f.By, Since: a.Now()}
		return registry.Change{Put: []registry.Record{al}, Events: []registry.Event{{
			Kind: registry.EventForced, Alloc: id, Detail: "by " + f.By, At: a.Now(),
		}}}, nil
	})
	if err != nil {
		return nil, fmt.Errorf("record the release of alloc %s by force: %w", id, err)
	}
	a.abort(id)
	// the call is empty because the host has not said that the alloc has ended: see discard
	return steps, a.Release(ctx, registry.Call{}, id, false)
}

// checkForce refuses a release by force that was not confirmed, or that would have to unmount a mount in use.
func checkForce(id registry.AllocID, f registry.Force, steps []registry.ReleaseStep) error {
	var maySkip, refused []string
	for _, s := range steps {
		switch s.Action {
		case registry.ReleaseSkip, registry.ReleaseSend:
			maySkip = append(maySkip, fmt.Sprintf("%s of volume %s", s.RPC, s.Volume))
		case registry.ReleaseRefuse:
			refused = append(refused, s.Detail)
		}
	}
	switch {
	case f.By == "":
		return registry.Invalid("a release by force must name its operator (By)")
	case len(maySkip) > 0 && f.Confirm != string(id):
		return registry.Errorf(registry.ErrDenied, "a release of alloc %s by force needs a confirmation: it may "+
			"skip %s, so data that was written last may be lost, and the backend may keep the volume attached here; "+
			"to see each step, add --dry-run; to confirm, add --confirm %s", id, strings.Join(maySkip, ", "), id)
	case len(refused) > 0:
		return conflict("alloc %s cannot be released: %s", id, strings.Join(refused, "; "))
	}
	return nil
}

// forceSteps returns what ForceRelease of the alloc would do now.
func (a *Allocs) forceSteps(ctx context.Context, id registry.AllocID) (steps []registry.ReleaseStep, err error) {
	var al registry.Alloc
	var claims []registry.Claim
	err = a.State.View(ctx, func(v registry.View) error {
		al, _ = v.Alloc(id)
		claims = a.claimsToRelease(v, id)
		return nil
	})
	switch {
	case err != nil:
		return nil, err
	case al.ID == "":
		return nil, registry.Errorf(registry.ErrNotFound, "alloc %s has no volumes here", id)
	case al.State != registry.AllocReleasing:
		return nil, conflict("alloc %s is %s; stop it first: only a release that has begun is ended by force", id,
			al.State)
	case al.Lost:
		return nil, conflict("alloc %s has lost its volumes, but its tasks may still use them; stop it first", id)
	}
	released := map[registry.ClaimKey]bool{} // claims that the steps so far release, and the current claim
	going := map[string]bool{}               // mount points that the steps unmount; AbandonSteps adds them
	for _, c := range claims {
		req := &request{Allocs: a, key: c.ClaimKey(), name: c.Name, node: c.Node}
		released[req.key] = true
		last, err := req.isLast(ctx, released)
		if err != nil {
			return nil, err
		}
		node, err := a.stager.AbandonSteps(ctx, req.key, last, going)
		if err != nil {
			return nil, err
		}
		steps = append(steps, node...)
		if last {
			at, err := a.controller.AbandonSteps(ctx, registry.AttachmentKey{Volume: c.Volume, Node: c.Node})
			if err != nil {
				return nil, err
			}
			steps = append(steps, at...)
		}
		steps = append(steps, registry.ReleaseStep{Volume: c.Name, Request: c.Request, Action: registry.ReleaseClaim})
	}
	return steps, nil
}

// abort ends the running release of the alloc. Release then starts a new one.
func (a *Allocs) abort(id registry.AllocID) {
	a.mu.Lock()
	w := a.busy[id]
	a.mu.Unlock()
	if w != nil && w.release {
		w.abort()
		<-w.done
	}
}

// isLast reports whether no request uses or claims the volume on this node, except those in released.
func (req *request) isLast(ctx context.Context, released map[registry.ClaimKey]bool) (last bool, err error) {
	err = req.State.View(ctx, func(v registry.View) error {
		last = true
		for _, r := range v.Refs(req.key.Volume) {
			last = last && released[r.ClaimKey()]
		}
		for _, c := range v.Claims(req.key.Volume) {
			last = last && (released[c.ClaimKey()] || c.Node != req.node)
		}
		return nil
	})
	return last, err
}

// forceRequest releases a request by force. If the node plugin can be called, it first tries a normal release for
// forceRound. If that fails, or the plugin cannot be called, it takes the mounts down without the plugin. After the
// last user it then detaches the volume, or abandons the attachment.
func (req *request) forceRequest(ctx context.Context, by registry.Forced) error {
	why := ""
	reasons := intent.FeasibleAt(req.Plugins, registry.RoleNode, req.key.Volume.Plugin, registry.Usage{})
	if len(reasons) > 0 {
		why = reasons[0].Detail
	} else {
		req.round = forceRound
		err := req.releaseRequest(ctx)
		if err == nil || ctx.Err() != nil {
			return err
		}
		why = err.Error()
	}
	unlock, err := req.lock(ctx, fmt.Sprintf("the release of alloc %s by force", req.key.Alloc))
	if err != nil {
		return err
	}
	defer unlock()
	last, err := req.isLast(ctx, map[registry.ClaimKey]bool{req.key: true})
	if err != nil {
		return err
	}
	req.step = registry.StepUnpublish
	if err := req.stager.Abandon(ctx, req.key, last, by, why); err != nil {
		return err
	}
	if last {
		req.step = registry.StepDetach
		at := registry.AttachmentKey{Volume: req.key.Volume, Node: req.node}
		if err := req.controller.DetachOrAbandon(ctx, req.by, at, by); err != nil {
			return err
		}
	}
	return req.unclaim(ctx)
}
