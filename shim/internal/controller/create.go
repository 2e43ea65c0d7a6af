package controller

import (
	"context"
	"errors"
	"fmt"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Create has the plugin make the volume, and waits for its active controller until ctx ends. The same spec again is the same
// volume; another spec under the name is ErrExists.
func (m *Mediator) Create(ctx context.Context, call registry.Call, spec registry.VolumeSpec) (registry.Volume, error) {
	spec, err := creatable(spec)
	if err != nil {
		return registry.Volume{}, err
	}
	leave, err := m.Lanes.Enter(ctx, spec.VolumeName(), "its creation")
	if err != nil {
		return registry.Volume{}, err
	}
	defer leave()
	known, err := m.known(ctx, spec, asked)
	if err == nil && known.State == registry.VolumeReady {
		return known, m.answer(ctx, call, known)
	}
	if err == nil {
		err = m.create(ctx, call, spec, intent.PolicyOf(registry.CreateVolumeRPC))
	}
	if err != nil {
		m.leaves()
		return registry.Volume{}, fmt.Errorf("create volume %s: %w", spec.VolumeName(), err)
	}
	return m.volume(ctx, spec.VolumeName())
}

func creatable(s registry.VolumeSpec) (registry.VolumeSpec, error) {
	if s.External != "" {
		return s, registry.Invalid("volume %s names external_id %q; a volume that exists is registered, not created",
			s.VolumeName(), s.External)
	}
	s.Context = nil // the plugin's answer
	return complete(s)
}

func complete(s registry.VolumeSpec) (registry.VolumeSpec, error) {
	if s.Name == "" {
		s.Name = string(s.ID)
	}
	if s.ID == "" || s.Namespace == "" || s.Plugin == "" || len(s.Capabilities) == 0 {
		return s, registry.Invalid("a volume has an id, a namespace, a plugin_id and at least one capability block")
	}
	return s, nil
}

// asked is what was asked of CreateVolume as one comparable value; given is that of a volume that was registered.
func asked(v registry.Volume) string {
	v.External, v.Context = "", nil
	return intent.Hash(registry.CreateVolumeRPC, v.Created, v.VolumeSpec)
}

func given(v registry.Volume) string { return intent.Hash("", v.Created, v.VolumeSpec) }

// known is the volume of the spec's name if there is one, which must have been asked for alike.
func (m *Mediator) known(ctx context.Context, spec registry.VolumeSpec, form func(registry.Volume) string) (v registry.Volume, err error) {
	err = m.log.View(ctx, func(view registry.View) error {
		v, err = existing(view, registry.Volume{VolumeSpec: spec, Created: spec.External == ""}, form)
		return err
	})
	return v, err
}

func existing(view registry.View, want registry.Volume, form func(registry.Volume) string) (registry.Volume, error) {
	v, found := view.Volume(want.VolumeName())
	switch {
	case !found:
		return registry.Volume{}, nil
	case !alike(v, want, form) && v.State == registry.VolumeReady && want.CapacityMin > max(v.CapacityMin, v.Capacity) && sized(v, want, form):
		return v, registry.Errorf(registry.ErrExists, "volume %s exists already, and was made with another size; "+
			"to make it larger: holdfast volume expand %s --namespace %s --size %d", v.VolumeName(), v.ID, v.Namespace, want.CapacityMin)
	case !alike(v, want, form):
		return v, registry.Errorf(registry.ErrExists, "a volume %s exists already, and is another one (%s, plugin %s, state %s); "+
			"choose another id, or delete or deregister it first", v.VolumeName(), origin(v), v.Plugin, v.State)
	case v.State == registry.VolumeDeleting:
		return v, registry.Errorf(registry.ErrConflict, "volume %s is being deleted; wait until it is gone", v.VolumeName())
	}
	return v, nil
}

// alike says whether want is v, of the size that it was made with, or that it was expanded to since, or of a larger one that it has
// already: plugins round up.
func alike(v, want registry.Volume, form func(registry.Volume) string) bool {
	fits := v.Capacity >= want.CapacityMin && (want.CapacityMax == 0 || v.Capacity <= want.CapacityMax)
	has := v.Expansion.Done > 0 || v.Capacity > 0 && want.CapacityMin > v.CapacityMin
	return form(v) == form(want) || has && fits && sized(v, want, form)
}

// sized says whether want is v but for its size.
func sized(v, want registry.Volume, form func(registry.Volume) string) bool {
	v.CapacityMin, v.CapacityMax = want.CapacityMin, want.CapacityMax
	return form(v) == form(want)
}

func origin(v registry.Volume) string {
	if v.Created {
		return "created"
	}
	return "registered"
}

// create drives CreateVolume to its end: the record is there before the call and ready after it.
func (m *Mediator) create(ctx context.Context, call registry.Call, spec registry.VolumeSpec, p intent.Policy) error {
	inst, err := m.creator(ctx, spec)
	if err != nil {
		return err
	}
	request := createRequest(inst, spec)
	if request.Secrets, err = m.resolve(ctx, spec); err != nil {
		return err
	}
	made := registry.Volume{
		VolumeSpec: spec, State: registry.VolumeCreating, Created: true, Since: m.Now(), Unattached: !inst.Fingerprint.Has(registry.AttachDetach),
	}
	opened := base(registry.CreateVolumeRPC, call, made, asked(made))
	opened.Volume.External = creating(spec)
	var clash error // two creations were answered with one volume at the same time: the second stays a creation
	err = m.drive(ctx, intent.Call{
		Intent: opened, Policy: p,
		Before: func(view registry.View) (registry.Change, error) { return begin(view, made) },
		Renew:  func(ctx context.Context) { request.Secrets = m.renewed(ctx, spec, request.Secrets) },
		Do: func(ctx context.Context) error {
			inst, err := m.await(ctx, spec.Plugin)
			if err != nil {
				return err
			}
			answer, err := m.driver.Create(ctx, inst.InstanceKey, request)
			if err != nil {
				return err
			}
			return m.accept(ctx, inst.InstanceKey, &made, answer)
		},
		Done: func(view registry.View) registry.Change {
			if clash = taken(view, made); clash != nil {
				return registry.Change{}
			}
			made.State = registry.VolumeReady
			return registry.Change{
				Put:    append(call.Answered(made), made),
				Events: []registry.Event{m.event(registry.EventVolumeCreated, made, fmt.Sprintf("%d bytes", made.Capacity))},
			}
		},
		Failed: func(_ registry.View, err *registry.CallError, clean bool) registry.Change {
			if !clean || err.Code == "OK" {
				return registry.Change{} // there may be a volume: the record stays
			}
			return registry.Change{Delete: []registry.Key{made.Key()}}
		},
	})
	return errors.Join(err, clash)
}

// creating is what stands for the external id in the intent of a volume that has none yet.
func creating(s registry.VolumeSpec) registry.ExternalID {
	return registry.ExternalID("name:" + s.Name)
}

// creator is the active controller, which can do what the spec needs.
func (m *Mediator) creator(ctx context.Context, s registry.VolumeSpec) (registry.Instance, error) {
	inst, has, err := m.controller(ctx, s.Plugin, false)
	switch {
	case err != nil:
		return inst, err
	case !has || !inst.Fingerprint.Has(registry.CreateDelete):
		return inst, registry.Errorf(registry.ErrUnsupported, "plugin %s cannot create volumes (it lacks %s); register one that exists",
			s.Plugin, registry.CreateDelete)
	case len(s.Required) > 0 && !inst.Fingerprint.Has(registry.PluginTopology):
		return inst, registry.Errorf(registry.ErrUnsupported, "plugin %s knows no topology (it lacks %s); remove topology_request.required",
			s.Plugin, registry.PluginTopology)
	}
	return inst, demands(inst, modesOf(s)...)
}

func createRequest(inst registry.Instance, s registry.VolumeSpec) CreateRequest {
	r := CreateRequest{
		Name: s.Name, CapacityMin: s.CapacityMin, CapacityMax: s.CapacityMax, Capabilities: s.Capabilities, FSType: s.FSType,
		MountFlags: s.MountFlags, Parameters: s.Parameters, CloneID: s.CloneID, SnapshotID: s.SnapshotID,
	}
	if inst.Fingerprint.Has(registry.PluginTopology) {
		r.Required, r.Preferred = s.Required, s.Preferred
	}
	return r
}

// begin makes the volume a record. Two volumes of a plugin never share a name there: the plugin would answer with one disk.
func begin(view registry.View, v registry.Volume) (registry.Change, error) {
	old, err := existing(view, v, asked)
	if err != nil {
		return registry.Change{}, err
	}
	if old.State == registry.VolumeCreating { // it was compared with the others when that began
		return registry.Change{}, nil
	}
	for _, other := range view.VolumesNamed(v.Plugin, v.Name) {
		if other.VolumeName() != v.VolumeName() {
			return registry.Change{}, registry.Errorf(registry.ErrExists, "volume %s has the name %q at plugin %s already; give this one another name",
				other.VolumeName(), v.Name, v.Plugin)
		}
	}
	return registry.Change{Put: []registry.Record{v}}, nil
}

// accept takes the plugin's answer over into v, if it can be used.
func (m *Mediator) accept(ctx context.Context, at registry.InstanceKey, v *registry.Volume, answer Created) error {
	refuse := func(kind error, detail string) error {
		return broken(registry.CreateVolumeRPC, at, kind, "the plugin's answer cannot be used: %s; a volume that it made has to be removed there",
			detail)
	}
	id, err := registry.ParseExternalID(answer.VolumeID)
	if err != nil {
		return refuse(registry.ErrInternal, err.Error())
	}
	if err := answer.check(); err != nil {
		return refuse(registry.ErrInternal, err.Error())
	}
	named := *v
	named.External, named.Context, named.Capacity, named.Accessible = id, answer.Context, answer.Capacity, answer.Accessible
	var clash error
	if err := m.log.View(ctx, func(view registry.View) error { clash = taken(view, named); return nil }); err != nil {
		return err
	}
	if clash != nil {
		return broken(registry.CreateVolumeRPC, at, registry.ErrExists, "%v", clash)
	}
	*v = named
	return nil
}

// taken is nil if the plugin's name of v is not that of another volume.
func taken(view registry.View, v registry.Volume) error {
	other, found := view.VolumeByKey(v.VolumeKey())
	if !found || other.VolumeName() == v.VolumeName() {
		return nil
	}
	return registry.Errorf(registry.ErrExists, "the plugin answered with volume %q, which is volume %s already",
		v.External, other.VolumeName())
}

func (c Created) check() error {
	if c.Capacity < 0 {
		return registry.Invalid("its capacity is %d", c.Capacity)
	}
	for _, t := range c.Accessible {
		if err := checkMap("topology", t); err != nil {
			return err
		}
	}
	return checkMap("volume context", c.Context)
}

// answer makes the answer of a call that had nothing to do durable too.
func (m *Mediator) answer(ctx context.Context, call registry.Call, answer any) error {
	_, err := m.log.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Put: call.Answered(answer)}, nil
	})
	return err
}
