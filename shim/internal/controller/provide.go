package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Provide returns the volume of a create block. If the volume does not exist, Provide creates it, after it has
// completed the deletion of an earlier one. It returns a ready volume as it is. It also returns a volume of another
// origin as it is; Claim refuses it if it is not ready. ErrConflict: the volume belongs to another plugin.
func (m *Controller) Provide(
	ctx context.Context, call registry.Call, spec registry.VolumeSpec, from registry.Origin,
) (registry.Volume, error) {
	return m.ProvideIf(ctx, call, spec, from, nil)
}

// ProvideIf is Provide for a caller whose wish may end meanwhile: then wanted returns an error, and no new volume is
// recorded.
func (m *Controller) ProvideIf(
	ctx context.Context, call registry.Call, spec registry.VolumeSpec, from registry.Origin,
	wanted func(registry.View) error,
) (registry.Volume, error) {
	for {
		v, err := m.volume(ctx, spec.VolumeName())
		switch {
		case errors.Is(err, registry.ErrNotFound):
			return m.createFor(ctx, call, spec, attempt{from: from, wanted: wanted})
		case err != nil:
			return v, err
		case v.Plugin != spec.Plugin:
			return v, registry.OfAnotherPlugin(v, spec.Plugin)
		case v.Unwanted():
			if err := m.Delete(ctx, call, v.VolumeName()); err != nil && !errors.Is(err, registry.ErrNotFound) {
				return v, err
			}
		case v.State == registry.VolumeReady || v.Origin != from:
			return v, nil
		default:
			return m.createFor(ctx, call, v.VolumeSpec, attempt{from: from, wanted: wanted})
		}
	}
}

// FeasibleCreate returns the reasons why the volume cannot be created now.
func (m *Controller) FeasibleCreate(view registry.View, s registry.VolumeSpec) []registry.Infeasible {
	reasons := intent.FeasibleAt(m.Plugins, registry.RoleController, s.Plugin, registry.Usage{})
	if inst, found := m.Plugins.Find(registry.RoleController, s.Plugin); found {
		reasons = append(reasons, infeasible(registry.InfeasibleUnsupported, checkCreator(inst, s))...)
		s.Node, _ = m.nodeFor(inst, s) // a create block names no node
	}
	return append(reasons, FeasibleSpec(view, s)...)
}

// FeasibleSpec returns the reasons of FeasibleCreate that do not depend on the plugin's controller.
func FeasibleSpec(view registry.View, s registry.VolumeSpec) []registry.Infeasible {
	_, _, noSource := sourceOf(view, s)
	return slices.Concat(
		infeasible(registry.InfeasibleRequest, checkPreferred(s)),
		infeasible(registry.InfeasibleNotReady, checkNameFree(view, s)),
		infeasible(registry.InfeasibleNotReady, noSource))
}

// infeasible returns err as a reason, or nothing if err is nil.
func infeasible(kind registry.InfeasibleKind, err error) []registry.Infeasible {
	if err == nil {
		return nil
	}
	return []registry.Infeasible{{Kind: kind, Detail: err.Error()}}
}

// Discard records that Run is to delete the volume of an alloc that has ended. It does so only if the create block made
// the volume and no claim of the volume exists.
func (m *Controller) Discard(
	ctx context.Context, name registry.VolumeName, from registry.Origin, alloc registry.AllocID,
) error {
	unlock, err := m.Locks.Lock(ctx, name, "the end of its alloc")
	if err != nil {
		return err
	}
	defer unlock()
	_, err = registry.Ensure(ctx, m.State, func(view registry.View) (change registry.Change, err error) {
		v, found := view.Volume(name)
		if !found || v.Origin != from || v.DeleteWith != "" || v.External != "" && len(view.Claims(v.VolumeKey())) > 0 {
			return change, nil
		}
		v.DeleteWith = alloc
		if v.State == registry.VolumeReady {
			v.State = registry.VolumeDeleting
		}
		change.Put = []registry.Record{v}
		return change, nil
	})
	if err == nil {
		m.Wake()
	}
	return err
}

// discardedWith returns the alloc with which the volume is to be deleted. Another node may have recorded it (Discard).
func discardedWith(view registry.View, v registry.Volume) registry.AllocID {
	now, _ := view.Volume(v.VolumeName())
	return now.DeleteWith
}

// deleteUnfinished tries once to delete a volume whose creation has not ended.
func (m *Controller) deleteUnfinished(
	ctx context.Context, call registry.Call, v registry.Volume, wait time.Duration,
) error {
	v, err := m.settleCreation(ctx, call, v, attempt{policy: singleTry(registry.CreateVolumeRPC), repeatAfter: wait})
	if err != nil || v.State == "" {
		return err
	}
	return m.delete(ctx, call, v, singleTry, wait)
}

// stillDeletingChange returns the change after a plugin has refused to delete a volume that is deleted with its alloc.
// Run tries again. Each new reason has one event.
func (m *Controller) stillDeletingChange(v registry.Volume, why *registry.CallError) (change registry.Change) {
	if v.Failure.RPC == why.RPC && v.Failure.Code == why.Code && v.Failure.Detail == why.Detail {
		return change
	}
	v.Failure = registry.Failure{RPC: why.RPC, Code: why.Code, Detail: why.Detail, Since: m.Now()}
	return registry.Change{
		Put: []registry.Record{v},
		Events: []registry.Event{m.event(registry.EventVolumeKept, v,
			fmt.Sprintf("%s: %s; its deletion is tried again, %s", why.Code, why.Detail, withAlloc(v)))},
	}
}

// withAlloc names the alloc with which the volume is deleted.
func withAlloc(v registry.Volume) string {
	if v.DeleteWith == "" {
		return ""
	}
	return fmt.Sprintf("with alloc %s", v.DeleteWith)
}
