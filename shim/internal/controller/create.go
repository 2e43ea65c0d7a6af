package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/internal/display"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Create creates the volume. It waits for the active controller until ctx ends. Repeating the same spec returns the
// existing volume. Another spec under the same name is an ErrExists.
func (m *Controller) Create(
	ctx context.Context, call registry.Call, spec registry.VolumeSpec,
) (registry.Volume, error) {
	return m.createFor(ctx, call, spec, attempt{})
}

// createFor is Create, also for the create block of a job.
func (m *Controller) createFor(
	ctx context.Context, call registry.Call, spec registry.VolumeSpec, how attempt,
) (registry.Volume, error) {
	how.policy, how.repeatAfter = intent.PolicyOf(registry.CreateVolumeRPC), resumeBackoff.First
	spec, err := creatable(spec)
	if err != nil {
		return registry.Volume{}, err
	}
	unlock, err := m.Locks.Lock(ctx, spec.VolumeName(), "its creation")
	if err != nil {
		return registry.Volume{}, err
	}
	defer unlock()
	known, err := m.stored(ctx, spec)
	if err == nil && known.State == registry.VolumeReady {
		return known, nil
	}
	if err == nil {
		err = m.create(ctx, call, spec, how)
	}
	if err != nil {
		m.Wake()
		return registry.Volume{}, fmt.Errorf("create volume %s: %w", spec.VolumeName(),
			m.adviseRetry(ctx, spec.VolumeName(), err))
	}
	return m.volume(ctx, spec.VolumeName())
}

// adviseRetry adds to the error of a creation or deletion which record remains, whether Holdfast retries the call, and
// which commands apply.
func (m *Controller) adviseRetry(ctx context.Context, name registry.VolumeName, err error) error {
	var state registry.VolumeState
	retries := false
	viewErr := m.State.View(context.WithoutCancel(ctx), func(view registry.View) error {
		if v, found := view.Volume(name); found {
			state = v.State
			retries = m.unfinishedAtController(view, v)
		}
		return nil
	})
	switch {
	case viewErr != nil || state == "":
		return err
	case retries && state == registry.VolumeDeleting:
		return fmt.Errorf("%w; the volume stays %s, and Holdfast retries the deletion in the background: "+
			"`volume status` shows the progress, `volume deregister` only removes the record", err, state)
	case retries:
		return fmt.Errorf("%w; the volume stays %s, and Holdfast retries the creation in the background: "+
			"`volume status` shows the progress, `volume delete` deletes what was created, "+
			"`volume deregister` only removes the record", err, state)
	case state == registry.VolumeUncertain:
		return fmt.Errorf("%w; the volume stays %s, and Holdfast does not retry: `volume create` retries, "+
			"`volume delete` deletes what was created, `volume deregister` only removes the record", err, state)
	}
	return err
}

// creatable returns the spec of a volume to create, or an error if a volume cannot be created from it.
func creatable(s registry.VolumeSpec) (registry.VolumeSpec, error) {
	if s.External != "" {
		return s, registry.Invalid("volume %s names external_id %q; a volume that exists is registered, not created",
			s.VolumeName(), s.External)
	}
	s.Context = nil // the context comes from the plugin's answer
	return complete(s)
}

// complete returns the spec with its name filled in, or an error if the spec lacks a field or holds a literal secret.
func complete(s registry.VolumeSpec) (registry.VolumeSpec, error) {
	if s.Name == "" {
		s.Name = string(s.ID)
	}
	for name, secret := range s.Secrets {
		if secret.Literal != "" { // no record holds a literal secret
			return s, registry.Errorf(registry.ErrInternal, "secret %q of volume %s was not moved into a file",
				name, s.ID)
		}
	}
	if s.ID == "" || s.Namespace == "" || s.Plugin == "" || len(s.Capabilities) == 0 {
		return s, registry.Invalid("a volume has an id, a namespace, a plugin_id and at least one capability block")
	}
	return s, nil
}

// createHash returns a hash of the CreateVolume request.
func createHash(v registry.Volume) string {
	v.External, v.Context = "", nil
	return intent.Hash(registry.CreateVolumeRPC, v.Created, v.VolumeSpec)
}

