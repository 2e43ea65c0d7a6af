package controller

import (
	"context"
	"fmt"
	"maps"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// External lists the volumes at a plugin (CSI ListVolumes). The volumes with a record have their name too.
func (m *Controller) External(ctx context.Context, id registry.PluginID) ([]registry.PluginVolume, error) {
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
	var found listing[registry.PluginVolume]
	begin := func() { found = newListing[registry.PluginVolume]() }
	err = m.eachExternal(ctx, inst, begin, func(e csi.Entry) error {
		return found.add(e.Volume, pluginVolume(id, e, names[e.Volume]))
	})
	if err != nil {
		return nil, err
	}
	return found.list, nil
}

// eachExternal calls each for the plugin's volumes. It calls begin whenever it reads the list from the start, which may
// be more than once. An error of each ends the list.
func (m *Controller) eachExternal(
	ctx context.Context, inst registry.Instance, begin func(), each func(csi.Entry) error,
) error {
	err := csi.ReadPages(func(token string) (string, error) {
		if token == "" {
			begin()
		}
		page, err := m.driver.ListVolumes(ctx, inst.InstanceKey, token)
		if err != nil {
			// A suspension that cannot be written stays in memory.
			_ = m.Suspended.SuspendFailed(ctx, m.State, inst, err, m.Now())
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

// lister waits for the plugin's controller. ErrUnsupported: the plugin cannot list its volumes, must not be asked
// (list_volumes = false), or died while it listed them.
func (m *Controller) lister(ctx context.Context, id registry.PluginID) (registry.Instance, error) {
	inst, err := m.capableController(ctx, id, false, registry.ListVolumes,
		"plugin %s cannot list volumes (it lacks %s)")
	if err != nil {
		return inst, err
	}
	if inst.Options[registry.OptionListVolumes] == registry.OptionOff {
		return inst, registry.Errorf(registry.ErrUnsupported,
			"plugin %s is not asked for its volumes: list_volumes = false in its csi_plugin stanza", id)
	}
	if why, advice := m.Suspended.Reason(registry.ListVolumesRPC, inst); why != "" {
		return inst, registry.Errorf(registry.ErrUnsupported, "plugin %s is not asked for its volumes: %s; %s", id, why,
			advice)
	}
	return inst, nil
}

// pluginVolume returns the volume of an entry in the plugin's list.
func pluginVolume(id registry.PluginID, e csi.Entry, name registry.VolumeName) registry.PluginVolume {
	return registry.PluginVolume{Plugin: id, External: e.Volume, Capacity: e.Capacity,
		Accessible: e.Accessible, Nodes: e.Nodes, Condition: e.Condition, Name: name}
}

// Adopt makes a record of a volume that exists at its plugin. The plugin describes the volume: its context, its size
// and where it is accessible. The spec has all other fields, and those that the plugin leaves out. The spec must
// not contradict the plugin. As for Register, the controller confirms the capabilities. Repeating the same spec returns
// the existing volume.
func (m *Controller) Adopt(ctx context.Context, spec registry.VolumeSpec) (v registry.Volume, err error) {
	name := spec.VolumeName()
	defer func() {
		if err != nil {
			err = fmt.Errorf("adopt volume %s: %w", name, err)
		}
	}()
	if _, err := registry.ParseExternalID(string(spec.External)); err != nil {
		return v, err
	}
	if spec, err = complete(spec); err != nil {
		return v, err
	}
	unlock, err := m.Locks.Lock(ctx, name, "its adoption")
	if err != nil {
		return v, err
	}
	defer unlock()
	like := spec
	if v, err := m.volume(ctx, name); err == nil && spec.Context == nil {
		like.Context = v.Context // as the plugin described it
	}
	known, err := m.stored(ctx, like)
	if err != nil || known.State != "" {
		return known, err
	}
	described, err := m.describe(ctx, spec.Plugin, spec.External)
	if err != nil {
		return v, err
	}
	if v, err = adopted(spec, described); err != nil {
		return v, err
	}
	if err := m.registerNew(ctx, v); err != nil {
		return v, err
	}
	return m.volume(ctx, name)
}

// adopted returns the volume of the spec, with the fields that its plugin describes.
func adopted(s registry.VolumeSpec, e csi.Entry) (registry.Volume, error) {
	v := registry.Volume{VolumeSpec: s, Capacity: e.Capacity, Accessible: e.Accessible}
	if e.Capacity > 0 && (e.Capacity < s.CapacityMin || s.CapacityMax > 0 && e.Capacity > s.CapacityMax) {
		return v, registry.Invalid("the plugin reports %d bytes, and the file asks for %s; "+
			"remove capacity_min and capacity_max", e.Capacity, sizeText(s))
	}
	if len(e.Context) > 0 {
		if len(s.Context) > 0 && !maps.Equal(e.Context, s.Context) {
			return v, registry.Invalid("the plugin reports another context than the file has; remove context")
		}
		v.Context = e.Context
	}
	if len(v.Accessible) == 0 {
		v.Accessible = s.Required
	}
	return v, nil
}

// sizeText formats the requested size.
func sizeText(s registry.VolumeSpec) string {
	switch {
	case s.CapacityMax == 0:
		return fmt.Sprintf("at least %d bytes", s.CapacityMin)
	case s.CapacityMin == 0:
		return fmt.Sprintf("at most %d bytes", s.CapacityMax)
	}
	return fmt.Sprintf("%d to %d bytes", s.CapacityMin, s.CapacityMax)
}

// describe returns a volume as its plugin describes it. It calls ControllerGetVolume or, if the plugin lacks that,
// ListVolumes. For a plugin that has neither, it returns the zero value.
func (m *Controller) describe(
	ctx context.Context, id registry.PluginID, external registry.ExternalID,
) (found csi.Entry, err error) {
	inst, err := m.awaitController(ctx, id, false)
	switch {
	case err != nil:
		return found, err
	case inst.Role != registry.RoleController:
		return found, registry.Errorf(registry.ErrUnsupported,
			"plugin %s has no controller that knows its volumes; use `volume register FILE`", id)
	case inst.Fingerprint.Has(registry.GetVolume):
		found, err = m.driver.GetVolume(ctx, inst.InstanceKey, external)
		if answered(err, "NOT_FOUND") {
			return found, errNoVolume(id, external)
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
		found = last
		if err == nil && found.Volume == "" {
			return found, errNoVolume(id, external)
		}
	default:
		return csi.Entry{}, nil
	}
	if err == nil {
		err = checkEntry(found, external)
	}
	return found, err
}

func errNoVolume(id registry.PluginID, external registry.ExternalID) error {
	return registry.Errorf(registry.ErrNotFound,
		"plugin %s has no volume %q; `volume list --external` lists what it has", id, external)
}

// checkEntry returns an error if the plugin's description of the volume cannot be used.
func checkEntry(e csi.Entry, external registry.ExternalID) error {
	switch {
	case e.Volume != external:
		return registry.Errorf(registry.ErrInternal, "the plugin was asked for volume %q and describes volume %q",
			external, e.Volume)
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
