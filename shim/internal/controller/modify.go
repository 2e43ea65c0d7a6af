package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Modify changes mutable parameters of a volume (CSI ControllerModifyVolume). Parameters of the volume that are not in
// the argument stay as they are. If all have the new values already, Modify sends nothing.
//
// If an earlier modification has no certain outcome, Modify also sends its parameters, except those that the
// argument sets. So a success makes the values of all parameters known.
func (m *Controller) Modify(
	ctx context.Context, call registry.Call, name registry.VolumeName, parameters map[string]string,
) (v registry.Volume, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("modify volume %s: %w", name, err)
		}
	}()
	if v, err = m.modifiable(ctx, name); err != nil {
		return v, err
	}
	if err := m.checkModify(ctx, v, parameters); err != nil {
		return v, err
	}
	v, unlock, err := m.lockVolume(ctx, name, "its modification")
	if err != nil {
		return v, err
	}
	defer unlock()
	if err := m.modifyLocked(ctx, intent.Caller{Call: call}, v, parameters); err != nil {
		return v, err
	}
	return m.volume(ctx, name)
}

// modifiable returns the volume if its parameters can be modified.
func (m *Controller) modifiable(ctx context.Context, name registry.VolumeName) (registry.Volume, error) {
	return m.confirmedVolume(ctx, name, func(v registry.Volume) error {
		switch {
		case v.Ephemeral:
			return registry.Errorf(registry.ErrUnsupported,
				"it is an inline volume of alloc %s and cannot be modified", v.Owner)
		case v.State != registry.VolumeReady:
			return registry.Errorf(registry.ErrConflict, "it is %s; it must be ready to be modified", v.State)
		}
		return nil
	})
}

// checkModify returns an error if the parameters cannot be sent to the volume's plugin.
func (m *Controller) checkModify(ctx context.Context, v registry.Volume, parameters map[string]string) error {
	if len(parameters) == 0 {
		return registry.Invalid("no mutable parameter is given")
	}
	for key := range parameters {
		if key == "" {
			return registry.Invalid("a mutable parameter has no name")
		}
	}
	if err := checkMap("set of mutable parameters", parameters); err != nil {
		return err
	}
	_, err := m.capableController(ctx, v.Plugin, v.Created, registry.ModifyVolume, lacksModify)
	return err
}

// lacksModify is the format of the error of a plugin without MODIFY_VOLUME.
const lacksModify = "plugin %s has no mutable parameters (it lacks %s)"

// adviseModify adds to the error of a modification what happens next. It returns err unchanged if the outcome of the
// modification is known.
func (m *Controller) adviseModify(ctx context.Context, name registry.VolumeName, err error) error {
	v, viewErr := m.volume(context.WithoutCancel(ctx), name)
	if viewErr != nil || !v.Modification.Open() {
		return err
	}
	open, viewErr := m.openRPC(context.WithoutCancel(ctx), v)
	if viewErr == nil && open == registry.ControllerModifyRPC {
		return fmt.Errorf("%w; Holdfast repeats the call until its outcome is known: see `volume status`", err)
	}
	return fmt.Errorf("%w; whether %s changed is not known: modify them again, to these or other values", err,
		namesOf(v.Modification.Asked))
}

// modifyLocked modifies the volume. The caller holds the volume's locks. After an error Run looks for an open call.
func (m *Controller) modifyLocked(
	ctx context.Context, by intent.Caller, v registry.Volume, parameters map[string]string,
) (err error) {
	defer func() {
		if err != nil {
			m.Wake()
			err = m.adviseModify(ctx, v.VolumeName(), err)
		}
	}()
	if err := m.settleAlteration(ctx, intent.Caller{}, v.VolumeKey(), intent.PolicyOf); err != nil {
		return fmt.Errorf("the outcome of an earlier call must be known first: %w", err)
	}
	if v, err = m.modifiable(ctx, v.VolumeName()); err != nil {
		return err
	}
	all := maps.Clone(parameters)
	for key, value := range v.Modification.Asked {
		if _, given := all[key]; !given {
			all[key] = value
		}
	}
	switch {
	case !v.Modification.Open() && contains(v.Mutable, all):
		return nil
	case v.Modification.Full() && !maps.Equal(all, v.Modification.Asked):
		return registry.Errorf(registry.ErrConflict, "the outcome of its last %d modifications is not known; "+
			"repeat the last one with the same values until it is known (see volume status)",
			len(v.Modification.Earlier)+1)
	}
	return m.modify(ctx, by, v, all, intent.PolicyOf(registry.ControllerModifyRPC))
}

// contains reports whether every key of some has the same value in all.
func contains(all, some map[string]string) bool {
	for key, value := range some {
		if got, has := all[key]; !has || got != value {
			return false
		}
	}
	return true
}

// namesOf returns the names of the parameters, without the values.
func namesOf(parameters map[string]string) string {
	return strings.Join(slices.Sorted(maps.Keys(parameters)), ", ")
}

// private returns the texts that must not appear in errors of calls for the volume, beyond those in the requests.
func private(v registry.Volume) csi.Private {
	return csi.Private{MountFlags: v.MountFlags,
		Contexts: append([]map[string]string{v.Context, v.Parameters, v.Mutable, v.Modification.Asked},
			v.Modification.Earlier...)}
}