// specHash returns a hash of the spec as the volume's file has it. It serves to compare volumes.
func specHash(v registry.Volume) string {
	if v.Created {
		return createHash(v)
	}
	return intent.Hash("", v.VolumeSpec)
}

// stored returns the stored volume with the spec's name; zero: there is none. If that volume has another spec, stored
// returns an error.
func (m *Controller) stored(ctx context.Context, spec registry.VolumeSpec) (v registry.Volume, err error) {
	err = registry.Confirm(ctx, m.State, func(view registry.View) error {
		v, err = storedLike(view, registry.Volume{VolumeSpec: spec, Created: spec.External == ""})
		return err
	})
	return v, err
}

// storedLike returns the stored volume with the name of want; zero: there is none. If want does not describe that
// volume, or if it is being deleted, storedLike returns an error.
func storedLike(view registry.View, want registry.Volume) (registry.Volume, error) {
	v, found := view.Volume(want.VolumeName())
	if v.State == registry.VolumeReady && contains(v.Mutable, want.Mutable) {
		want.Mutable = v.Mutable // a modification may have added parameters
	}
	want.Node = cmp.Or(want.Node, v.Node)
	switch {
	case !found:
		return registry.Volume{}, nil
	case !matches(v, want) && v.State == registry.VolumeReady &&
		want.CapacityMin > max(v.CapacityMin, v.Capacity) && matchesExceptSize(v, want):
		return v, registry.Errorf(registry.ErrExists, "volume %s exists already with another size; "+
			"to expand it: %s", v.VolumeName(),
			display.ObjectCommand(fmt.Sprintf("holdfast volume expand --size %d", want.CapacityMin), v.Namespace,
				string(v.ID)))
	case !matches(v, want) && differingFields(v, want) != "":
		return v, registry.Errorf(registry.ErrExists, "volume %s exists already (%s), and differs from the file in: "+
			"%s; to change it: holdfast volume update FILE; for another volume choose another id",
			v.VolumeName(), origin(v), differingFields(v, want))
	case !matches(v, want):
		return v, registry.Errorf(registry.ErrExists,
			"another volume %s exists already (%s, plugin %s, state %s); "+
				"choose another id, or delete or deregister that volume first",
			v.VolumeName(), origin(v), v.Plugin, v.State)
	case v.State == registry.VolumeDeleting:
		return v, registry.Errorf(registry.ErrConflict, "volume %s is being deleted; wait until it is gone",
			v.VolumeName())
	}
	return v, nil
}

// differingFields returns the fields in which the file of a volume differs from the volume. It returns an empty string
// if the file describes a volume of another plugin or origin, or if the volume is not ready.
func differingFields(v, want registry.Volume) string {
	if v.State != registry.VolumeReady || v.Created != want.Created || v.Plugin != want.Plugin {
		return ""
	}
	var fields []string
	for _, c := range compare(v, want.VolumeSpec) {
		fields = append(fields, c.Field)
	}
	return strings.Join(slices.Compact(fields), ", ")
}

// matches reports whether want describes v. want may have the original size. If v was expanded, or if want asks for
// more than the original size, it is enough that the present size of v fulfils want: plugins round sizes up.
func matches(v, want registry.Volume) bool {
	if specHash(v) == specHash(want) {
		return true
	}
	expanded := v.Expansion.Done > 0
	asksForMore := v.Capacity > 0 && want.CapacityMin > v.CapacityMin
	fits := v.Capacity >= want.CapacityMin && (want.CapacityMax == 0 || v.Capacity <= want.CapacityMax)
	return (expanded || asksForMore) && fits && matchesExceptSize(v, want)
}

// matchesExceptSize reports whether want equals v apart from the size.
func matchesExceptSize(v, want registry.Volume) bool {
	v.CapacityMin, v.CapacityMax = want.CapacityMin, want.CapacityMax
	return specHash(v) == specHash(want)
}

func origin(v registry.Volume) string {
	if v.Created {
		return "created"
	}
	return "registered"
}

// attempt says how CreateVolume is sent.
type attempt struct {
	policy      intent.Policy
	repeatAfter time.Duration             // as in intent.Call
	from        registry.Origin           // the create block of a job; zero: none
	wanted      func(registry.View) error // returns why no new volume is to be recorded any more; nil: it is wanted
}

