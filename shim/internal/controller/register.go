package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// validateTimeout bounds ValidateVolumeCapabilities.
const validateTimeout = time.Minute

// Register records a volume that exists at its plugin. If the plugin has a controller, the controller confirms the
// capabilities. CSI has no call that reports where such a volume is accessible, so topology_request.required says it,
// as in Nomad.
func (m *Controller) Register(ctx context.Context, spec registry.VolumeSpec) (registry.Volume, error) {
	if _, err := registry.ParseExternalID(string(spec.External)); err != nil {
		return registry.Volume{}, fmt.Errorf("register volume %s: %w", spec.VolumeName(), err)
	}
	spec, err := complete(spec)
	if err != nil {
		return registry.Volume{}, err
	}
	unlock, err := m.Locks.Lock(ctx, spec.VolumeName(), "its registration")
	if err != nil {
		return registry.Volume{}, err
	}
	defer unlock()
	known, err := m.stored(ctx, spec)
	if err == nil && known.State != "" {
		return known, nil
	}
	if err == nil {
		err = m.registerNew(ctx, registry.Volume{VolumeSpec: spec, Accessible: spec.Required})
	}
	if err != nil {
		return registry.Volume{}, fmt.Errorf("register volume %s: %w", spec.VolumeName(), err)
	}
	return m.volume(ctx, spec.VolumeName())
}

// registerNew registers a volume that has no record yet.
func (m *Controller) registerNew(ctx context.Context, v registry.Volume) error {
	unlock, err := m.Locks.Lock(ctx, v.VolumeKey(), "its registration")
	if err != nil {
		return err
	}
	defer unlock()
	if v.Node, err = m.confirm(ctx, v.VolumeSpec); err != nil {
		return err
	}
	v.State, v.Since = registry.VolumeReady, m.Now()
	return m.register(ctx, v)
}

// confirm checks with the controller that the volume exists and has the capabilities. It returns the node that has the
// volume (nodeFor). If the plugin has no controller, or its controller does not implement ValidateVolumeCapabilities,
// the volume is not checked.
func (m *Controller) confirm(ctx context.Context, s registry.VolumeSpec) (node registry.NodeName, err error) {
	inst, err := m.awaitController(ctx, s.Plugin, false)
	if err == nil && len(s.Mutable) > 0 && !inst.Fingerprint.Has(registry.ModifyVolume) {
		err = registry.Errorf(registry.ErrUnsupported, lacksModify+"; remove mutable_parameters", s.Plugin,
			registry.ModifyVolume)
	}
	if err == nil {
		node, err = m.nodeFor(inst, s)
	}
	if err != nil || inst.Role != registry.RoleController {
		return node, err
	}
	if err := intent.Supports(inst, usagesOf(s)...); err != nil {
		return node, err
	}
	secrets, err := m.Resolve(ctx, s)
	if err != nil {
		return node, err
	}
	ctx, cancel := context.WithTimeout(ctx, validateTimeout)
	defer cancel()
	answer, err := m.driver.Validate(ctx, inst.InstanceKey, csi.ValidateRequest{
		VolumeID: s.External, VolumeContext: s.Context, Capabilities: s.Capabilities, FSType: s.FSType,
		MountFlags: s.MountFlags,
		Parameters: s.Parameters, Mutable: s.Mutable, Secrets: secrets,
	})
	if errors.Is(err, registry.ErrUnsupported) || answered(err, "UNIMPLEMENTED") {
		return node, nil
	}
	if err != nil {
		return node, err
	}
	for _, c := range s.Capabilities {
		if !slices.Contains(answer.Confirmed, c) {
			return node, registry.Invalid("plugin %s does not confirm that its volume %q can be used %s as %s: %s",
				s.Plugin, s.External, c.Access, c.Attachment, answer.Message)
		}
	}
	return node, nil
}

// register stores the record of a registered volume, unless the same volume is stored already.
func (m *Controller) register(ctx context.Context, v registry.Volume) error {
	_, err := m.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		old, err := storedLike(view, v)
		if err != nil || old.State != "" {
			return registry.Change{}, err
		}
		if other, found := view.VolumeByKey(v.VolumeKey()); found {
			return registry.Change{}, registry.Errorf(registry.ErrExists,
				"volume %q of plugin %s is already registered as %s",
				v.External, v.Plugin, other.VolumeName())
		}
		if err := checkIDFree(view, v); err != nil {
			return registry.Change{}, err
		}
		change := registry.Change{}
		if created, found := view.Deregistered(v.VolumeKey()); found { // Holdfast created the volume
			v.Made = true
			change.Delete = []registry.Key{created.Key()}
		}
		change.Put = []registry.Record{v}
		change.Events = []registry.Event{m.event(registry.EventVolumeRegistered, v, "")}
		return change, nil
	})
	return err
}

