package controller

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

func TestCreate(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	v, err := d.Controller.Create(t.Context(), call, spec())
	if err != nil || v.External != key.External || v.State != registry.VolumeReady || !v.Created ||
		v.Capacity != 1<<30 || v.Context["pool"] != "p" {
		t.Fatalf("%+v, %v", v, err)
	}
	d.expect("CreateVolume data")
	if d.last.create.CapacityMin != 1<<20 || d.last.create.Secrets["token"].Reveal() != canary {
		t.Errorf("%+v", d.last.create)
	}
	d.view(func(view registry.View) {
		if len(view.Intents()) != 0 {
			t.Errorf("intents are open: %v", view.Intents())
		}
	})
	if kinds := d.kinds(); !slices.Equal(kinds, []registry.EventKind{registry.EventVolumeCreated}) {
		t.Errorf("events %v", kinds)
	}
}

func TestSameSpecIsTheSameVolume(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	first, err := d.Controller.Create(t.Context(), call, spec())
	noErr(t, "", err)
	d.crash()
	again, err := d.Controller.Create(t.Context(), registry.Call{ID: "op-2"}, spec())
	if err != nil || again.CreateIndex != first.CreateIndex {
		t.Errorf("%+v, %v", again, err)
	}
	d.expect("CreateVolume data")
	other := spec()
	other.CapacityMax++
	wantErr(t, "", errOf(d.Controller.Create(t.Context(), call, other)), registry.ErrExists, "")
	d.expect()
}

// theirs returns the spec of another volume that has the name of the first at the plugin.
func theirs() registry.VolumeSpec {
	s := spec()
	s.Namespace, s.Name = "theirs", "data"
	return s
}

// While a volume exists, is created or is deleted, no other volume of its plugin may have its name. Registered and
// inline volumes have no name at the plugin.
func TestNamesAreUniqueAtTheirPlugin(t *testing.T) {
	as := func(change func(*registry.Volume)) registry.Volume {
		v := ready()
		change(&v)
		return v
	}
	for what, c := range map[string]struct {
		known registry.Volume
		taken bool
	}{
		"created": {ready(), true},
		"being created": {as(func(v *registry.Volume) {
			v.State, v.External = registry.VolumeCreating, ""
		}), true},
		"being deleted": {as(func(v *registry.Volume) { v.State = registry.VolumeDeleting }), true},
		"registered":    {as(func(v *registry.Volume) { v.Created, v.External = false, "vol-other" }), false},
		"inline": {as(func(v *registry.Volume) {
			v.Created, v.Ephemeral, v.External = false, true, "vol-other"
		}), false},
		"of another plugin":   {as(func(v *registry.Volume) { v.Plugin = "other" }), false},
		"of a name like it":   {as(func(v *registry.Volume) { v.Name, v.External = "data-2", "vol-data-2" }), false},
		"of a name within it": {as(func(v *registry.Volume) { v.Name, v.External = "dat", "vol-dat" }), false},
		"of its id as an id":  {as(func(v *registry.Volume) { v.Name, v.External = "else", "vol-else" }), false},
	} {
		d := open(t, of(registry.CreateDelete), c.known)
		d.crash() // an earlier shim has made the volume
		_, err := d.Controller.Create(t.Context(), call, theirs())
		if c.taken != errors.Is(err, registry.ErrExists) || c.taken != (err != nil) {
			t.Errorf("%s: %v", what, err)
		}
		if asked := len(d.journal) > 0; asked == c.taken {
			t.Errorf("%s: the plugin was asked %q", what, d.journal)
		}
	}
}

func TestHalfCreatedVolumeIsFoundAndDeleted(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	d.faults = []fault{uncertain("FAILED_PRECONDITION", true)}
	_, _ = d.Controller.Create(t.Context(), call, spec())
	d.crash()
	noErr(t, "", d.Controller.Delete(t.Context(), call, name))
	d.expect("CreateVolume data", "CreateVolume data", "DeleteVolume vol-data")
	if _, found := d.stored(); found || len(d.made) != 0 {
		t.Errorf("left behind: %v, %v", found, d.made)
	}
}

