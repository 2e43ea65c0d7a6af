package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/registry"
)

// validateTimeout bounds ValidateVolumeCapabilities.
const validateTimeout = time.Minute

// Register makes a volume that exists at its plugin known. Where the plugin has a controller, that one confirms the capabilities.
func (m *Mediator) Register(ctx context.Context, call registry.Call, spec registry.VolumeSpec) (registry.Volume, error) {
	if _, err := registry.ParseExternalID(string(spec.External)); err != nil {
		return registry.Volume{}, fmt.Errorf("register volume %s: %w", spec.VolumeName(), err)
	}
	spec, err := complete(spec)
	if err != nil {
		return registry.Volume{}, err
	}
	known, err := m.known(ctx, spec, given)
	if err == nil && known.State != "" {
		return known, m.answer(ctx, call, known)
	}
	if err == nil {
		err = m.confirm(ctx, spec)
	}
	if err == nil {
		err = m.register(ctx, call, spec)
	}
	if err != nil {
		return registry.Volume{}, fmt.Errorf("register volume %s: %w", spec.VolumeName(), err)
	}
	return m.volume(ctx, spec.VolumeName())
}

// confirm asks the controller whether the volume is there and has the capabilities.
func (m *Mediator) confirm(ctx context.Context, s registry.VolumeSpec) error {
	inst, has, err := m.controller(ctx, s.Plugin)
	if err != nil || !has {
		return err
	}
	if err := demands(inst, modesOf(s)...); err != nil {
		return err
	}
	secrets, err := m.resolve(ctx, s)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, validateTimeout)
	defer cancel()
	answer, err := m.driver.Validate(ctx, inst.InstanceKey, ValidateRequest{
		VolumeID: s.External, VolumeContext: s.Context, Capabilities: s.Capabilities, FSType: s.FSType, MountFlags: s.MountFlags,
		Parameters: s.Parameters, Secrets: secrets,
	})
	if errors.Is(err, registry.ErrUnsupported) || answered(err, "UNIMPLEMENTED") {
		return nil
	}
	if err != nil {
		return err
	}
	for _, c := range s.Capabilities {
		if !slices.Contains(answer.Confirmed, c) {
			return registry.Invalid("plugin %s does not confirm that its volume %q can be used %s as %s: %s",
				s.Plugin, s.External, c.Access, c.Attachment, answer.Message)
		}
	}
	return nil
}

func (m *Mediator) register(ctx context.Context, call registry.Call, spec registry.VolumeSpec) error {
	v := registry.Volume{VolumeSpec: spec, State: registry.VolumeReady, Since: m.now()}
	_, err := m.log.Commit(ctx, func(view registry.View) (registry.Change, error) {
		old, err := existing(view, v, given)
		if err != nil || old.State != "" {
			return registry.Change{}, err
		}
		if other, found := view.VolumeByKey(v.VolumeKey()); found {
			return registry.Change{}, registry.Errorf(registry.ErrExists, "volume %q of plugin %s is known as %s already",
				v.External, v.Plugin, other.VolumeName())
		}
		return registry.Change{
			Put:    append(call.Answered(v), v),
			Events: []registry.Event{m.event(registry.EventVolumeRegistered, v, "")},
		}, nil
	})
	return err
}

// Deregister forgets the volume without a call to its plugin, where it goes on to exist. It is refused while anybody uses it.
func (m *Mediator) Deregister(ctx context.Context, call registry.Call, name registry.VolumeName) error {
	_, err := m.log.Commit(ctx, func(view registry.View) (registry.Change, error) {
		v, found := view.Volume(name)
		if !found {
			return registry.Change{}, unknown(name)
		}
		if err := idle(view, v, "deregistered"); err != nil {
			return registry.Change{}, err
		}
		change := registry.Change{
			Put: call.Answered(struct{}{}), Delete: []registry.Key{v.Key()},
			Events: []registry.Event{m.event(registry.EventVolumeDeleted, v, "deregistered: its plugin was not asked to delete it")},
		}
		for _, key := range []registry.VolumeKey{v.VolumeKey(), {Plugin: v.Plugin, External: creating(v.VolumeSpec)}} {
			if open, found := view.Intent(key); found && open.Name == name {
				change.Delete = append(change.Delete, open.Key())
			}
		}
		return change, nil
	})
	return err
}
