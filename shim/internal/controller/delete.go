package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Delete deletes a volume that Holdfast created, and then removes its record. If the volume is in use, Delete returns
// an ErrConflict and sends nothing. Once the deletion has begun, the volume cannot be claimed.
func (m *Controller) Delete(ctx context.Context, call registry.Call, name registry.VolumeName) error {
	unlock, err := m.Locks.Lock(ctx, name, "its deletion")
	if err != nil {
		return err
	}
	defer unlock()
	v, err := m.deletable(ctx, name)
	if err != nil {
		return err
	}
	if v.State == registry.VolumeCreating || v.State == registry.VolumeUncertain {
		v, err = m.settleCreation(ctx, call, v, attempt{policy: intent.PolicyOf(registry.CreateVolumeRPC),
			repeatAfter: resumeBackoff.First})
	}
	if err == nil && v.State != "" {
		err = m.delete(ctx, call, v, intent.PolicyOf, resumeBackoff.First)
	}
	if err != nil {
		m.Wake()
		return fmt.Errorf("delete volume %s: %w", name, m.adviseRetry(ctx, name, err))
	}
	return nil
}

// deletable returns the volume if it may be deleted now.
func (m *Controller) deletable(ctx context.Context, name registry.VolumeName) (v registry.Volume, err error) {
	if v, err = m.confirmedVolume(ctx, name, nil); err != nil {
		return v, err
	}
	local, err := m.uses(ctx, v)
	if err != nil {
		return v, err
	}
	err = registry.Confirm(ctx, m.State, func(view registry.View) error {
		v, err = mayDelete(view, name, local)
		return err
	})
	return v, err
}

// mayDelete returns the stored volume, and an error if it must not be deleted: it is in use, or a snapshot or another
// volume is being made from it. local is as in checkUnused.
func mayDelete(view registry.View, name registry.VolumeName, local []string) (registry.Volume, error) {
	v, found := view.Volume(name)
	if !found {
		return v, errUnknown(name)
	}
	if !v.Created && !v.Made {
		return v, registry.Invalid("volume %s was registered, not created by Holdfast; "+
			"deregister it instead of deleting it",
			name)
	}
	for _, snap := range view.SnapshotRecords() {
		processed := snap.State == registry.SnapshotProcessing && !snap.IsGroup() // CreateSnapshot is repeated
		if (processed || snap.State == registry.SnapshotCreating) && slices.Contains(snap.VolumeKeys(), v.VolumeKey()) {
			return v, registry.Errorf(registry.ErrConflict, "%s of volume %s is %s; wait until it is %s, or delete it",
				nameOf(snap.SnapshotSpec), name, snap.State, registry.SnapshotReady)
		}
	}
	for _, other := range view.Aside().Volumes() {
		fills := v.External != "" && other.Plugin == v.Plugin && other.Source.Volume == v.External
		if fills && (other.State == registry.VolumeCreating || other.State == registry.VolumeUncertain) {
			return v, registry.Errorf(registry.ErrConflict, "volume %s is %s, and is to be filled from volume %s; "+
				"wait until it is ready, or delete it", other.VolumeName(), other.State, name)
		}
	}
	return v, checkUnused(view, v, local, "deleted")
}

// settleCreation determines the outcome of a creation that left no usable volume. If the external id is unknown, or a
// call is open, it repeats CreateVolume. If the plugin has no such volume, it returns the zero volume.
func (m *Controller) settleCreation(
	ctx context.Context, call registry.Call, v registry.Volume, how attempt,
) (registry.Volume, error) {
	if settled, err := m.creationSettled(ctx, v.VolumeName()); err != nil || settled {
		return v, err
	}
	err := m.create(ctx, call, v.VolumeSpec, how)
	if err != nil {
		if _, gone := m.volume(ctx, v.VolumeName()); errors.Is(gone, registry.ErrNotFound) {
			return registry.Volume{}, nil // certainly refused
		}
		if settled, viewErr := m.creationSettled(ctx, v.VolumeName()); viewErr != nil || !settled {
			return v, fmt.Errorf("the volume may exist, but its plugin has not reported an id; "+
				"`volume deregister` removes the record: %w", err)
		}
	}
	return m.volume(ctx, v.VolumeName())
}

