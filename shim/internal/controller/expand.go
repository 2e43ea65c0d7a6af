package controller

import (
	"context"
	"fmt"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Expand makes the volume larger. It sends ControllerExpandVolume, and the commit of the answer records whether the
// node has to expand too. If this node uses the volume, it expands now; otherwise it expands at the next use. Some
// plugins expand on the node alone. If the volume is large enough, Expand sends nothing.
//
// An earlier expansion of unknown outcome is repeated first. Some plugins expand only unused volumes (VolumeExpansion
// OFFLINE without ONLINE). For these, ErrConflict names the users while the volume is attached, staged or published.
func (m *Controller) Expand(
	ctx context.Context, call registry.Call, name registry.VolumeName, want registry.CapacityRange,
) (registry.Volume, error) {
	if err := checkRange(want); err != nil {
		return registry.Volume{}, err
	}
	v, err := m.expandable(ctx, name)
	if err != nil {
		return v, err
	}
	if done, err := m.largeEnough(ctx, v, want); done || err != nil {
		return v, err
	}
	mode, err := m.expandModeOf(ctx, v)
	if err != nil {
		return v, fmt.Errorf("expand volume %s: %w", name, err)
	}
	if err := m.lockAndExpand(ctx, intent.Caller{Call: call}, name, want, mode); err != nil {
		m.Wake()
		return v, fmt.Errorf("expand volume %s: %w", name, err)
	}
	return m.volume(ctx, name)
}

func checkRange(want registry.CapacityRange) error {
	switch {
	case want.Required <= 0:
		return registry.Invalid("%d bytes is not a valid size for an expansion", want.Required)
	case want.Limit < 0 || want.Limit > 0 && want.Limit < want.Required:
		return registry.Invalid("the limit of %d bytes is below the size of %d bytes", want.Limit, want.Required)
	}
	return nil
}

// expandable returns the volume if it can be expanded.
func (m *Controller) expandable(ctx context.Context, name registry.VolumeName) (registry.Volume, error) {
	return m.confirmedVolume(ctx, name, func(v registry.Volume) error {
		switch {
		case v.Ephemeral:
			return registry.Errorf(registry.ErrUnsupported,
				"volume %s is an inline volume of alloc %s and cannot be expanded", name, v.Owner)
		case v.State != registry.VolumeReady:
			return registry.Errorf(registry.ErrConflict, "volume %s is %s; it must be ready to be expanded", name,
				v.State)
		}
		return nil
	})
}

// largeEnough reports whether the volume already has the requested size and this node has nothing left to expand. It
// returns an error if the volume would have to shrink.
func (m *Controller) largeEnough(
	ctx context.Context, v registry.Volume, want registry.CapacityRange,
) (done bool, err error) {
	e, smallest := v.Expansion, v.Capacity
	if asked := max(e.Done, v.CapacityMin); asked > 0 {
		smallest = min(smallest, asked) // plugins round up, so an earlier requested size is no request to shrink
	}
	larger := want.Required > v.Capacity && want.Required > e.Node.Required // than it is, and will be on the node
	switch {
	case want.Required < smallest:
		return false, registry.Invalid("volume %s has %d bytes and cannot be made smaller: %d bytes were requested",
			v.VolumeName(), v.Capacity, want.Required)
	case want.Limit > 0 && want.Limit < v.Capacity:
		return false, registry.Invalid(
			"volume %s has %d bytes and cannot be made smaller: the limit is %d bytes",
			v.VolumeName(), v.Capacity, want.Limit)
	case e.Open(), larger, v.ExpandsOnNodeOnly() && e.Node != want:
		return false, nil
	}
	grows, err := m.node.Grows(ctx, v)
	if err != nil || grows {
		return false, err
	}
	n, _, err := m.node.Expansion(ctx, v.VolumeKey())
	// a refusal is recorded only while the volume is mounted here
	return !n.Retriable() || !e.OnNode(n, true).Pending(), err
}

// expandMode says whether the controller or only the node expands volumes, and whether volumes in use are expanded.
type expandMode struct {
	controller bool // false: the node alone expands
	online     bool // volumes in use are expanded too
}

// expandsInUse reports whether Holdfast may ask the plugin to expand a volume in use. A plugin that declares no mode
// decides itself.
func expandsInUse(f registry.Fingerprint) bool {
	return f.Has(registry.ExpandsOnline) || !f.Has(registry.ExpandsOffline)
}

// expandModeOf waits for the plugin's controller, or its node plugin if it has no controller, and returns how it
// expands volumes. It holds no lock while it waits.
func (m *Controller) expandModeOf(ctx context.Context, v registry.Volume) (expandMode, error) {
	inst, err := m.awaitController(ctx, v.Plugin, v.Created)
	if err != nil {
		return expandMode{}, err
	}
	if inst.Fingerprint.Has(registry.ControllerExpand) {
		return expandMode{controller: true, online: expandsInUse(inst.Fingerprint)}, nil
	}
	if inst.Role == registry.RoleController {
		if inst, err = m.awaitNode(ctx, v.Plugin); err != nil {
			return expandMode{}, err
		}
	}
	if !inst.Fingerprint.Has(registry.NodeExpand) {
		return expandMode{}, registry.Errorf(registry.ErrUnsupported,
			"plugin %s cannot expand volumes (it lacks %s and %s)",
			v.Plugin, registry.ControllerExpand, registry.NodeExpand)
	}
	return expandMode{online: expandsInUse(inst.Fingerprint)}, nil
}

// lockAndExpand takes the locks of the volume's name and key, and expands the volume.
func (m *Controller) lockAndExpand(
	ctx context.Context, by intent.Caller, name registry.VolumeName, want registry.CapacityRange, mode expandMode,
) error {
	_, unlock, err := m.lockVolume(ctx, name, "its expansion")
	if err != nil {
		return err
	}
	defer unlock()
	v, err := m.expandable(ctx, name) // an alloc may have finished an open expansion during the wait for the lock
	if err != nil {
		return err
	}
	if v, err = m.settleModification(ctx, v); err != nil {
		return err
	}
	v, triedOnNode, err := m.finishEarlierExpansion(ctx, by, v, want, mode)
	if err != nil {
		return err
	}
	done, err := m.largeEnough(ctx, v, want)
	if err != nil || done {
		return err
	}
	switch {
	case !v.Expansion.Open() && v.Capacity >= want.Required: // a larger size may be pending on the node
		err = m.cancelNodeExpansion(ctx, v)
	case mode.controller:
		err = m.expandController(ctx, by, v, want, mode, intent.PolicyOf(registry.ControllerExpandRPC))
	case v.Expansion.Node.Required < want.Required || v.ExpandsOnNodeOnly() && v.Expansion.Node != want:
		err = m.recordNodeExpansion(ctx, v, want, mode)
	}
	if err != nil {
		return err
	}
	if err := m.growOnNode(ctx, by, v.VolumeKey(), !triedOnNode); err != nil {
		return err
	}
	return m.checkNotRefused(ctx, name, want)
}

// settleModification repeats an open ControllerModifyVolume until its outcome is certain, and returns the volume as it
// is then.
func (m *Controller) settleModification(ctx context.Context, v registry.Volume) (registry.Volume, error) {
	open, err := m.openRPC(ctx, v)
	if err != nil || open != registry.ControllerModifyRPC {
		return v, err
	}
	if err := m.settleAlteration(ctx, intent.Caller{}, v.VolumeKey(), intent.PolicyOf); err != nil {
		return v, fmt.Errorf("the outcome of a modification must be known first: %w", err)
	}
	return m.expandable(ctx, v.VolumeName())
}

// finishEarlierExpansion finishes an earlier, different expansion that is still open, at the controller and on the
// node. An inconclusive answer of the node must be resolved first, while the volume is still mounted in the same way.
// tried reports whether the node has already tried the pending expansion.
func (m *Controller) finishEarlierExpansion(
	ctx context.Context, by intent.Caller, v registry.Volume, want registry.CapacityRange, mode expandMode,
) (now registry.Volume, tried bool, err error) {
	open, err := m.openRPC(ctx, v)
	if err != nil {
		return v, false, err
	}
	if open != registry.ControllerExpandRPC { // an open call of the controller is settled before the node's part
		if v, tried, err = m.finishOnNode(ctx, by, v, want); err != nil {
			return v, tried, err
		}
	}
	if e := v.Expansion; !e.Open() || e.Asked == want || !mode.controller {
		return v, tried, nil
	}
	p := intent.PolicyOf(registry.ControllerExpandRPC)
	if err := m.expandController(ctx, by, v, v.Expansion.Asked, mode, p); err != nil {
		return v, tried, fmt.Errorf("the outcome of an earlier expansion to %d bytes must be known first: %w",
			v.Expansion.Asked.Required, err)
	}
	if v, err = m.volume(ctx, v.VolumeName()); err != nil {
		return v, tried, err
	}
	return m.finishOnNode(ctx, by, v, want)
}

// openRPC returns the RPC that is open for the volume, at its controller or on this node. It returns an empty RPC if
// none is open.
func (m *Controller) openRPC(ctx context.Context, v registry.Volume) (rpc registry.RPC, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		open, _ := view.Intent(v.VolumeKey())
		rpc = open.RPC
		return nil
	})
	if err == nil && rpc == "" {
		_, rpc, err = m.node.Expansion(ctx, v.VolumeKey())
	}
	return rpc, err
}