func TestCommitLostAfterCreation(t *testing.T) {
	for _, written := range []bool{true, false} {
		d := open(t, of(registry.CreateDelete))
		d.spoil = func(*csi.Created) { d.log.Lose(written) }
		wantErr(t, "", errOf(d.Controller.Create(t.Context(), call, spec())), registry.ErrUncertain, "")
		d.spoil = nil
		d.crash()
		if v, err := d.Controller.Create(t.Context(), call, spec()); err != nil || v.External != key.External {
			t.Errorf("written %v: %+v, %v", written, v, err)
		}
	}
}

// An unusable answer leaves a record with the reason. If the plugin's id of the volume is valid, the record has it too.
func TestUnusableAnswerIsKeptWithItsReason(t *testing.T) {
	big := map[string]string{"k": strings.Repeat("x", maxMap)}
	for what, c := range map[string]struct {
		spoil  func(*csi.Created)
		named  bool
		reason string
	}{
		"no volume": {func(c *csi.Created) { *c = csi.Created{} }, false, "external id is empty"},
		"over-long id": {func(c *csi.Created) {
			c.VolumeID = strings.Repeat("x", 4097)
		}, false, "4097 bytes long"},
		"invalid UTF-8":     {func(c *csi.Created) { c.VolumeID = "a\xff" }, false, "not valid UTF-8"},
		"volume of another": {func(c *csi.Created) { c.VolumeID = "vol-other" }, false, "already volume other"},
		"large context":     {func(c *csi.Created) { c.Context = big }, true, "volume context"},
		"large topology":    {func(c *csi.Created) { c.Accessible = []registry.Topology{big} }, true, "topology"},
		"negative size":     {func(c *csi.Created) { c.Capacity = -1 }, true, "capacity is -1"},
		"less than asked": {func(c *csi.Created) { c.Capacity = 1<<20 - 1 }, true,
			"the plugin reports 1048575 bytes"},
	} {
		t.Run(what, func(t *testing.T) {
			other := ready()
			other.ID, other.Name, other.External, other.Created = "other", "other", "vol-other", false
			d := open(t, of(registry.CreateDelete), other)
			d.spoil = c.spoil
			_, err := d.Controller.Create(t.Context(), call, spec())
			if !errors.Is(err, registry.ErrInternal) && !errors.Is(err, registry.ErrExists) ||
				!strings.Contains(fmt.Sprint(err), "volume deregister") {
				t.Errorf("%v", err)
			}
			v, found := d.stored()
			if !found || v.State != registry.VolumeUncertain || (v.External != "") != c.named || v.Context != nil {
				t.Errorf("state %s, id %q, %v", v.State, v.External, found)
			}
			if f := v.Failure; f.RPC != registry.CreateVolumeRPC || !strings.Contains(f.Detail, c.reason) ||
				f.Since.IsZero() {
				t.Errorf("the reason is %+v, want %q", f, c.reason)
			}
			if kinds := d.kinds(); !slices.Equal(kinds,
				[]registry.EventKind{registry.EventStepFailed, registry.EventVolumeUncertain}) {
				t.Errorf("events %v", kinds)
			}
			d.crash()
			d.journal = nil
			if !c.named {
				// The deletion of such a volume never deletes another one. The volume can be deregistered.
				wantErr(t, "", d.Controller.Delete(t.Context(), call, name), nil, "volume deregister")
				d.expect("CreateVolume data")
				noErr(t, "", d.Controller.Deregister(t.Context(), name))
			} else if err := d.Controller.Delete(t.Context(), call, name); err != nil {
				t.Error(err)
			} else {
				d.expect("DeleteVolume vol-data")
			}
			if _, found := d.stored(); found {
				t.Error("still there")
			}
		})
	}
}

// externalIDs are ids of real drivers: a path, a cloud resource, a share, and an id of the greatest length.
var externalIDs = []string{
	"/buckets/data", "..", "a/../../etc", "server#share#data##", "two\nlines", "\x00",
	"/subscriptions/" + strings.Repeat("0", 36) + "/resourceGroups/" + strings.Repeat("g", 60) +
		"/providers/Microsoft.Compute/disks/data",
	strings.Repeat("x", registry.MaxExternalID),
}

