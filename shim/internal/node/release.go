package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Release releases the volumes of the alloc. It returns when all are released or ctx ends. After ctx has ended, the
// release continues in the background, also after a restart. An unknown alloc counts as released. Volumes are deleted
// as their create blocks say, unless every Release of the alloc was called with keep.
func (a *Allocs) Release(ctx context.Context, call registry.Call, id registry.AllocID, keep bool) error {
	a.stopPrepare(id) // before the record is read: a Prepare may be about to write it
	known, err := a.recordRelease(ctx, call, id, keep)
	if err != nil || !known {
		return err
	}
	for {
		w := a.startRelease(id)
		if w == nil {
			return registry.Errorf(registry.ErrUnavailable, "alloc %s will be released by the next shim: this one ends",
				id)
		}
		select {
		case <-w.done:
		case <-ctx.Done():
		}
		switch {
		case intent.Released(ctx): // the host calls the next shim, so what the release waits for does not matter
			return fmt.Errorf("alloc %s is still being released: %w", id, context.Cause(ctx))
		case ctx.Err() != nil:
			return fmt.Errorf("alloc %s is still being released in the background: %w", id,
				errors.Join(context.Cause(ctx), a.releaseWaits(ctx, id)))
		case w.kept, errors.Is(w.endCause, errForced):
			continue // another release follows: the one for this call, or the one by force
		case w.endCause != nil: // the shim ends, and ctx will end too
			return fmt.Errorf("alloc %s is still being released: %w", id, w.endCause)
		}
		return a.answerReleased(ctx, call, id)
	}
}

// recordRelease records that the alloc is being released. From then on the release continues until it is done. The
// transaction that deletes the alloc stores the response of the call that began the release. A later call may clear
// keep but never set it, so the order of calls does not matter.
func (a *Allocs) recordRelease(
	ctx context.Context, call registry.Call, id registry.AllocID, keep bool,
) (known bool, err error) {
	_, err = registry.Ensure(ctx, a.State, func(v registry.View) (registry.Change, error) {
		al, ok := v.Alloc(id)
		known = ok
		switch {
		case !ok:
			return registry.Change{Put: call.Answered(struct{}{})}, nil
		case al.State != registry.AllocReleasing || al.Release.ID == "" && call.ID != "":
			al.Release, al.Keep = call, keep
		case al.Keep && !keep && call.ID != "":
			al.Keep = false
		case !al.Lost:
			return registry.Change{}, nil
		}
		al.State, al.Waiting, al.Lost = registry.AllocReleasing, nil, false
		return registry.Change{Put: []registry.Record{al}}, nil
	})
	if err != nil {
		return false, fmt.Errorf("record the release of alloc %s: %w", id, err)
	}
	return known, nil
}

// startRelease starts a worker that releases the alloc, unless one runs already, and returns its work. It cancels a
// running Prepare. It returns nil if the workers have ended.
func (a *Allocs) startRelease(id registry.AllocID) *work {
	a.mu.Lock()
	defer a.mu.Unlock()
	earlier := a.busy[id]
	if earlier != nil && earlier.release {
		return earlier
	}
	aborted, abort := context.WithCancel(context.Background())
	w := &work{release: true, abort: abort, done: make(chan struct{})}
	if earlier != nil {
		earlier.stop()
	}
	if !a.workers.start(func(ctx context.Context) { a.runRelease(ctx, id, w, earlier, aborted) }) {
		return nil
	}
	a.busy[id] = w
	return w
}

// runRelease releases the alloc after an earlier Prepare has ended. The release ends early if aborted ends.
func (a *Allocs) runRelease(
	ctx context.Context, id registry.AllocID, w, earlier *work, aborted context.Context,
) {
	if earlier != nil {
		<-earlier.done
	}
	ctx, cancel := context.WithCancelCause(ctx)
	context.AfterFunc(aborted, func() { cancel(errForced) })
	w.kept = a.releaseAll(ctx, id)
	w.endCause = context.Cause(ctx)
	w.abort()
	a.endWork(id, w)
	if w.kept {
		a.resumeKept(id)
	}
}

