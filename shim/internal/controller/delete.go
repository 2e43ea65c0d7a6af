package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Delete has the plugin delete a volume that Holdfast created, and forgets it after that. It is refused, before the
// plugin hears of it, while anybody uses the volume. Nothing new may claim the volume once it has begun.
func (m *Controller) Delete(ctx context.Context, call registry.Call, name registry.VolumeName) error {
	leave, err := m.Locks.Lock(ctx, name, "its deletion")
	if err != nil {
		return err
	}
	defer leave()
	v, err := m.deletable(ctx, name)
	if err != nil {
		return err
	}
	if v.State == registry.VolumeCreating || v.State == registry.VolumeUncertain {
		v, err = m.settle(ctx, call, v)
	}
	if err == nil && v.State != "" {
		err = m.delete(ctx, call, v, intent.PolicyOf, pace.First)
	}
	if err != nil {
		m.leaves()
		return fmt.Errorf("delete volume %s: %w", name, m.aftermath(ctx, name, err))
	}
	return nil
}

// deletable returns the volume, if it may be deleted now.
func (m *Controller) deletable(ctx context.Context, name registry.VolumeName) (v registry.Volume, err error) {
	if v, err = m.volume(ctx, name); err != nil {
		return v, err
	}
	local, err := m.uses(ctx, v)
	if err != nil {
		return v, err
	}
	err = m.State.View(ctx, func(view registry.View) error {
		v, err = mayDelete(view, name, local)
		return err
	})
	return v, err
}

func mayDelete(view registry.View, name registry.VolumeName, local []string) (registry.Volume, error) {
	v, found := view.Volume(name)
	if !found {
		return v, unknown(name)
	}
	if !v.Created {
		return v, registry.Invalid("volume %s was registered, not created, so it is not Holdfast's to delete; deregister it",
			name)
	}
	return v, idle(view, v, local, "deleted")
}

// settle finds out what became of a creation without a volume that can be used. It makes the same call again, unless
// the plugin has already said what it calls the volume. The zero volume: there is none.
func (m *Controller) settle(ctx context.Context, call registry.Call, v registry.Volume) (registry.Volume, error) {
	if named, err := m.named(ctx, v.VolumeName()); err != nil || named {
		return v, err
	}
	err := m.create(ctx, call, v.VolumeSpec, attempt{policy: intent.PolicyOf(registry.CreateVolumeRPC),
		again: pace.First})
	if err != nil {
		if _, gone := m.volume(ctx, v.VolumeName()); errors.Is(gone, registry.ErrNotFound) {
			return registry.Volume{}, nil // refused for certain
		}
		if named, look := m.named(ctx, v.VolumeName()); look != nil || !named {
			return v, fmt.Errorf("it may or may not have been created, and its plugin has not said under which id; `volume deregister` forgets it: %w", err)
		}
	}
	return m.volume(ctx, v.VolumeName())
}

// named says whether the plugin has said what it calls the volume, and no creation of it is open any more.
func (m *Controller) named(ctx context.Context, name registry.VolumeName) (named bool, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		v, _ := view.Volume(name)
		named = v.External != "" && len(intents(view, v)) == 0
		return nil
	})
	return named, err
}

// delete drives DeleteVolume to its end. again is as attempt.again.
func (m *Controller) delete(
	ctx context.Context, call registry.Call, v registry.Volume, policy func(registry.RPC) intent.Policy,
	again time.Duration,
) error {
	leave, err := m.Locks.Lock(ctx, v.VolumeKey(), "its deletion")
	if err != nil {
		return err
	}
	defer leave()
	inst, has, err := m.asked(ctx, v.Plugin, true)
	if err != nil {
		return err
	}
	if !has || !inst.Fingerprint.Has(registry.CreateDelete) {
		return registry.Errorf(registry.ErrUnsupported, "plugin %s cannot delete volumes (it lacks %s)",
			v.Plugin, registry.CreateDelete)
	}
	if err := m.settleExpansion(ctx, v.VolumeName(), policy(registry.ControllerExpandRPC)); err != nil {
		return err
	}
	local, err := m.uses(ctx, v)
	if err != nil {
		return err
	}
	request := csi.DeleteRequest{
		VolumeID: v.External, Private: csi.Private{MountFlags: v.MountFlags,
			Contexts: []map[string]string{v.Context, v.Parameters}},
	}
	if request.Secrets, err = m.Resolve(ctx, v.VolumeSpec); err != nil {
		return err
	}
	return m.Send(ctx, intent.Call{
		Intent:    base(registry.DeleteVolumeRPC, call, v, intent.Hash(registry.DeleteVolumeRPC, request)),
		Policy:    policy(registry.DeleteVolumeRPC),
		NextDrive: again,
		Before: func(view registry.View) (registry.Change, error) {
			v, err := mayDelete(view, v.VolumeName(), local)
			v.State = registry.VolumeDeleting
			return registry.Change{Put: []registry.Record{v}}, err
		},
		Renew: func(ctx context.Context) { request.Secrets = m.Renew(ctx, v.VolumeSpec, request.Secrets) },
		Do: func(ctx context.Context) error {
			inst, err := m.Await(ctx, intent.Caller{}, registry.RoleController, v.Plugin)
			if err != nil {
				return err
			}
			if err = m.driver.Delete(ctx, inst.InstanceKey, request); answered(err, "NOT_FOUND") {
				return nil
			}
			return err
		},
		Done: func(registry.View) registry.Change {
			return registry.Change{
				Delete: []registry.Key{v.Key()},
				Events: []registry.Event{m.event(registry.EventVolumeDeleted, v, "")},
			}
		},
		Failed: func(view registry.View, err *registry.CallError, clean bool) registry.Change {
			if !clean && err.Code != "FAILED_PRECONDITION" { // which says that the volume is there
				return registry.Change{} // there may be none any more: it is asked for again
			}
			return m.kept(view, v.VolumeName(), err)
		},
	})
}

// kept is the change by which a volume whose deletion was refused for certain is as it was before.
func (m *Controller) kept(view registry.View, name registry.VolumeName, why *registry.CallError) registry.Change {
	v, found := view.Volume(name)
	if !found || v.State != registry.VolumeDeleting {
		return registry.Change{}
	}
	v.State = registry.VolumeReady
	if v.Failure != (registry.Failure{}) {
		v.State = registry.VolumeUncertain
	}
	return registry.Change{
		Put:    []registry.Record{v},
		Events: []registry.Event{m.event(registry.EventVolumeKept, v, fmt.Sprintf("%s: %s", why.Code, why.Detail))},
	}
}