func TestExternalIDIsOpaque(t *testing.T) {
	for _, id := range externalIDs {
		d := open(t, of(registry.CreateDelete, registry.AttachDetach))
		d.spoil = func(c *csi.Created) { c.VolumeID = id }
		v, err := d.Controller.Create(t.Context(), call, spec())
		if err != nil || v.State != registry.VolumeReady || string(v.External) != id {
			t.Errorf("%.40q: state %s, %v", id, v.State, err)
			continue
		}
		d.crash()
		d.journal = nil
		c := claimed()
		c.Volume = v.VolumeKey()
		d.put(c)
		noErr(t, fmt.Sprintf("%.40q", id), d.Controller.Attach(t.Context(), by, v, usage(), here("i-1")))
		if err := d.Controller.Detach(t.Context(), by, v.VolumeKey(), "n1"); err != nil {
			t.Errorf("%.40q: %v", id, err)
		}
		d.drop(c.Key())
		noErr(t, fmt.Sprintf("%.40q", id), d.Controller.Delete(t.Context(), registry.Call{ID: "op-2"}, name))
		registered := spec()
		registered.External = registry.ExternalID(id)
		if _, err := d.Controller.Register(t.Context(), registered); err != nil {
			t.Errorf("%.40q: %v", id, err)
		}
		if want := "DeleteVolume " + id; len(d.journal) != 4 || d.journal[2] != want {
			t.Errorf("%.40q: the plugin was asked %.400q", id, d.journal)
		}
	}
}

// The key of a creation's intent differs from all ids of the plugin, so the intent of another volume does not block it.
func TestVolumeIDMadeOfANameDoesNotHinderACreation(t *testing.T) {
	other := ready()
	other.ID, other.Name, other.External, other.Created = "other", "other", "name:data", false
	d := open(t, of(registry.CreateDelete, registry.AttachDetach), other)
	d.faults = []fault{uncertain("FAILED_PRECONDITION", true)}
	wantErr(t, "", errOf(d.Controller.Create(t.Context(), call, spec())), registry.ErrUncertain, "")
	c := claimed()
	c.Volume, c.Name = other.VolumeKey(), other.VolumeName()
	d.put(c)
	noErr(t, "", d.Controller.Attach(t.Context(), by, other, usage(), here("i-1")))
	if v, err := d.Controller.Create(t.Context(), call, spec()); err != nil || v.State != registry.VolumeReady {
		t.Errorf("%s, %v", v.State, err)
	}
}

// filled returns the spec of a volume with a source.
func filled(change func(*registry.VolumeSpec)) registry.VolumeSpec {
	s := spec()
	s.ID, s.Name = "copy", "copy"
	change(&s)
	return s
}