// resumeKept starts another release after one that kept the alloc's record for the host, if the host has called Release
// meanwhile: that call may have found the earlier release still running, and started no other.
func (a *Allocs) resumeKept(id registry.AllocID) {
	var al registry.Alloc
	err := a.State.View(context.Background(), func(v registry.View) error { al, _ = v.Alloc(id); return nil })
	if err == nil && al.ID != "" && !al.Lost {
		a.startRelease(id)
	}
}

// releaseAll releases all volumes of the alloc at the same time, so that none delays another. Then it deletes the
// records of the alloc and of its inline volumes. It retries until that is done or ctx ends. kept means that the host
// has yet to release the alloc, so the alloc's record stays.
func (a *Allocs) releaseAll(ctx context.Context, id registry.AllocID) (kept bool) {
	a.releaseClaims(ctx, id)
	a.persistRelease(ctx, id, func(time.Duration) error { return a.controller.SettleClaims(ctx) })
	a.releaseClaims(ctx, id) // claims that were granted meanwhile
	a.persistRelease(ctx, id, func(time.Duration) (err error) {
		kept, err = a.endRelease(ctx, id)
		return err
	})
	return kept
}

// releaseClaims releases all claimed volumes of the alloc at the same time. It retries each until it is released or ctx
// ends.
func (a *Allocs) releaseClaims(ctx context.Context, id registry.AllocID) {
	var claims []registry.Claim
	var al registry.Alloc
	a.persistRelease(ctx, id, func(time.Duration) error {
		return a.State.View(ctx, func(v registry.View) error {
			claims = a.claimsToRelease(v, id)
			al, _ = v.Alloc(id)
			return nil
		})
	})
	var all sync.WaitGroup
	for _, c := range claims {
		all.Go(func() {
			a.persistRelease(ctx, id, func(pause time.Duration) error {
				return a.releaseClaim(ctx, c, al.Forced, pause)
			})
		})
	}
	all.Wait()
}

// claimsToRelease returns the claims of an alloc. While this node was lost, another node may have released a claim
// whose volume is still mounted here. claimsToRelease adds such claims from the refs.
func (a *Allocs) claimsToRelease(v registry.View, id registry.AllocID) []registry.Claim {
	claims := a.claimsOf(v, id)
	if !a.clustered() {
		return claims // no other node releases them
	}
	for _, r := range v.AllRefs() {
		if r.Alloc == id && !slices.ContainsFunc(claims,
			func(c registry.Claim) bool { return c.ClaimKey() == r.ClaimKey() }) {
			name := a.stager.stateOf(v, r.Volume).name()
			claims = append(claims, registry.Claim{Volume: r.Volume, Name: name, Alloc: id, Request: r.Request,
				Node: a.host.Node, Usage: r.Usage})
		}
	}
	return claims
}

// claimsOf returns the claims that an alloc of this node holds. In a cluster, another node may have an alloc with the
// same ID.
func (a *Allocs) claimsOf(v registry.View, id registry.AllocID) []registry.Claim {
	return slices.DeleteFunc(v.ClaimsOf(id), func(c registry.Claim) bool {
		return a.clustered() && c.Node != a.host.Node
	})
}

// endRelease deletes the records of an alloc whose volumes are released. kept means that the host has yet to release
// the alloc, so its record stays.
func (a *Allocs) endRelease(ctx context.Context, id registry.AllocID) (kept bool, err error) {
	for {
		var al registry.Alloc
		err := a.State.View(ctx, func(v registry.View) error { al, _ = v.Alloc(id); return nil })
		if al.Lost || err != nil {
			return al.Lost, err
		}
		if err := a.discard(ctx, al); err != nil {
			return false, err
		}
		changed := false // a call has changed meanwhile whether discard has to delete volumes
		_, err = registry.Ensure(ctx, a.State, func(v registry.View) (registry.Change, error) {
			now, known := v.Alloc(id)
			changed = known && (now.Keep != al.Keep || now.Release.ID != al.Release.ID)
			if !known || changed {
				return registry.Change{}, nil
			}
			return forgetChange(v, now), nil
		})
		if err != nil || !changed {
			return false, err
		}
	}
}