// modify sends ControllerModifyVolume until its outcome is certain or its policy gives up. If an earlier modification
// has no certain outcome, parameters must be the same ones, or must have a value for each of its names.
func (m *Controller) modify(
	ctx context.Context, by intent.Caller, v registry.Volume, parameters map[string]string, p intent.Policy,
) error {
	request := csi.ModifyRequest{VolumeID: v.External, Mutable: parameters, Private: private(v)}
	before := v.Modification
	repeats := maps.Equal(before.Asked, parameters)
	vague := repeats // an earlier call with the same parameters may have had an effect
	open := newIntent(registry.ControllerModifyRPC, by.Call, v, intent.Hash(registry.ControllerModifyRPC, request))
	return m.sendTo(ctx, by, v.VolumeSpec, &request.Secrets, intent.Call{
		Intent: open, Policy: p,
		Before: func(view registry.View) (registry.Change, error) {
			now, found := view.Volume(v.VolumeName())
			if !found {
				return registry.Change{}, errUnknown(v.VolumeName())
			}
			if !maps.Equal(now.Modification.Asked, parameters) {
				now.Modification = now.Modification.Then(parameters, m.Now())
			}
			return registry.Change{Put: []registry.Record{now}}, nil
		},
		Done: func(view registry.View) registry.Change { return m.modifiedChange(view, v.VolumeName(), parameters) },
		Failed: func(view registry.View, err *registry.CallError, clean bool) registry.Change {
			now, known := view.Volume(v.VolumeName())
			switch {
			case !known:
				return registry.Change{}
			case vague || !clean && intent.RejectsCall(err.Code):
				now.Modification.Code, now.Modification.Detail = err.Code, err.Detail
			case repeats:
				now.Modification = before.Refused()
			default:
				now.Modification = before
			}
			return registry.Change{Put: []registry.Record{now}}
		},
	}, func(ctx context.Context, at registry.InstanceKey) error {
		err := m.driver.Modify(ctx, at, request)
		vague = isVague(vague, err)
		return err
	})
}

// isVague reports whether an expansion or modification may have had an effect after a try that ended with err. vague
// says whether it may have had one before. If the plugin has answered, and has looked at the volume, its answer
// decides.
func isVague(vague bool, err error) bool {
	call, is := errors.AsType[*registry.CallError](err)
	if !is || !intent.Answers(call.Code) || intent.RejectsCall(call.Code) {
		return vague
	}
	return intent.Inconclusive(call.Code)
}

// modifiedChange returns the change that stores the new values.
func (m *Controller) modifiedChange(
	view registry.View, name registry.VolumeName, parameters map[string]string,
) registry.Change {
	v, known := view.Volume(name)
	if !known {
		return registry.Change{}
	}
	v.Mutable = maps.Clone(v.Mutable)
	if v.Mutable == nil {
		v.Mutable = map[string]string{}
	}
	maps.Copy(v.Mutable, parameters)
	v.Modification = registry.Modification{}
	return registry.Change{Put: []registry.Record{v},
		Events: []registry.Event{m.event(registry.EventVolumeModified, v, namesOf(parameters))}}
}

// settleAlteration repeats an open ControllerExpandVolume or ControllerModifyVolume of the volume until its outcome is
// certain.
func (m *Controller) settleAlteration(
	ctx context.Context, by intent.Caller, key registry.VolumeKey, policy func(registry.RPC) intent.Policy,
) error {
	var v registry.Volume
	var open registry.Intent
	err := m.State.View(ctx, func(view registry.View) error {
		v, _ = view.VolumeByKey(key)
		open, _ = view.Intent(key)
		return nil
	})
	if err != nil || !open.RPC.Alters() {
		return err
	}
	return intent.Unsettled(m.repeatAlteration(ctx, by, v, policy(open.RPC), open.RPC))
}

// repeatAlteration repeats the call that is open for the volume. It does not check again whether the volume may be
// expanded in use, because that was checked when the call was opened.
func (m *Controller) repeatAlteration(
	ctx context.Context, by intent.Caller, v registry.Volume, p intent.Policy, rpc registry.RPC,
) error {
	if rpc == registry.ControllerModifyRPC {
		return m.modify(ctx, by, v, v.Modification.Asked, p)
	}
	return m.expandController(ctx, by, v, v.Expansion.Asked, expandMode{controller: true, online: true}, p)
}

// LeaveAlteration closes an open ControllerExpandVolume or ControllerModifyVolume whose outcome is unknown, and reports
// whether there was one. If the call may still run at a former executor, another call for the volume waits until it has
// ended.
func (m *Controller) LeaveAlteration(ctx context.Context, key registry.VolumeKey) (found bool, err error) {
	_, err = registry.Ensure(ctx, m.State, func(view registry.View) (registry.Change, error) {
		open, _ := view.Intent(key)
		if found = open.RPC.Alters(); !found {
			return registry.Change{}, nil
		}
		change := registry.Change{Delete: []registry.Key{open.Key()}}
		change = change.And(view.GivenUp(view.LateCallOf(open), open.Senders, m.Node))
		v, known := view.VolumeByKey(key)
		if !known {
			return change, nil
		}
		why := intent.UnknownEnd(open)
		if open.RPC == registry.ControllerModifyRPC {
			v.Modification.Code, v.Modification.Detail = why.Code, why.Detail
		} else {
			v.Expansion = v.Expansion.WithError(why)
		}
		change.Put = append(change.Put, v)
		return change, nil
	})
	return found, err
}