// create sends CreateVolume until its outcome is certain or its policy gives up. It stores the record before the call.
// After the call the state of the record is ready or uncertain, or the record is gone.
func (m *Controller) create(ctx context.Context, call registry.Call, spec registry.VolumeSpec, how attempt) error {
	inst, err := m.awaitController(ctx, spec.Plugin, false)
	if err == nil {
		err = checkCreator(inst, spec)
	}
	if err != nil {
		return err
	}
	made, err := m.newRecord(ctx, inst, spec, how.from)
	if err != nil {
		return err
	}
	doubtful := made.State == registry.VolumeUncertain // an earlier creation may have made the volume
	request := createRequest(inst, made)
	opened := newIntent(registry.CreateVolumeRPC, call, made, createHash(made))
	opened.Volume.External = placeholderID(spec)
	var clash error // a concurrent creation has taken the id, so this volume becomes uncertain
	err = m.sendTo(ctx, intent.Caller{}, spec, &request.Secrets, intent.Call{
		Intent: opened, Policy: how.policy, RepeatAfter: how.repeatAfter,
		Before: func(view registry.View) (registry.Change, error) { return createChange(view, made, how.wanted) },
		Done: func(view registry.View) registry.Change {
			made.DeleteWith = discardedWith(view, made)
			if clash = checkIDFree(view, made); clash != nil {
				unnamed := made
				unnamed.External = ""
				return m.unusableChange(unnamed, &registry.CallError{RPC: registry.CreateVolumeRPC, Code: "OK",
					Detail: clash.Error()})
			}
			made.State, made.Failure = registry.VolumeReady, registry.Failure{}
			if made.DeleteWith != "" {
				made.State = registry.VolumeDeleting
			}
			var forget []registry.Key // the record of a deregistered volume that had the same id
			if old, found := view.Deregistered(made.VolumeKey()); found {
				forget = []registry.Key{old.Key()}
			}
			return registry.Change{
				Put: []registry.Record{made}, Delete: forget,
				Events: []registry.Event{m.event(registry.EventVolumeCreated, made,
					fmt.Sprintf("%d bytes", made.Capacity))},
			}
		},
		Failed: func(view registry.View, err *registry.CallError, clean bool) registry.Change {
			made.DeleteWith = discardedWith(view, made)
			if clean && !doubtful && !wasCompleted(err) {
				return registry.Change{Delete: []registry.Key{made.Key()}}
			}
			return m.unusableChange(made, err) // a volume may exist: the record stays
		},
	}, func(ctx context.Context, at registry.InstanceKey) error {
		answer, err := m.driver.Create(ctx, at, request)
		if err != nil {
			return err
		}
		return m.acceptCreated(ctx, at, &made, answer)
	})
	return errors.Join(err, clash)
}

// wasCompleted reports whether the plugin completed the call but its answer cannot be used.
func wasCompleted(err *registry.CallError) bool {
	return err.Code == "OK" || err.Code == registry.CodeUnreadable
}

// unusableChange returns the change that ends a creation after which an unusable volume may exist.
func (m *Controller) unusableChange(v registry.Volume, why *registry.CallError) registry.Change {
	v.State = registry.VolumeUncertain
	v.Failure = registry.Failure{RPC: why.RPC, Code: why.Code, Detail: why.Detail, Since: m.Now()}
	return registry.Change{
		Put: []registry.Record{v},
		Events: []registry.Event{m.event(registry.EventVolumeUncertain, v,
			fmt.Sprintf("%s: %s", why.Code, why.Detail))},
	}
}

// newRecord returns the existing record of the volume, or a new one whose source comes from the spec. It resolves the
// source only once, because each further try must be the same call. For a late call it returns the record of that call.
func (m *Controller) newRecord(
	ctx context.Context, inst registry.Instance, spec registry.VolumeSpec, from registry.Origin,
) (v registry.Volume, err error) {
	if m.Late != nil {
		return *m.Late.Volume, nil
	}
	if err := m.confirmSnapshot(ctx, spec); err != nil {
		return v, err
	}
	err = registry.Confirm(ctx, m.State, func(view registry.View) error {
		var found bool
		if v, found = view.Volume(spec.VolumeName()); found {
			return nil
		}
		v = registry.Volume{
			VolumeSpec: spec, State: registry.VolumeCreating, Created: true, Since: m.Now(),
			Unattached: !inst.Fingerprint.Has(registry.AttachDetach), Origin: from,
		}
		if v.Node, err = m.nodeFor(inst, spec); err != nil {
			return err
		}
		if err = errors.Join(checkPreferred(spec), m.checkRequired(inst, spec)); err == nil {
			v.Source, v.SourceSize, err = sourceOf(view, v.VolumeSpec)
		}
		return err
	})
	return v, err
}