// checkOffline returns an error if the plugin expands only unused volumes and this volume is in use. A claim of this
// node alone does not count as a use. One of another node does, as only that node knows what it has mounted.
func (m *Controller) checkOffline(view registry.View, v registry.Volume, local []string, mode expandMode) error {
	claimedElsewhere := slices.ContainsFunc(view.Claims(v.VolumeKey()), func(c registry.Claim) bool {
		return c.Node != m.node.Name()
	})
	inUse := claimedElsewhere || len(view.Attachments(v.VolumeKey())) > 0 || len(local) > 0
	if mode.online || !inUse {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "%w; "+
		"plugin %s expands only unused volumes (it declares %s and not %s): "+
		"stop the jobs of these allocs, expand the volume, and run the jobs again",
		checkUnused(view, v, local, "expanded now"), v.Plugin, registry.ExpandsOffline, registry.ExpandsOnline)
}

// expandController sends ControllerExpandVolume until its outcome is certain or its policy gives up.
func (m *Controller) expandController(
	ctx context.Context, by intent.Caller, v registry.Volume, want registry.CapacityRange, mode expandMode,
	p intent.Policy,
) error {
	request := csi.ExpandRequest{
		VolumeID: v.External, Range: want, Private: private(v),
	}
	local, err := m.uses(ctx, v)
	if err != nil {
		return err
	}
	before := v.Expansion
	request.Usage = before.Usage
	if !before.Open() {
		if request.Usage, err = m.usage(ctx, v); err != nil {
			return err
		}
	}
	vague := before.Open() // an earlier call may have had an effect
	var answer csi.Expanded
	open := newIntent(registry.ControllerExpandRPC, by.Call, v, intent.Hash(registry.ControllerExpandRPC, request))
	return m.sendTo(ctx, by, v.VolumeSpec, &request.Secrets, intent.Call{
		Intent: open, Policy: p,
		Before: func(view registry.View) (registry.Change, error) {
			return m.expandChange(view, v, local, request, mode)
		},
		Done: func(view registry.View) registry.Change { return m.expandedChange(view, v.VolumeName(), want, answer) },
		Failed: func(view registry.View, err *registry.CallError, clean bool) registry.Change {
			v, known := view.Volume(v.VolumeName())
			if !known {
				return registry.Change{}
			}
			switch {
			case err.Code == "OK": // the answer has another size than requested
				v.Expansion = before.Closed()
				v = m.resized(v, answer)
			case vague || !clean && intent.RejectsCall(err.Code):
				v.Expansion = v.Expansion.WithError(err)
			default:
				v.Expansion = before.Closed()
			}
			return registry.Change{Put: []registry.Record{v}}
		},
	}, func(ctx context.Context, at registry.InstanceKey) (err error) {
		if answer, err = m.driver.Expand(ctx, at, request); err == nil {
			err = checkExpanded(answer, at, want)
		}
		vague = isVague(vague, err)
		return err
	})
}