// A volume with a source is never created empty. If the plugin lacks the capability, no call is sent. The answer to a
// call must name the source.
func TestVolumeFromASourceIsNeverEmpty(t *testing.T) {
	able := of(registry.CreateDelete, registry.CloneVolume, registry.CreateSnapshot)
	source := ready()
	making, foreign := ready(), ready()
	making.ID, making.External, making.State = "making", "", registry.VolumeCreating
	making.Name = "making"
	foreign.ID, foreign.Plugin, foreign.External = "foreign", "other", "vol-foreign"
	inline := ready()
	inline.ID, inline.External, inline.Ephemeral, inline.Owner = "inline", "csi-inline", true, "a1"
	byName := func(s *registry.VolumeSpec) { s.CloneID = "data" }
	honest := func(s registry.Source) func(*csi.Created) { return func(c *csi.Created) { c.Source = s } }
	for what, c := range map[string]struct {
		plugins table
		change  func(*registry.VolumeSpec)
		answer  func(*csi.Created)
		sent    registry.Source
		kind    error
		state   registry.VolumeState
	}{
		"no CLONE_VOLUME": {of(registry.CreateDelete, registry.CreateSnapshot), byName, nil,
			registry.Source{}, registry.ErrUnsupported, ""},
		"no CLONE_VOLUME, their id": {of(registry.CreateDelete), func(s *registry.VolumeSpec) {
			s.CloneExternal = "vol-x"
		}, nil, registry.Source{}, registry.ErrUnsupported, ""},
		"no snapshots": {of(registry.CreateDelete, registry.CloneVolume), func(s *registry.VolumeSpec) {
			s.SnapshotID = "snap-1"
		}, nil, registry.Source{}, registry.ErrUnsupported, ""},
		"an unknown volume": {able, func(s *registry.VolumeSpec) {
			s.CloneID = "vol-data"
		}, nil, registry.Source{}, registry.ErrNotFound, ""},
		"another plugin's volume": {able, func(s *registry.VolumeSpec) {
			s.CloneID = "foreign"
		}, nil, registry.Source{}, registry.ErrInvalid, ""},
		"a volume that is not made": {able, func(s *registry.VolumeSpec) {
			s.CloneID = "making"
		}, nil, registry.Source{}, registry.ErrConflict, ""},
		"an inline volume": {able, func(s *registry.VolumeSpec) {
			s.CloneID = "inline"
		}, nil, registry.Source{}, registry.ErrUnsupported, ""},
		"our name": {able, byName, honest(registry.Source{Volume: "vol-data"}),
			registry.Source{Volume: "vol-data"}, nil, registry.VolumeReady},
		"their id": {able, func(s *registry.VolumeSpec) {
			s.CloneExternal = "vol-x"
		}, honest(registry.Source{Volume: "vol-x"}),
			registry.Source{Volume: "vol-x"}, nil, registry.VolumeReady},
		"a snapshot": {able, func(s *registry.VolumeSpec) {
			s.SnapshotID = "snap-1"
		}, honest(registry.Source{Snapshot: "snap-1"}),
			registry.Source{Snapshot: "snap-1"}, nil, registry.VolumeReady},
		"the answer names none": {able, byName, nil, registry.Source{Volume: "vol-data"}, registry.ErrInternal,
			registry.VolumeUncertain},
		"the answer names another": {able, byName, honest(registry.Source{Volume: "vol-x"}),
			registry.Source{Volume: "vol-data"},
			registry.ErrInternal, registry.VolumeUncertain},
		"the answer names a snapshot": {able, byName, honest(registry.Source{Snapshot: "vol-data"}),
			registry.Source{Volume: "vol-data"},
			registry.ErrInternal, registry.VolumeUncertain},
	} {
		t.Run(what, func(t *testing.T) {
			d := open(t, c.plugins, source, making, foreign, inline)
			d.spoil = c.answer
			v, err := d.Controller.Create(t.Context(), call, filled(c.change))
			if (err == nil) != (c.kind == nil) || c.kind != nil && !errors.Is(err, c.kind) {
				t.Errorf("state %s, %v", v.State, err)
			}
			if d.last.create.Source != c.sent {
				t.Errorf("sent %+v, want %+v", d.last.create.Source, c.sent)
			}
			copied := registry.VolumeName{Namespace: name.Namespace, ID: "copy"}
			d.view(func(view registry.View) { v, _ = view.Volume(copied) })
			if v.State != c.state {
				t.Errorf("state %q, want %q", v.State, c.state)
			}
			if c.state != registry.VolumeUncertain {
				return
			}
			if !strings.Contains(v.Failure.Detail, "may be empty") || !strings.Contains(err.Error(), "volume delete") {
				t.Errorf("%+v, %v", v.Failure, err)
			}
			d.faults = []fault{failed("FAILED_PRECONDITION")}
			if err := d.Controller.Delete(t.Context(), call, copied); err == nil {
				t.Error("no error")
			}
			if d.view(func(view registry.View) { v, _ = view.Volume(copied) }); v.State != registry.VolumeUncertain {
				t.Errorf("after a deletion that was refused: %s", v.State)
			}
			if err := d.Controller.Delete(t.Context(), call, copied); err != nil || len(d.made) != 0 {
				t.Errorf("%v, %v", err, d.made)
			}
		})
	}
}

// A repeated clone has the same source and size in its request, even if the record of the source is gone meanwhile.
func TestCloneIsAskedForAgainFromTheSameSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from := ready()
		from.Capacity = 1 << 30
		d := open(t, of(registry.CreateDelete, registry.CloneVolume), from)
		d.faults = []fault{uncertain("FAILED_PRECONDITION", true)}
		d.spoil = func(c *csi.Created) { c.Source.Volume = "vol-data" }
		copied := filled(func(s *registry.VolumeSpec) { s.CloneID, s.CapacityMin, s.CapacityMax = "data", 0, 0 })
		wantErr(t, "", errOf(d.Controller.Create(t.Context(), call, copied)), registry.ErrUncertain, "")
		d.crash()
		d.drop(ready().Key())
		d.last.create = csi.CreateRequest{}
		d.runFor(time.Minute)
		if again := d.last.create; again.Source.Volume != "vol-data" || again.CapacityMin != 1<<30 {
			t.Errorf("%+v", again)
		}
		d.view(func(view registry.View) {
			if v, _ := view.Volume(copied.VolumeName()); v.State != registry.VolumeReady {
				t.Errorf("%s: %+v", v.State, v.Failure)
			}
		})
	})
}