// discard deletes the volumes that create blocks with on_stop = "delete" have made for a released alloc. Only a Release
// without keep proves that the alloc has ended. A release by Sync keeps the volumes, because a host that lost its
// records may leave out a living alloc.
func (a *Allocs) discard(ctx context.Context, al registry.Alloc) error {
	for _, r := range a.requestsToDiscard(al) {
		name, err := volumeName(hooks.AllocGroup{Namespace: al.Namespace, Index: al.Index}, r)
		if err == nil {
			err = a.controller.Discard(ctx, name, originOf(al.Job, al.Group, r.Name), al.ID)
		}
		if err != nil {
			return fmt.Errorf("volume %s: %w", name, err)
		}
	}
	return nil
}

// requestsToDiscard returns the requests of the alloc whose volumes discard deletes.
func (a *Allocs) requestsToDiscard(al registry.Alloc) []hooks.VolumeRequest {
	if al.Release.ID == "" || al.Keep {
		return nil
	}
	spec, err := config.OpenGroup(al.Sealed)
	if err != nil {
		a.logger.Warn("volumes of a released alloc are kept: its job cannot be read", "alloc", al.ID, "error", err)
		return nil
	}
	return slices.DeleteFunc(spec.Volumes,
		func(r hooks.VolumeRequest) bool { return r.Create == nil || !r.Create.Delete })
}

// forgetChange returns the change that deletes the records of a released alloc and of its inline volumes, and stores
// the response of the call that began the release.
func forgetChange(v registry.View, al registry.Alloc) registry.Change {
	change := registry.Change{Put: al.Release.Answered(struct{}{}), Delete: []registry.Key{registry.AllocRecord(al.ID)}}
	for _, vol := range v.VolumesOf(al.ID) {
		change.Delete = append(change.Delete, vol.Key())
	}
	return change
}

// releaseClaim tries to release one claimed volume of an alloc, by force if an operator asked for that. pause is the
// time from a failure to the next try.
func (a *Allocs) releaseClaim(ctx context.Context, c registry.Claim, by registry.Forced, pause time.Duration) error {
	req := &request{Allocs: a, key: c.ClaimKey(), name: c.Name, node: c.Node, round: roundLimit}
	release := req.releaseRequest
	if by.By != "" {
		release = func(ctx context.Context) error { return req.forceRequest(ctx, by) }
	}
	err := release(ctx)
	if err == nil || ctx.Err() != nil {
		return err
	}
	req.recordFailure(ctx, err, a.Now().Add(pause))
	return fmt.Errorf("volume %s: %w", c.Name, err)
}

// persistRelease is persist for a step of the release of an alloc.
func (a *Allocs) persistRelease(ctx context.Context, id registry.AllocID, try func(pause time.Duration) error) {
	persist(ctx, a.logger.With("alloc", id), "an alloc cannot be released yet", try)
}

// persist calls try until it succeeds or ctx ends, and logs each failure as warning. try gets the length of the pause
// that follows a failure.
func persist(ctx context.Context, log hclog.Logger, warning string, try func(pause time.Duration) error) {
	for pause := retryFirst; ctx.Err() == nil; pause = min(pause*2, retryCeiling) {
		err := try(pause)
		if err == nil {
			return
		}
		if ctx.Err() == nil {
			log.Warn(warning, "again_in", pause.String(), "error", err)
		}
		intent.Sleep(ctx, pause)
	}
}

