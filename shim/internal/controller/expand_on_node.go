package controller

import (
	"context"
	"fmt"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// finishOnNode does the pending expansion on the node before another expansion starts. tried reports that the node need
// not be asked again: it was asked just now, or has nothing to expand. If the outcome of the pending expansion stays
// unknown, and want is another one, finishOnNode returns an ErrConflict.
func (m *Controller) finishOnNode(
	ctx context.Context, by intent.Caller, v registry.Volume, want registry.CapacityRange,
) (now registry.Volume, tried bool, err error) {
	before, _, err := m.node.Expansion(ctx, v.VolumeKey())
	if err != nil {
		return v, false, err
	}
	wasVague := before.Refused != "" && intent.Inconclusive(before.Refused)
	if err := m.growOnNode(ctx, by, v.VolumeKey(), wasVague); err != nil {
		return v, false, err
	}
	if now, err = m.volume(ctx, v.VolumeName()); err != nil {
		return v, false, err
	}
	n, _, err := m.node.Expansion(ctx, v.VolumeKey())
	if err != nil {
		return v, false, err
	}
	wantsMore := now.Capacity < want.Required
	if now.ExpandsOnNodeOnly() {
		wantsMore = now.Expansion.Node != want
	}
	// n ends with the current mount: once no job uses the volume, another expansion can start
	if wantsMore && n.Refused != "" && intent.Inconclusive(n.Refused) {
		return now, false, registry.Errorf(registry.ErrConflict,
			"the outcome of the previous expansion on the node is unknown (%s: %s); "+
				"stop the jobs that use the volume, then expand it", registry.NodeExpandRPC,
			n.Refused)
	}
	return now, wasVague || before.Refused == "", nil
}

// growOnNode does the pending expansion on the node if possible, and records the result. retryRefused is as in
// Node.Grow.
func (m *Controller) growOnNode(
	ctx context.Context, by intent.Caller, key registry.VolumeKey, retryRefused bool,
) error {
	done, err := m.node.Grow(ctx, by, key, retryRefused)
	if err != nil {
		return err
	}
	return m.NodeExpanded(ctx, key, done)
}

// NodeExpanded records in the volume the result of its expansion on a node. It is idempotent, because the node has
// stored the result already and may report it again.
func (m *Controller) NodeExpanded(ctx context.Context, key registry.VolumeKey, n registry.NodeExpansion) error {
	_, err := registry.Ensure(ctx, m.State, func(view registry.View) (registry.Change, error) {
		v, known := view.VolumeByKey(key)
		if !known || v.Ephemeral || !n.Answers(v) {
			return registry.Change{}, nil
		}
		e := v.Expansion
		switch {
		case n.Done < e.Node.Required: // the size is impossible: do not retry
			v.Expansion = e.WithoutPending()
			v.Expansion.RPC, v.Expansion.Code, v.Expansion.Detail = n.RPC, n.Code, n.Detail
		case v.ExpandsOnNodeOnly():
			v.Capacity, e.Done = n.Done, max(e.Done, e.Node.Required)
			v.Expansion = e.Finished()
		default:
			v.Expansion = e.Finished()
		}
		return registry.Change{Put: []registry.Record{v}}, nil
	})
	return err
}

// recordNodeExpansion records that the node is to expand the volume to want, in place of an earlier size that is still
// pending there. It is for a plugin without ControllerExpandVolume.
func (m *Controller) recordNodeExpansion(
	ctx context.Context, v registry.Volume, want registry.CapacityRange, mode expandMode,
) error {
	uses, err := m.uses(ctx, v)
	if err != nil {
		return err
	}
	_, err = m.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		now, found := view.Volume(v.VolumeName())
		if !found {
			return registry.Change{}, errUnknown(v.VolumeName())
		}
		if err := m.checkOffline(view, now, uses, mode); err != nil {
			return registry.Change{}, err
		}
		now.Expansion = now.Expansion.WithoutPending()
		now.Expansion.Node, now.Expansion.Since = want, m.Now()
		return registry.Change{
			Put: []registry.Record{now},
			Events: []registry.Event{m.event(registry.EventVolumeExpanded, now,
				fmt.Sprintf("to %d bytes; pending on the node, the plugin expands there alone", want.Required))},
		}, nil
	})
	return err
}

// cancelNodeExpansion cancels a larger size that is pending on the node. The caller has found that the volume is large
// enough for a later request.
func (m *Controller) cancelNodeExpansion(ctx context.Context, v registry.Volume) error {
	if !v.ExpandsOnNodeOnly() {
		return nil
	}
	_, err := m.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		now, found := view.Volume(v.VolumeName())
		if !found || !now.ExpandsOnNodeOnly() {
			return registry.Change{}, nil
		}
		now.Expansion = now.Expansion.WithoutPending()
		return registry.Change{Put: []registry.Record{now}}, nil
	})
	return err
}

// checkNotRefused returns an error if the node plugin has certainly refused the size, so that Holdfast does not retry
// it.
func (m *Controller) checkNotRefused(ctx context.Context, name registry.VolumeName, want registry.CapacityRange) error {
	v, err := m.volume(ctx, name)
	if e := v.Expansion; err == nil && v.Capacity < want.Required && !e.Pending() && !e.Open() &&
		e.RPC == registry.NodeExpandRPC {
		err = registry.Invalid("%s: %s: %s; %s", e.RPC, e.Code, e.Detail, intent.Advice(e.RPC, e.Code))
	}
	return err
}