// The error of a creation says whether Holdfast retries it, when, and how to end it.
func TestFailedCreationSaysWhetherItGoesOn(t *testing.T) {
	for what, c := range map[string]struct {
		faults []fault
		state  registry.VolumeState
		says   string
		next   bool
	}{
		"refused": {[]fault{failed("INVALID_ARGUMENT")}, "", "", false},
		"no room": {slices.Repeat([]fault{uncertain("RESOURCE_EXHAUSTED", false)}, 3),
			registry.VolumeCreating, "in the background", true},
		"refused after that": {[]fault{uncertain("INTERNAL", false), failed("INVALID_ARGUMENT")},
			registry.VolumeUncertain, "does not retry", false},
	} {
		synctest.Test(t, func(t *testing.T) {
			d := open(t, of(registry.CreateDelete))
			d.faults = c.faults
			_, err := d.Controller.Create(t.Context(), call, spec())
			if err == nil || !strings.Contains(err.Error(), c.says) ||
				(c.says != "") != strings.Contains(err.Error(), "volume deregister") {
				t.Errorf("%s: %v", what, err)
			}
			v, _ := d.stored()
			if v.State != c.state || (c.state == registry.VolumeUncertain) != (v.Failure.Detail == "injected") {
				t.Errorf("%s: state %q, %+v", what, v.State, v.Failure)
			}
			d.view(func(view registry.View) {
				in, open := registry.OpenIntent(view,
					registry.VolumeKey{Plugin: "ebs", External: placeholderID(v.VolumeSpec)})
				if open != c.next || open && (in.Detail != "injected" || !in.Next.After(time.Now())) {
					t.Errorf("%s: intent %v, next %v", what, open, in.Next)
				}
			})
			if c.state != registry.VolumeUncertain {
				return
			}
			// A refusal says nothing about an earlier call, so only an operator can remove the record.
			d.faults = []fault{failed("INVALID_ARGUMENT")}
			if err := d.Controller.Delete(t.Context(), call, name); err == nil {
				t.Errorf("%s: deleted without a word of the plugin", what)
			}
			d.journal = nil
			d.runFor(time.Hour)
			d.expect()
			if v, err := d.Controller.Create(t.Context(), call, spec()); err != nil ||
				v.State != registry.VolumeReady || v.Failure != (registry.Failure{}) {
				t.Errorf("%s, asked again: %s, %v", what, v.State, err)
			}
		})
	}
}

// The error of an uncertain deletion says that Holdfast retries it, and when.
func TestFailedDeletionSaysThatItGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, of(registry.CreateDelete), ready())
		d.faults = slices.Repeat([]fault{uncertain("INTERNAL", false)}, 3)
		wantErr(t, "", d.Controller.Delete(t.Context(), call, name), nil, "in the background")
		d.view(func(view registry.View) {
			if in, open := registry.OpenIntent(view, key); !open || !in.Next.After(time.Now()) {
				t.Errorf("open %v, next %v", open, in.Next)
			}
		})
	})
}

// A deregistered volume is not reported as deleted.
func TestDeregisteredIsNotCalledDeleted(t *testing.T) {
	for kind, end := range map[registry.EventKind]func(*desk) error{
		registry.EventVolumeDeleted:      func(d *desk) error { return d.Controller.Delete(t.Context(), call, name) },
		registry.EventVolumeDeregistered: func(d *desk) error { return d.Controller.Deregister(t.Context(), name) },
	} {
		d := open(t, of(registry.CreateDelete), ready())
		noErr(t, "", end(d))
		if kinds := d.kinds(); !slices.Equal(kinds, []registry.EventKind{kind}) {
			t.Errorf("events %v, want %s", kinds, kind)
		}
	}
}