// nodeFor returns the node of a new volume: this node if the plugin has controller_scope = "node", otherwise none. It
// returns an ErrInvalid if the spec names another node, or names one although the plugin makes volumes for all nodes.
func (m *Controller) nodeFor(inst registry.Instance, s registry.VolumeSpec) (registry.NodeName, error) {
	own := m.node.Name()
	switch {
	case inst.Local() && (s.Node == "" || s.Node == own):
		return own, nil
	case s.Node != "" && inst.Local():
		return "", registry.Invalid("the file of volume %s names node %s, and this is node %s",
			s.VolumeName(), s.Node, own)
	case s.Node != "":
		return "", registry.Invalid("the file of volume %s names node %s, and plugin %s makes volumes for all nodes; "+
			"remove node, or set controller_scope = %q in the plugin's csi_plugin block",
			s.VolumeName(), s.Node, s.Plugin, registry.ScopeNode)
	}
	return "", nil
}

// placeholderID returns a placeholder id for the intent of a volume without an external id. It is a hash, because a
// plugin may use the name itself, or text derived from it, as the id of another volume.
func placeholderID(s registry.VolumeSpec) registry.ExternalID {
	return registry.ExternalID("name:" + intent.Hash(registry.CreateVolumeRPC, s.Plugin, s.Name))
}

// checkCreator returns an ErrUnsupported if the controller does not support what the spec needs.
func checkCreator(inst registry.Instance, s registry.VolumeSpec) error {
	switch {
	case !inst.Fingerprint.Has(registry.CreateDelete):
		return registry.Errorf(registry.ErrUnsupported,
			"plugin %s cannot create volumes (it lacks %s); register an existing volume",
			s.Plugin, registry.CreateDelete)
	case len(s.Mutable) > 0 && !inst.Fingerprint.Has(registry.ModifyVolume):
		return registry.Errorf(registry.ErrUnsupported, lacksModify+"; remove mutable_parameters, or use parameters",
			s.Plugin, registry.ModifyVolume)
	case len(s.Required) > 0 && !inst.Fingerprint.Has(registry.PluginTopology):
		return registry.Errorf(registry.ErrUnsupported,
			"plugin %s does not support topology (it lacks %s); remove topology_request.required",
			s.Plugin, registry.PluginTopology)
	case (s.CloneID != "" || s.CloneExternal != "") && !inst.Fingerprint.Has(registry.CloneVolume):
		return registry.Errorf(registry.ErrUnsupported,
			"plugin %s cannot clone volumes (it lacks %s), and the new volume would be empty; "+
				"remove clone_id or clone_external_id, or use another plugin", s.Plugin, registry.CloneVolume)
	case s.SnapshotID != "" && !inst.Fingerprint.Has(registry.CreateSnapshot):
		return registry.Errorf(registry.ErrUnsupported,
			"plugin %s cannot restore snapshots (it lacks %s), and the new volume would be empty; "+
				"remove snapshot_id, or use another plugin", s.Plugin, registry.CreateSnapshot)
	}
	return intent.Supports(inst, usagesOf(s)...)
}

// createRequest returns the request. A copy without capacity_min asks for the size of its source, because many plugins
// refuse a copy without a size. Topology is sent only to a plugin that supports it.
func createRequest(inst registry.Instance, s registry.Volume) csi.CreateRequest {
	r := csi.CreateRequest{
		Name: s.Name, CapacityMin: cmp.Or(s.CapacityMin, s.SourceSize), CapacityMax: s.CapacityMax,
		Capabilities: s.Capabilities, FSType: s.FSType, MountFlags: s.MountFlags,
		Parameters: s.Parameters, Mutable: s.Mutable,
		Source: s.Source,
	}
	if inst.Fingerprint.Has(registry.PluginTopology) {
		r.Required, r.Preferred = s.Required, s.Preferred
	}
	return r
}

