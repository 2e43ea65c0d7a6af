package endpoint

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// recordUse records the use that the call begins. It refuses a call that would change something registered in Holdfast.
// isNew reports whether the use is new, so that no earlier call can have begun it. at is the instance that gets the
// call. If the shim releases the state during the commit, the commit may still take the rest of the drain time, so that
// Pass removes the use of a call that is not sent. A commit that takes longer may leave the use: the next shim then
// takes its call for sent.
func (e *Endpoint) recordUse(ctx context.Context, c call, at registry.Instance) (isNew bool, err error) {
	record := func(view registry.View) (change registry.Change, err error) {
		if err := c.checkRegistered(view); err != nil {
			return change, err
		}
		use, ok := c.use(e.Node, e.Now())
		if !ok {
			return change, nil
		}
		isNew = !slices.ContainsFunc(view.EndpointUses(use.Volume), func(other registry.EndpointUse) bool {
			return other.Key() == use.Key()
		})
		if isNew {
			use.Server = at.TaskKey()
			change.Put = []registry.Record{use}
		}
		return change, nil
	}
	err = e.Once(ctx, registry.ExecutorKey{}, Limit(c.full), func(ctx context.Context) error {
		_, err := registry.Ensure(ctx, e.State, record)
		return err
	})
	return isNew, err
}

// checkRegistered returns an ErrConflict if Holdfast has a record of a volume that the call would change, or of a
// snapshot that the call would delete.
func (c call) checkRegistered(view registry.View) error {
	if c.effect() == effectSnapshot {
		ids := append(csi.Texts(c.request, "snapshot_ids"), text(c.request, "snapshot_id"),
			text(c.request, "group_snapshot_id"))
		for _, snap := range append(view.Snapshots(), view.GroupSnapshots()...) {
			if snap.Plugin == c.plugin && snap.External != "" && slices.Contains(ids, string(snap.External)) {
				return registry.Errorf(registry.ErrConflict, "snapshot %q of plugin %s is snapshot %s in Holdfast, "+
					"which alone deletes it; use holdfast snapshot or group-snapshot, or deregister it there first",
					snap.External, c.plugin, snap.SnapshotName())
			}
		}
		return nil
	}
	for _, key := range c.volumes {
		if v, found := view.VolumeByKey(key); found {
			return registry.Errorf(registry.ErrConflict, "volume %q of plugin %s is registered in Holdfast as %s, "+
				"which alone changes it; use holdfast volume, or deregister it there first",
				key.External, key.Plugin, v.VolumeName())
		}
	}
	return nil
}

// use returns the use that the call begins, if any. A call that changes or deletes a volume counts as a use until its
// outcome is certain.
func (c call) use(node registry.NodeName, now time.Time) (use registry.EndpointUse, ok bool) {
	target := text(c.request, targets[c.rpc])
	switch c.effect() {
	case effectBegin:
		ok = target != ""
	case effectChange, effectDelete:
		ok = true
	}
	if !ok || len(c.volumes) == 0 {
		return use, false
	}
	return registry.EndpointUse{Volume: c.volumes[0], Call: c.rpc, Target: target, Node: node, Since: now}, true
}

// ends reports whether the success of the call at a node ends a recorded use of one of its volumes.
func (c call) ends(use registry.EndpointUse, node registry.NodeName) bool {
	switch c.effect() {
	case effectDelete:
		return true
	case effectChange:
		own, _ := c.use(node, time.Time{})
		return use.Key() == own.Key()
	case effectEnd:
		began := beginningOf[c.rpc]
		target := text(c.request, targets[began])
		if began == registry.ControllerPublishRPC { // a call without a node detaches the volume from every node
			return use.Call == began && (use.Target == target || target == "")
		}
		return use.Call == began && use.Target == target && use.Node == node
	}
	return false
}

// updateUses updates the records of uses after a call. If the call has begun a use on this node whose mount a process
// serves, it records the task of that process. After a success it removes the uses that the call has ended. If the call
// has certainly had no effect, it removes the new use. If the outcome is unknown, the use stays until the same call
// succeeds, or a call that ends the use.
func (e *Endpoint) updateUses(ctx context.Context, c call, isNew bool, o outcome) error {
	undone := isNew && o.hadNoEffect()
	if o.err != nil && !undone {
		return nil
	}
	own, _ := c.use(e.Node, time.Time{})
	begun := o.err == nil && c.effect() == effectBegin
	if begun && intent.RoleOf(own.Call) == registry.RoleNode && e.Served(o.at.Volumes.OnHost(own.Target)) {
		own.Server = o.at.TaskKey()
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), intent.Grace)
	defer cancel()
	return registry.EnsureAll(ctx, e.State, func(view registry.View) (change registry.Change, err error) {
		for _, key := range c.volumes {
			for _, use := range view.EndpointUses(key) {
				isOwn := use.Key() == own.Key()
				switch {
				case len(change.Delete) == registry.Batch: // the next commit removes the rest
				case undone && isOwn, o.err == nil && c.ends(use, e.Node):
					change.Delete = append(change.Delete, use.Key())
				case begun && isOwn && use.Server != own.Server:
					use.Server = own.Server
					change.Put = append(change.Put, use)
				}
			}
		}
		return change, nil
	})
}

// Forget removes the records of a volume's uses by CSI clients that are gone for good. It sends no call, so attachments
// and mounts stay. f.Confirm is the ID of the volume; without it, ErrDenied says what may be lost. ErrNotFound: no
// client uses the volume.
func (e *Endpoint) Forget(ctx context.Context, key registry.VolumeKey, f registry.Force) error {
	unlock, err := e.Locks.Lock(ctx, key, "the removal of uses of CSI clients")
	if err != nil {
		return err
	}
	defer unlock()
	found := false
	return registry.EnsureAll(ctx, e.State, func(view registry.View) (change registry.Change, err error) {
		var texts []string
		uses := view.EndpointUses(key)
		for _, use := range uses[:min(len(uses), registry.Batch)] {
			change.Delete = append(change.Delete, use.Key())
			texts = append(texts, use.String())
		}
		found = found || len(uses) > 0
		switch {
		case len(uses) == 0 && found: // all are removed
			return registry.Change{}, nil
		case len(uses) == 0:
			return registry.Change{}, registry.Errorf(registry.ErrNotFound,
				"no client of the CSI endpoint uses volume %q of plugin %s; for a list, run: holdfast plugin uses %s",
				key.External, key.Plugin, key.Plugin)
		case f.Confirm != string(key.External):
			return registry.Change{}, registry.Errorf(registry.ErrDenied, "a client of the CSI endpoint uses volume "+
				"%q (%s): without that record Holdfast may use the volume at the same time, and data may be lost; "+
				"make sure that nothing uses it, and add --confirm with the ID of the volume", key.External,
				strings.Join(texts, ", "))
		}
		change.Events = []registry.Event{{
			Kind: registry.EventForced, Plugin: key.Plugin, External: key.External, At: e.Now(),
			Detail: fmt.Sprintf("use by a client of the CSI endpoint (%s), by %s", strings.Join(texts, ", "), f.By),
		}}
		return change, nil
	})
}