// Deregister removes the record of the volume without a call to its plugin, where the volume continues to exist. It
// returns ErrConflict while the volume is in use, or if an operation on it runs for longer than busyWait. An open call
// that no operation repeats now is given up.
func (m *Controller) Deregister(ctx context.Context, name registry.VolumeName) error {
	unlock, err := m.lockBriefly(ctx, name, name)
	if err != nil {
		return err
	}
	defer unlock()
	v, err := m.confirmedVolume(ctx, name, nil)
	if err != nil {
		return err
	}
	if v.External != "" {
		unlock, err := m.lockBriefly(ctx, name, v.VolumeKey())
		if err != nil {
			return err
		}
		defer unlock()
	}
	local, err := m.uses(ctx, v)
	if err != nil {
		return err
	}
	return m.deregister(ctx, name, local)
}

// lockBriefly takes one of the volume's locks, and waits at most busyWait for it.
func (m *Controller) lockBriefly(
	ctx context.Context, name registry.VolumeName, k intent.Key,
) (unlock func(), err error) {
	limited, cancel := context.WithTimeoutCause(ctx, busyWait, errBusy)
	defer cancel()
	unlock, err = m.Locks.Lock(limited, k, "its deregistration")
	if errors.Is(err, errBusy) {
		return nil, m.busyError(ctx, name, err)
	}
	return unlock, err
}

// busyWait bounds how long a deregistration waits for a running operation on the volume.
const busyWait = time.Second

var errBusy = errors.New("the operation has not ended yet")

// busyError returns the error of a deregistration that would have to wait. It names the open calls of the volume.
func (m *Controller) busyError(ctx context.Context, name registry.VolumeName, why error) error {
	open := ""
	err := m.State.View(ctx, func(view registry.View) error {
		v, _ := view.Volume(name)
		for _, i := range openIntents(view, v) {
			open += "; " + intent.Describe(i)
		}
		return nil
	})
	return errors.Join(registry.Errorf(registry.ErrConflict,
		"volume %s cannot be deregistered now: %v%s; try again after it has ended",
		name, why, open), err)
}

// openIntents returns the open intents of a volume: under its key, or under the placeholder key of its creation.
func openIntents(view registry.View, v registry.Volume) (open []registry.Intent) {
	for _, key := range []registry.VolumeKey{v.VolumeKey(), {Plugin: v.Plugin, External: placeholderID(v.VolumeSpec)}} {
		if i, found := view.Intent(key); found && i.Name == v.VolumeName() {
			open = append(open, i)
		}
	}
	return open
}

// deregister deletes the record of the volume and its open intents. If the node that stores the volume is lost, it also
// deletes the attachment to that node. The caller holds the volume's locks.
func (m *Controller) deregister(ctx context.Context, name registry.VolumeName, local []string) error {
	_, err := m.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		v, found := view.Volume(name)
		if !found {
			return registry.Change{}, errUnknown(name)
		}
		lost := lostAttachment(view, v)
		if err := checkUnused(view, v, local, "deregistered", lost...); err != nil {
			return registry.Change{}, err
		}
		change := registry.Change{
			Delete: []registry.Key{v.Key()},
			Events: []registry.Event{m.event(registry.EventVolumeDeregistered, v,
				"the volume still exists at its plugin")},
		}
		for _, at := range lost {
			node, _ := isLost(view, at.Node)
			change.Delete = append(change.Delete, at.Key())
			change.Events = append(change.Events, m.abandoned(at, node.String()))
		}
		for _, open := range openIntents(view, v) {
			change.Delete = append(change.Delete, open.Key())
			late := view.LateCallOf(open)
			late.Failed = true
			change = change.And(view.GivenUp(late, open.Senders, m.Node))
		}
		return change.And(m.rememberChange(view, v)), nil
	})
	return err
}

// maxDeregistered bounds how many deregistered volumes Holdfast remembers as its own.
const maxDeregistered = 1000

// rememberChange returns the change that stores that Holdfast created the volume, so that Holdfast may delete the
// volume after it is registered again. If there are too many such records, the oldest is removed. A volume that is
// being deleted is not remembered, because its plugin may give its id to another volume.
func (m *Controller) rememberChange(view registry.View, v registry.Volume) (change registry.Change) {
	if !v.Created && !v.Made || v.External == "" || v.State == registry.VolumeDeleting {
		return change
	}
	if all := view.AllDeregistered(); len(all) >= maxDeregistered {
		oldest := slices.MinFunc(all, func(a, b registry.Deregistered) int {
			return cmp.Compare(a.ModifyIndex, b.ModifyIndex)
		})
		change.Delete = []registry.Key{oldest.Key()}
	}
	change.Put = []registry.Record{registry.Deregistered{Volume: v.VolumeKey(), Since: m.Now()}}
	return change
}
