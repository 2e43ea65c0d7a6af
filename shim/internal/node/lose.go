package node

import (
	"context"
	"fmt"

	"holdfast/hooks"
	"holdfast/registry"
)

// Lose begins to release all volumes of this node, after the node was declared lost. An event tells the host which
// allocs have lost their volumes. The records of these allocs say so too, until the host releases the allocs. An alloc
// that is being released already gets no event. A claim of an alloc without a record comes from an earlier installation
// of the node: the alloc gets a record, which is deleted as soon as the volumes are released.
func (a *Allocs) Lose(ctx context.Context, why string) error {
	var allocs []registry.AllocID
	_, err := registry.Ensure(ctx, a.State, func(v registry.View) (change registry.Change, err error) {
		allocs = nil
		for id := range a.holders(v) {
			allocs = append(allocs, id)
			al, known := v.Alloc(id)
			if known && al.State == registry.AllocReleasing {
				continue
			}
			if !known {
				al = registry.Alloc{ID: id, Node: a.host.Node, Since: a.Now()}
			}
			al.State, al.Waiting, al.Lost = registry.AllocReleasing, nil, known
			change.Put = append(change.Put, al)
			change.Events = append(change.Events, registry.Event{
				Kind: registry.EventVolumesLost, Alloc: id, Detail: why, Node: a.host.Node, At: a.Now()})
		}
		return change, nil
	})
	if err != nil {
		return fmt.Errorf("record that allocs have lost their volumes: %w", err)
	}
	for _, id := range allocs {
		a.stopPrepare(id)
		a.startRelease(id)
	}
	return a.TakeDownUnclaimed(ctx)
}

// holders returns the allocs with claims or mounts of this node.
func (a *Allocs) holders(v registry.View) map[registry.AllocID]bool {
	ids := map[registry.AllocID]bool{}
	for _, c := range v.AllClaims() {
		if c.Node == a.host.Node {
			ids[c.Alloc] = true
		}
	}
	for _, r := range v.AllRefs() {
		ids[r.Alloc] = true
	}
	return ids
}

// awaitAdmitted waits until volumes may be claimed and mounted on this node. It does not wait if a volume is already
// published for the request.
func (req *request) awaitAdmitted(ctx context.Context, g hooks.AllocGroup) error {
	if !req.clustered() {
		return nil
	}
	var published bool
	err := req.State.View(ctx, func(v registry.View) error {
		for _, r := range v.AllRefs() {
			published = published || r.Alloc == req.key.Alloc && r.Request == req.key.Request &&
				r.Publish == registry.MarkDone
		}
		return nil
	})
	if err != nil || published {
		return err
	}
	ctx, cancel := req.waitContext(ctx)
	defer cancel()
	req.step = registry.StepClaim
	endLast := func() {} // ends the wait for the last reason
	defer func() { endLast() }()
	return req.AwaitAdmitted(ctx, func(why string) {
		endLast()
		endLast = func() {}
		if req.admit(ctx, g) == nil {
			endLast = req.recordLongWait(ctx, registry.Wait{Detail: why})
		}
	})
}