// answerReleased returns nil if the alloc has no record any more. It then stores the response of the call, if there is
// none yet.
func (a *Allocs) answerReleased(ctx context.Context, call registry.Call, id registry.AllocID) error {
	_, err := registry.Ensure(ctx, a.State, func(v registry.View) (registry.Change, error) {
		if al, known := v.Alloc(id); known {
			return registry.Change{}, registry.Errorf(registry.ErrUnavailable, "alloc %s is not released yet: %s", id,
				registry.Waits(allocStatus(v, al, v.ClaimsOf(id)).Waiting))
		}
		if _, answered := v.Operation(call.ID); answered {
			return registry.Change{}, nil
		}
		return registry.Change{Put: call.Answered(struct{}{})}, nil
	})
	return err
}

// releaseWaits returns an error that says what the alloc's release waits for, or nil.
func (a *Allocs) releaseWaits(ctx context.Context, id registry.AllocID) error {
	var waits string
	_ = a.State.View(context.WithoutCancel(ctx), func(v registry.View) error {
		if al, known := v.Alloc(id); known {
			waits = registry.Waits(allocStatus(v, al, v.ClaimsOf(id)).Waiting)
		}
		return nil
	})
	if waits == "" {
		return nil
	}
	return registry.Errorf(registry.ErrUnavailable, "%s", waits)
}

// use says how this node uses a volume, as one request sees it.
type use struct {
	own    bool // published, or maybe published, for the request
	others bool // published, or maybe published, for another request
	staged bool // staged, or maybe staged
	lost   bool // this node has lost the volume, and the host has not released the alloc since then
}

// volumeUse reads the use of the volume. A claim without a ref does not count, because its request stages the volume
// again.
func (req *request) volumeUse(ctx context.Context) (u use, err error) {
	err = req.State.View(ctx, func(v registry.View) error {
		_, u.own = v.Ref(req.key)
		u.others = slices.ContainsFunc(v.Refs(req.key.Volume), func(r registry.Ref) bool {
			return r.ClaimKey() != req.key
		})
		p, _ := v.Staging(req.key.Volume)
		u.staged = p.State != registry.MarkNone
		al, _ := v.Alloc(req.key.Alloc)
		u.lost = al.Lost
		return nil
	})
	return u, err
}

// releaseRequest unpublishes the request, unstages and detaches the volume after its last user, and releases the
// claim, in this order. It stops retrying after req.round, and unlocks the volume.
func (req *request) releaseRequest(ctx context.Context) error {
	if released, err := req.releaseSharedClaim(ctx); err != nil || released {
		return err
	}
	unlock, err := req.lock(ctx, fmt.Sprintf("the release of alloc %s", req.key.Alloc))
	if err != nil {
		return err
	}
	defer unlock()
	req.by.RetryUntil = time.Now().Add(req.round)
	u, err := req.volumeUse(ctx)
	if err != nil {
		return err
	}
	if u.own || u.staged && !u.others {
		if _, err := req.awaitNode(ctx, req.key.Volume.Plugin); err != nil {
			return err
		}
	}
	if err := req.settleForRelease(ctx, u); err != nil {
		return err
	}
	if err := req.reportExpansion(ctx); err != nil {
		return err
	}
	req.step = registry.StepUnpublish
	if u.own && u.lost {
		if err := req.stager.CheckUnused(ctx, req.key); err != nil {
			return err
		}
	}
	err = req.stager.Unpublish(ctx, req.by, req.key, !u.others, req.unclaimChange, req.forgetAllocChange)
	if err != nil {
		return err
	}
	if !u.others {
		if err := req.detach(ctx, req.unclaimChange, req.forgetAllocChange); err != nil {
			return err
		}
	}
	return req.unclaim(ctx)
}

// unclaim releases the claim. It fails while the volume is mounted for the claim on this node.
func (req *request) unclaim(ctx context.Context) error {
	req.step = registry.StepClaim
	// the caller holds the volume's lock, which other releases need even while etcd does not answer
	ctx, cancel := context.WithTimeout(ctx, roundLimit)
	defer cancel()
	_, err := registry.Ensure(ctx, req.State, req.unclaimChange)
	return err
}