func TestCreateSendsOnlyWhatWasAnnounced(t *testing.T) {
	zone := []registry.Topology{{"zone": "a"}}
	preferring, requiring, newer, both, elsewhere := spec(), spec(), spec(), spec(), spec()
	preferring.Preferred, requiring.Required = zone, zone
	both.Required, both.Preferred = zone, []registry.Topology{{"ZONE": "a"}}
	elsewhere.Required, elsewhere.Preferred = zone, []registry.Topology{{"zone": "b"}}
	newer.Capabilities = []registry.VolumeCapability{{Access: registry.SingleNodeMultiWriter,
		Attachment: registry.FileSystem}}
	for _, c := range []struct {
		name string
		caps []registry.Capability
		spec registry.VolumeSpec
		kind error
	}{
		{"nothing", nil, spec(), registry.ErrUnsupported},
		{"preferred topology without it", []registry.Capability{registry.CreateDelete}, preferring, nil},
		{"required topology without it", []registry.Capability{registry.CreateDelete}, requiring,
			registry.ErrUnsupported},
		{"required topology", []registry.Capability{registry.CreateDelete, registry.PluginTopology}, requiring, nil},
		{"required and preferred topology",
			[]registry.Capability{registry.CreateDelete, registry.PluginTopology}, both, nil},
		{"preferred topology that is not required",
			[]registry.Capability{registry.CreateDelete, registry.PluginTopology}, elsewhere, registry.ErrInvalid},
		{"newer mode without it", []registry.Capability{registry.CreateDelete}, newer, registry.ErrUnsupported},
		{"newer mode", []registry.Capability{registry.CreateDelete, registry.ControllerMulti}, newer, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, of(c.caps...))
			_, err := d.Controller.Create(t.Context(), call, c.spec)
			if c.kind != nil {
				wantErr(t, "", err, c.kind, "")
				d.expect()
				return
			}
			topology := slices.Contains(c.caps, registry.PluginTopology)
			if got := d.last.create; err != nil || topology != (len(got.Required)+len(got.Preferred) > 0) {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
	known := ready()
	known.Required, known.Preferred = elsewhere.Required, elsewhere.Preferred
	noErr(t, "a volume that exists", errOf(open(t, of(), known).Controller.Create(t.Context(), call, elsewhere)))
}

func TestNodeOnlyPluginCannotCreate(t *testing.T) {
	node := with(registry.SnapshotMetadata) // declared by the identity service, and so in the fingerprint of each role
	node.Role = registry.RoleNode
	d := open(t, table{registry.RoleNode: node})
	wantErr(t, "a volume", errOf(d.Controller.Create(t.Context(), call, spec())), registry.ErrUnsupported, "")
	_, err := d.Controller.capableController(t.Context(), key.Plugin, false, registry.SnapshotMetadata, "%s lacks %s")
	wantErr(t, "blocks of a snapshot", err, registry.ErrUnsupported, "lacks")
}

func TestRegister(t *testing.T) {
	known := spec()
	known.External = key.External
	node := with()
	node.Role = registry.RoleNode
	refuse := func(v csi.Validated, err error) func(csi.ValidateRequest) (csi.Validated, error) {
		return func(csi.ValidateRequest) (csi.Validated, error) { return v, err }
	}
	for _, c := range []struct {
		name    string
		plugins table
		confirm func(csi.ValidateRequest) (csi.Validated, error)
		asked   []string
		kind    error
	}{
		{"confirmed", of(), nil, []string{"ValidateVolumeCapabilities vol-data"}, nil},
		{"nothing confirmed", of(), refuse(csi.Validated{Message: "no"}, nil),
			[]string{"ValidateVolumeCapabilities vol-data"}, registry.ErrInvalid},
		{"another confirmed", of(), refuse(csi.Validated{Confirmed: []registry.VolumeCapability{
			{Access: registry.MultiNodeReaderOnly, Attachment: registry.FileSystem}}}, nil),
			[]string{"ValidateVolumeCapabilities vol-data"}, registry.ErrInvalid},
		{"not implemented", of(), refuse(csi.Validated{},
			&registry.CallError{Code: "UNIMPLEMENTED", Outcome: registry.OutcomeFailed, Kind: registry.ErrUnsupported}),
			[]string{"ValidateVolumeCapabilities vol-data"}, nil},
		{"unknown there", of(), refuse(csi.Validated{},
			&registry.CallError{Code: "NOT_FOUND", Outcome: registry.OutcomeFailed, Kind: registry.ErrNotFound}),
			[]string{"ValidateVolumeCapabilities vol-data"}, registry.ErrNotFound},
		{"no controller", table{registry.RoleNode: node}, nil, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, c.plugins)
			d.plugin.confirm = c.confirm
			v, err := d.Controller.Register(t.Context(), known)
			d.expect(c.asked...)
			if c.kind != nil {
				if _, found := d.stored(); found || !errors.Is(err, c.kind) {
					t.Errorf("stored %v, %v", found, err)
				}
				return
			}
			if err != nil || v.State != registry.VolumeReady || v.Created {
				t.Fatalf("%+v, %v", v, err)
			}
			if again, err := d.Controller.Register(t.Context(), known); err != nil ||
				again.CreateIndex != v.CreateIndex {
				t.Errorf("again: %+v, %v", again, err)
			}
		})
	}
}