// creationSettled reports whether the external id of the volume is known, and no call for the volume is open.
func (m *Controller) creationSettled(ctx context.Context, name registry.VolumeName) (settled bool, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		v, _ := view.Volume(name)
		settled = v.External != "" && len(openIntents(view, v)) == 0
		return nil
	})
	return settled, err
}

// delete sends DeleteVolume until its outcome is certain or its policy gives up. repeatAfter is as in intent.Call.
func (m *Controller) delete(
	ctx context.Context, call registry.Call, v registry.Volume, policy func(registry.RPC) intent.Policy,
	repeatAfter time.Duration,
) error {
	unlock, err := m.Locks.Lock(ctx, v.VolumeKey(), "its deletion")
	if err != nil {
		return err
	}
	defer unlock()
	inst, err := m.capableController(ctx, v.Plugin, true, registry.CreateDelete,
		"plugin %s cannot delete volumes (it lacks %s)")
	if err != nil {
		return err
	}
	if m.clustered() && inst.Local() && v.Node == "" { // the plugin of another node would answer OK
		return registry.Errorf(registry.ErrConflict, "volume %s is older than controller_scope = %q of plugin %s, so "+
			"its node is not known; deregister it, and register it with node = NAME in its file",
			v.VolumeName(), registry.ScopeNode, v.Plugin)
	}
	if err := m.settleAlteration(ctx, intent.Caller{}, v.VolumeKey(), policy); err != nil {
		return err
	}
	local, err := m.uses(ctx, v)
	if err != nil {
		return err
	}
	return m.sendDelete(ctx, call, v, local, policy(registry.DeleteVolumeRPC), repeatAfter)
}

// sendDelete sends DeleteVolume. local are the uses of the volume on this node.
func (m *Controller) sendDelete(
	ctx context.Context, call registry.Call, v registry.Volume, local []string, p intent.Policy,
	repeatAfter time.Duration,
) error {
	request := csi.DeleteRequest{VolumeID: v.External, Private: private(v)}
	return m.sendTo(ctx, intent.Caller{}, v.VolumeSpec, &request.Secrets, intent.Call{
		Intent:      newIntent(registry.DeleteVolumeRPC, call, v, intent.Hash(registry.DeleteVolumeRPC, request)),
		Policy:      p,
		RepeatAfter: repeatAfter,
		Before: func(view registry.View) (registry.Change, error) {
			v, err := mayDelete(view, v.VolumeName(), local)
			v.State = registry.VolumeDeleting
			return registry.Change{Put: []registry.Record{v}}, err
		},
		Done: func(registry.View) registry.Change {
			return registry.Change{
				Delete: []registry.Key{v.Key()},
				Events: []registry.Event{m.event(registry.EventVolumeDeleted, v, withAlloc(v))},
			}
		},
		Failed: func(view registry.View, err *registry.CallError, clean bool) registry.Change {
			if !clean && err.Code != "FAILED_PRECONDITION" { // only this code shows that the volume still exists
				return registry.Change{} // the volume may be gone: Run repeats the call
			}
			return m.deletionRefusedChange(view, v.VolumeName(), err)
		},
	}, func(ctx context.Context, at registry.InstanceKey) error {
		err := m.driver.Delete(ctx, at, request)
		if answered(err, "NOT_FOUND") {
			return nil
		}
		return err
	})
}

// deletionRefusedChange returns the change that restores the state of a volume after its deletion has certainly failed.
func (m *Controller) deletionRefusedChange(
	view registry.View, name registry.VolumeName, why *registry.CallError,
) registry.Change {
	v, found := view.Volume(name)
	if !found || v.State != registry.VolumeDeleting {
		return registry.Change{}
	}
	if v.DeleteWith != "" {
		return m.stillDeletingChange(v, why)
	}
	v.State = registry.VolumeReady
	if v.Failure != (registry.Failure{}) {
		v.State = registry.VolumeUncertain // as before the deletion
	}
	return registry.Change{
		Put:    []registry.Record{v},
		Events: []registry.Event{m.event(registry.EventVolumeKept, v, fmt.Sprintf("%s: %s", why.Code, why.Detail))},
	}
}