// unclaimChange returns the change that unclaim commits.
func (req *request) unclaimChange(v registry.View) (registry.Change, error) {
	if err := req.stager.CheckUnmounted(v, req.key); err != nil {
		return registry.Change{}, err
	}
	return req.controller.UnclaimChange(v, req.key, true)
}

// forgetAllocChange returns the forgetChange of the alloc, which saves the commit of endRelease. The change is empty
// unless this was the alloc's last claim and no volume is to be discarded. In a cluster it is always empty, because a
// claim may still be granted (SettleClaims).
func (req *request) forgetAllocChange(v registry.View) (registry.Change, error) {
	al, known := v.Alloc(req.key.Alloc)
	if req.clustered() || !known || al.Lost || al.State != registry.AllocReleasing || len(req.claimsOf(v, al.ID)) > 0 ||
		len(req.requestsToDiscard(al)) > 0 {
		return registry.Change{}, nil
	}
	return forgetChange(v, al), nil
}

// reportExpansion records in the volume how far this node has come with its expansion, because the node's own record is
// deleted with the last use of the volume. An earlier process may have died before it reported the progress.
func (req *request) reportExpansion(ctx context.Context) error {
	var p registry.Staging
	err := req.State.View(ctx, func(v registry.View) error { p, _ = v.Staging(req.key.Volume); return nil })
	if err != nil || p.Expanded == (registry.NodeExpansion{}) {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, req.round/2)
	defer cancel()
	err = req.controller.NodeExpanded(limited, req.key.Volume, p.Expanded)
	if err != nil && ctx.Err() == nil && limited.Err() != nil {
		return nil // etcd does not answer: the next mount asks the plugin again
	}
	return err
}

// releaseSharedClaim releases the claim without the volume's lock, if nothing was published for the request and another
// request on this node claims the volume. The other request then unstages and detaches it.
func (req *request) releaseSharedClaim(ctx context.Context) (done bool, err error) {
	own, others := false, false
	err = req.State.View(ctx, func(v registry.View) error {
		_, own = v.Ref(req.key)
		for _, c := range v.Claims(req.key.Volume) {
			others = others || c.ClaimKey() != req.key && c.Node == req.host.Node
		}
		return nil
	})
	if err != nil || own || !others {
		return false, err
	}
	req.step = registry.StepClaim
	_, err = req.controller.Unclaim(ctx, req.key, false)
	if errors.Is(err, registry.ErrConflict) {
		return false, nil // the other claim was released first, so this claim is the last one
	}
	return err == nil, err
}

// undoes reports whether the release undoes the open call, and may therefore follow it. A release undoes the calls of
// its own request. The release of the last user also undoes a stage or an attach. An unstage must not follow a detach:
// other nodes may have begun a detach while this node was lost.
func (req *request) undoes(open registry.Intent, u use) bool {
	if open.Alloc != "" {
		return req.madeOpenCall(open)
	}
	return !u.own && !u.others && !(u.staged && open.RPC == registry.ControllerUnpublishRPC)
}

// unstage unstages the volume, unless it is still published.
func (req *request) unstage(ctx context.Context) error {
	req.step = registry.StepUnstage
	return req.stager.Unstage(ctx, req.by, req.key.Volume)
}

// detach waits until the plugin can detach the volume from the node, and detaches it. then is committed with the
// detach.
func (req *request) detach(ctx context.Context, then ...registry.Decision) error {
	if err := req.controller.AwaitDetach(ctx, req.by, req.key.Volume, req.node,
		req.recordControllerWait(ctx)); err != nil {
		return err
	}
	req.clearWait(ctx)
	req.step = registry.StepDetach
	return req.controller.Detach(ctx, req.by, req.key.Volume, req.node, then...)
}