// usage returns the usage of the volume's attachment, or otherwise the only usage of its spec. If the spec has several
// usages, it returns zero: a plugin that gets one of them may skip what the other usages need.
func (m *Controller) usage(ctx context.Context, v registry.Volume) (u registry.Usage, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		if at := view.Attachments(v.VolumeKey()); len(at) > 0 {
			u = at[0].Usage
		} else {
			u = usageOf(v.VolumeSpec)
		}
		return nil
	})
	return u, err
}

// usageOf returns the only usage of the spec; zero: it has none or several.
func usageOf(s registry.VolumeSpec) (u registry.Usage) {
	different := slices.Compact(slices.Clone(s.Capabilities))
	if len(different) != 1 {
		return u
	}
	u.Access, u.Attachment = different[0].Access, different[0].Attachment
	if u.Attachment == registry.FileSystem {
		u.FSType, u.MountFlags, u.MountGroup = s.FSType, s.MountFlags, s.MountGroup
	}
	return u
}

// expandChange returns the change that records the requested size. It returns an error if the volume is in use and its
// plugin expands only unused volumes.
func (m *Controller) expandChange(
	view registry.View, v registry.Volume, local []string, r csi.ExpandRequest, mode expandMode,
) (registry.Change, error) {
	now, found := view.Volume(v.VolumeName())
	if !found {
		return registry.Change{}, errUnknown(v.VolumeName())
	}
	if err := m.checkOffline(view, now, local, mode); err != nil {
		return registry.Change{}, err
	}
	if !now.Expansion.Open() {
		now.Expansion.Since = m.Now()
	}
	now.Expansion.Asked, now.Expansion.Usage = r.Range, r.Usage
	return registry.Change{Put: []registry.Record{now}}, nil
}

