package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// External lists the volumes that a plugin has (CSI ListVolumes), with the names of those that have a record.
func (m *Controller) External(ctx context.Context, id registry.PluginID) (list []registry.PluginVolume, err error) {
	inst, err := m.lister(ctx, id)
	if err != nil {
		return nil, err
	}
	names := map[registry.ExternalID]registry.VolumeName{}
	err = m.State.View(ctx, func(view registry.View) error {
		for _, v := range view.Volumes() {
			if v.Plugin == id && v.External != "" {
				names[v.External] = v.VolumeName()
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var size listSize
	err = m.eachExternal(ctx, inst, func() { list, size = nil, listSize{} }, func(e csi.Entry) error {
		one := pluginVolume(id, e, names[e.Volume])
		list = append(list, one)
		return size.add(one)
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// eachExternal calls each for the plugin's volumes. If its list has to be read again, it calls again before. An error of
// each ends the list.
func (m *Controller) eachExternal(
	ctx context.Context, inst registry.Instance, again func(), each func(csi.Entry) error,
) error {
	err := csi.ReadPages(func(token string) (string, error) {
		if token == "" {
			again()
		}
		page, err := m.driver.ListVolumes(ctx, inst.InstanceKey, token)
		if err != nil {
			_ = m.Suspended.Failed(ctx, m.State, inst, err, m.Now()) // at least this shim remembers it
			return "", err
		}
		for _, e := range page.Entries {
			if err := each(e); err != nil {
				return "", err
			}
		}
		return page.Next, nil
	})
	if err != nil {
		err = fmt.Errorf("list the volumes of plugin %s: %w", inst.Plugin, err)
	}
	return err
}

// lister returns the plugin's controller if its volumes can be listed.
func (m *Controller) lister(ctx context.Context, id registry.PluginID) (registry.Instance, error) {
	inst, has, err := m.awaitController(ctx, id, false)
	switch {
	case err != nil:
		return inst, err
	case !has || !inst.Fingerprint.Has(registry.ListVolumes):
		return inst, registry.Errorf(registry.ErrUnsupported, "plugin %s cannot list volumes (it lacks %s)", id,
			registry.ListVolumes)
	case inst.Options[registry.OptionListVolumes] == registry.OptionOff:
		return inst, registry.Errorf(registry.ErrUnsupported,
			"plugin %s is not asked for its volumes: list_volumes = false in its csi_plugin stanza", id)
	}
	if why, advice := m.Suspended.Reason(registry.ListVolumesRPC, inst); why != "" {
		return inst, registry.Errorf(registry.ErrUnsupported, "plugin %s is not asked for its volumes: %s; %s", id, why,
			advice)
	}
	return inst, nil
}

// pluginVolume returns a volume as its plugin lists it.
func pluginVolume(id registry.PluginID, e csi.Entry, name registry.VolumeName) registry.PluginVolume {
	return registry.PluginVolume{Plugin: id, External: e.Volume, Capacity: e.Capacity,
		Accessible: e.Accessible, Nodes: e.Nodes, Condition: e.Condition, Name: name}
}

// Adopt makes a record of a volume that its plugin has. The plugin describes the volume: its context, its size and where
// it is accessible. The spec has the names, the capabilities and the secrets. Repeating the same spec returns the
// existing volume.
func (m *Controller) Adopt(ctx context.Context, spec registry.VolumeSpec) (registry.Volume, error) {
	if _, err := registry.ParseExternalID(string(spec.External)); err != nil {
		return registry.Volume{}, fmt.Errorf("adopt volume %s: %w", spec.VolumeName(), err)
	}
	spec, err := complete(spec)
	if err != nil {
		return registry.Volume{}, err
	}
	unlock, err := m.Locks.Lock(ctx, spec.VolumeName(), "its adoption")
	if err != nil {
		return registry.Volume{}, err
	}
	defer unlock()
	done, err := m.adopted(ctx, spec)
	if err == nil && !done {
		err = m.adopt(ctx, spec)
	}
	if err != nil {
		return registry.Volume{}, fmt.Errorf("adopt volume %s: %w", spec.VolumeName(), err)
	}
	return m.volume(ctx, spec.VolumeName())
}

// adopted reports whether the volume is registered as the spec says. It is an error if the name belongs to another
// volume.
func (m *Controller) adopted(ctx context.Context, spec registry.VolumeSpec) (done bool, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		v, found := view.Volume(spec.VolumeName())
		done = found && !v.Created && v.VolumeKey() == registry.VolumeKey{Plugin: spec.Plugin, External: spec.External} &&
			slices.Equal(v.Capabilities, spec.Capabilities) && maps.Equal(v.Secrets, spec.Secrets)
		if found && !done {
			return registry.Errorf(registry.ErrExists, "volume %s exists already (%s, plugin %s, external id %q); "+
				"choose another id, or change that volume with `volume update`", v.VolumeName(), origin(v), v.Plugin, v.External)
		}
		return nil
	})
	return done, err
}

// adopt registers a volume that has no record yet.
func (m *Controller) adopt(ctx context.Context, spec registry.VolumeSpec) error {
	described, err := m.describe(ctx, spec.Plugin, spec.External)
	if err != nil {
		return err
	}
	spec.Context = described.Context
	return m.admit(ctx, registry.Volume{VolumeSpec: spec, Capacity: described.Capacity,
		Accessible: described.Accessible})
}

// describe returns a volume as its plugin describes it, by ControllerGetVolume or else ListVolumes. It returns the zero
// value for a plugin that has neither.
func (m *Controller) describe(
	ctx context.Context, id registry.PluginID, external registry.ExternalID,
) (found csi.Entry, err error) {
	inst, has, err := m.awaitController(ctx, id, false)
	switch {
	case err != nil:
		return found, err
	case !has:
		return found, registry.Errorf(registry.ErrUnsupported,
			"plugin %s has no controller that knows its volumes; use `volume register FILE`", id)
	case inst.Fingerprint.Has(registry.GetVolume):
		found, err = m.driver.GetVolume(ctx, inst.InstanceKey, external)
		if answered(err, "NOT_FOUND") {
			return found, hasNo(id, external)
		}
	case inst.Fingerprint.Has(registry.ListVolumes):
		if inst, err = m.lister(ctx, id); err != nil {
			return found, err
		}
		var last csi.Entry
		err = m.eachExternal(ctx, inst, func() {}, func(e csi.Entry) error {
			if e.Volume == external {
				last = e
			}
			return nil
		})
		if found = last; err == nil && found.Volume == "" {
			return found, hasNo(id, external)
		}
	default:
		return csi.Entry{}, nil
	}
	if err == nil {
		err = checkEntry(found, external)
	}
	return found, err
}

func hasNo(id registry.PluginID, external registry.ExternalID) error {
	return registry.Errorf(registry.ErrNotFound, "plugin %s has no volume %q", id, external)
}

// checkEntry returns an error if the plugin's description of the volume cannot be used.
func checkEntry(e csi.Entry, external registry.ExternalID) error {
	switch {
	case e.Volume != external:
		return registry.Errorf(registry.ErrInternal, "the plugin was asked for volume %q and describes volume %q", external,
			e.Volume)
	case e.Capacity < 0:
		return registry.Errorf(registry.ErrInternal, "the plugin reports a capacity of %d bytes", e.Capacity)
	}
	for _, t := range e.Accessible {
		if err := checkMap("topology", t); err != nil {
			return err
		}
	}
	return checkMap("volume context", e.Context)
}