func TestExternalIDIsUniquePerPlugin(t *testing.T) {
	d := open(t, of(), ready())
	other := spec()
	other.ID, other.External = "alias", key.External
	wantErr(t, "", errOf(d.Controller.Register(t.Context(), other)), registry.ErrExists, "data")
	other.External = ""
	wantErr(t, "without an external id", errOf(d.Controller.Register(t.Context(), other)), registry.ErrInvalid, "")
}

// uses returns records, each of which means that the volume is in use. The keys are parts of the errors.
func uses() map[string][]registry.Record {
	return map[string][]registry.Record{
		"alloc a1": {claimed()},
		"staged":   nil, // reported by the node
		"node i-7": {registry.Attachment{Volume: key, Node: "n1", NodeID: "i-7", State: registry.MarkSent}},
		"since 2001": {func() registry.Claim {
			c := claimed()
			c.Since = time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC)
			return c
		}()},
	}
}

// DeleteVolume is not sent for a volume in use.
func TestDeleteSendsNothingWhileInUse(t *testing.T) {
	for says, records := range uses() {
		d := open(t, of(registry.CreateDelete), append(records, ready())...)
		if len(records) == 0 {
			d.node = local{uses: []string{"staged at /s"}}
		}
		wantErr(t, says, d.Controller.Delete(t.Context(), call, name), registry.ErrConflict, says)
		wantErr(t, says, d.Controller.Deregister(t.Context(), name), registry.ErrConflict, says)
		d.expect()
		if v, _ := d.stored(); v.State != registry.VolumeReady {
			t.Errorf("%q: %s", says, v.State)
		}
	}
}

func TestDelete(t *testing.T) {
	for what, faults := range map[string][]fault{"well": nil, "gone already": {failed("NOT_FOUND")}} {
		d := open(t, of(registry.CreateDelete), ready())
		d.made["vol-data"], d.faults = true, faults
		noErr(t, what, d.Controller.Delete(t.Context(), call, name))
		d.expect("DeleteVolume vol-data")
		if _, found := d.stored(); found {
			t.Errorf("%s: the record is still there", what)
		}
		if err := d.Controller.Delete(t.Context(), registry.Call{ID: "op-2", Method: "Test"}, name); !errors.Is(err,
			registry.ErrNotFound) {
			t.Errorf("%s, another call: %v", what, err)
		}
	}
}

// If the plugin refuses a deletion, the volume returns to its earlier state.
func TestRefusedDeletionKeepsTheVolume(t *testing.T) {
	for what, faults := range map[string][]fault{
		"at once":                     {failed("PERMISSION_DENIED")},
		"in use, after an unsure try": {uncertain("INTERNAL", false), failed("FAILED_PRECONDITION")},
	} {
		synctest.Test(t, func(t *testing.T) {
			d := open(t, of(registry.CreateDelete), ready())
			d.made["vol-data"], d.faults = true, faults
			if err := d.Controller.Delete(t.Context(), call, name); err == nil ||
				errors.Is(err, registry.ErrUncertain) {
				t.Errorf("%s: %v", what, err)
			}
			if v, _ := d.stored(); v.State != registry.VolumeReady || v.External != key.External {
				t.Errorf("%s: %+v", what, v)
			}
			if kinds := d.kinds(); !slices.Contains(kinds, registry.EventVolumeKept) {
				t.Errorf("%s: events %v", what, kinds)
			}
			if err := d.Controller.Delete(t.Context(), call, name); err != nil || len(d.made) != 0 {
				t.Errorf("%s, later: %v, %v", what, err, d.made)
			}
		})
	}
}