// expandedChange returns the change that stores the controller's result and the pending work of the node.
func (m *Controller) expandedChange(
	view registry.View, name registry.VolumeName, want registry.CapacityRange, answer csi.Expanded,
) registry.Change {
	v, known := view.Volume(name)
	if !known {
		return registry.Change{}
	}
	v.Expansion = v.Expansion.Closed().WithoutPending()
	v.Expansion.Done = max(want.Required, v.Expansion.Done)
	v.Expansion.Since = time.Time{}
	v = m.resized(v, answer)
	detail := fmt.Sprintf("%d bytes", v.Capacity)
	if answer.NodeExpansionRequired {
		detail += "; expansion pending on the node"
	}
	return registry.Change{Put: []registry.Record{v},
		Events: []registry.Event{m.event(registry.EventVolumeExpanded, v, detail)}}
}

// resized returns v with the size and the pending work of the node from the controller's answer.
func (m *Controller) resized(v registry.Volume, answer csi.Expanded) registry.Volume {
	v.Capacity = max(v.Capacity, answer.Capacity)
	if answer.NodeExpansionRequired {
		v.Expansion = v.Expansion.WithoutPending()
		v.Expansion.Node, v.Expansion.Since = registry.CapacityRange{Required: v.Capacity}, m.Now()
	}
	return v
}

// checkExpanded returns an error if the volume does not have the requested size.
func checkExpanded(e csi.Expanded, at registry.InstanceKey, want registry.CapacityRange) error {
	switch {
	case e.Capacity < want.Required:
		return badResponse(registry.ControllerExpandRPC, at, registry.ErrInternal,
			"the plugin reports a volume of %d bytes; %d were requested", e.Capacity, want.Required)
	case want.Limit > 0 && e.Capacity > want.Limit:
		return badResponse(registry.ControllerExpandRPC, at, registry.ErrInternal,
			"the plugin reports a volume of %d bytes; at most %d were requested", e.Capacity, want.Limit)
	}
	return nil
}