// createChange returns the change that stores the record of a new volume. It refuses a name that is taken, and a source
// that has changed since newRecord, because its deletion may have begun. wanted is as in attempt.
func createChange(view registry.View, v registry.Volume, wanted func(registry.View) error) (registry.Change, error) {
	old, err := storedLike(view, v)
	if err != nil {
		return registry.Change{}, err
	}
	if old.State != "" { // names were compared when the record was stored
		return registry.Change{}, nil
	}
	if err := checkNameFree(view, v.VolumeSpec); err != nil {
		return registry.Change{}, err
	}
	if wanted != nil {
		if err := wanted(view); err != nil {
			return registry.Change{}, err
		}
	}
	return registry.Change{Put: []registry.Record{v}}, checkSource(view, v)
}

// checkNameFree returns an ErrExists if another volume of the plugin has the name: a plugin returns the same volume for
// two requests with the same name.
func checkNameFree(view registry.View, s registry.VolumeSpec) error {
	for _, other := range view.VolumesNamed(s.Plugin, s.Name) {
		if other.VolumeName() != s.VolumeName() {
			return registry.Errorf(registry.ErrExists,
				"volume %s already has the name %q at plugin %s; choose another name",
				other.VolumeName(), s.Name, s.Plugin)
		}
	}
	return nil
}

// acceptCreated checks the plugin's response and copies it to v. If only the id is usable, it copies the id alone, so
// that the volume can be deleted.
func (m *Controller) acceptCreated(
	ctx context.Context, at registry.InstanceKey, v *registry.Volume, answer csi.Created,
) error {
	refuse := func(kind error, err error) error {
		return badResponse(registry.CreateVolumeRPC, at, kind, "the plugin's answer cannot be used: %v", err)
	}
	id, err := registry.ParseExternalID(answer.VolumeID)
	if err != nil {
		return refuse(registry.ErrInternal, err)
	}
	named := *v
	named.External = id
	var clash error
	err = m.State.View(ctx, func(view registry.View) error { clash = checkIDFree(view, named); return nil })
	if err != nil {
		return err
	}
	if clash != nil {
		return badResponse(registry.CreateVolumeRPC, at, registry.ErrExists, "%v", clash)
	}
	v.External = id
	if err := checkCreated(answer, *v); err != nil {
		return refuse(registry.ErrInternal, err)
	}
	v.Context, v.Capacity, v.Accessible = answer.Context, answer.Capacity, answer.Accessible
	return nil
}

// checkIDFree returns an ErrExists if the external id of v belongs to another volume, and an ErrConflict if clients of
// the CSI endpoint use it.
func checkIDFree(view registry.View, v registry.Volume) error {
	if uses := view.EndpointUses(v.VolumeKey()); len(uses) > 0 {
		return registry.Errorf(registry.ErrConflict,
			"a client of the CSI endpoint uses volume %q of plugin %s (%s); end that use there first; "+
				"if the client is gone, see holdfast plugin forget", v.External, v.Plugin, uses[0])
	}
	other, found := view.VolumeByKey(v.VolumeKey())
	if !found || other.VolumeName() == v.VolumeName() {
		return nil
	}
	return registry.Errorf(registry.ErrExists, "the plugin answered with volume %q, which is already volume %s",
		v.External, other.VolumeName())
}

// checkCreated returns an error if the response is unusable apart from its id. The response must repeat the source of
// the request (CSI CreateVolume, content_source), because a plugin without support for sources ignores them.
func checkCreated(c csi.Created, v registry.Volume) error {
	source := v.Source
	if source != (registry.Source{}) && c.Source != source {
		return registry.Invalid(
			"Holdfast asked for volume %q from source %s, the plugin reports source %s: the volume may be empty",
			c.VolumeID, source, c.Source)
	}
	if c.Capacity < 0 {
		return registry.Invalid("its capacity is %d", c.Capacity)
	}
	known := c.Capacity > 0
	if known && (c.Capacity < v.CapacityMin || v.CapacityMax > 0 && c.Capacity > v.CapacityMax) {
		return registry.Invalid("Holdfast asked for %s, the plugin reports %d bytes",
			sizeText(v.VolumeSpec), c.Capacity)
	}
	for _, t := range c.Accessible {
		if err := checkMap("topology", t); err != nil {
			return err
		}
	}
	return checkMap("volume context", c.Context)
}
