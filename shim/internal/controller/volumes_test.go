package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

func TestCreate(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	v, err := d.Mediator.Create(t.Context(), call, spec())
	if err != nil || v.External != key.External || v.State != registry.VolumeReady || !v.Created || v.Capacity != 1<<30 || v.Context["pool"] != "p" {
		t.Fatalf("%+v, %v", v, err)
	}
	d.expect("CreateVolume data")
	if d.last.create.CapacityMin != 1<<20 || d.last.create.Secrets["token"].Reveal() != canary {
		t.Errorf("%+v", d.last.create)
	}
	d.view(func(view registry.View) {
		if op, found := view.Operation(call.ID); !found || len(op.Answer) == 0 {
			t.Error("the answer is not stored with the volume")
		}
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
	first, err := d.Mediator.Create(t.Context(), call, spec())
	if err != nil {
		t.Fatal(err)
	}
	d.crash()
	again, err := d.Mediator.Create(t.Context(), registry.Call{ID: "op-2"}, spec())
	if err != nil || again.CreateIndex != first.CreateIndex {
		t.Errorf("%+v, %v", again, err)
	}
	d.expect("CreateVolume data")
	other := spec()
	other.CapacityMax++
	if _, err := d.Mediator.Create(t.Context(), call, other); !errors.Is(err, registry.ErrExists) {
		t.Errorf("%v", err)
	}
	d.expect()
}

func TestTwoVolumesNeverShareANameAtTheirPlugin(t *testing.T) {
	d := open(t, of(registry.CreateDelete), ready())
	other := spec()
	other.Namespace, other.Name = "theirs", "data"
	if _, err := d.Mediator.Create(t.Context(), call, other); !errors.Is(err, registry.ErrExists) {
		t.Errorf("%v", err)
	}
	d.expect()
}

// theirs is another volume that is to have the name of the first.
func theirs() registry.VolumeSpec {
	s := spec()
	s.Namespace, s.Name = "theirs", "data"
	return s
}

// What is being created, or deleted, has its name already, or still; what is registered or inline has none at the plugin, whatever it is called.
func TestWhoHasANameAtItsPlugin(t *testing.T) {
	as := func(change func(*registry.Volume)) registry.Volume {
		v := ready()
		change(&v)
		return v
	}
	for what, c := range map[string]struct {
		known registry.Volume
		taken bool
	}{
		"created":             {ready(), true},
		"being created":       {as(func(v *registry.Volume) { v.State, v.External = registry.VolumeCreating, "" }), true},
		"being deleted":       {as(func(v *registry.Volume) { v.State = registry.VolumeDeleting }), true},
		"registered":          {as(func(v *registry.Volume) { v.Created, v.External = false, "vol-other" }), false},
		"inline":              {as(func(v *registry.Volume) { v.Created, v.Ephemeral, v.External = false, true, "vol-other" }), false},
		"of another plugin":   {as(func(v *registry.Volume) { v.Plugin = "other" }), false},
		"of a name like it":   {as(func(v *registry.Volume) { v.Name, v.External = "data-2", "vol-data-2" }), false},
		"of a name within it": {as(func(v *registry.Volume) { v.Name, v.External = "dat", "vol-dat" }), false},
		"of its id as an id":  {as(func(v *registry.Volume) { v.Name, v.External = "else", "vol-else" }), false},
	} {
		d := open(t, of(registry.CreateDelete), c.known)
		d.crash() // an earlier shim has made it
		_, err := d.Mediator.Create(t.Context(), call, theirs())
		if c.taken != errors.Is(err, registry.ErrExists) || c.taken != (err != nil) {
			t.Errorf("%s: %v", what, err)
		}
		if asked := len(d.journal) > 0; asked == c.taken {
			t.Errorf("%s: the plugin was asked %q", what, d.journal)
		}
	}
}

// The name of a volume that is gone is free, and so is one that a volume has given up.
func TestNamesThatAreFreeAgain(t *testing.T) {
	inline := ready()
	inline.Name, inline.External, inline.Created, inline.Ephemeral = "r", "csi-1", false, true
	for what, giveUp := range map[string]func(*desk) error{
		"deleted":              func(d *desk) error { return d.Mediator.Delete(d.t.Context(), registry.Call{ID: "op-2"}, name) },
		"deregistered":         func(d *desk) error { return d.Mediator.Deregister(d.t.Context(), registry.Call{ID: "op-2"}, name) },
		"replaced by another":  func(d *desk) error { d.put(inline); return nil },
		"forgotten, then read": func(d *desk) error { err := d.Mediator.Deregister(d.t.Context(), call, name); d.crash(); return err },
	} {
		d := open(t, of(registry.CreateDelete), ready())
		if _, err := d.Mediator.Create(t.Context(), call, theirs()); !errors.Is(err, registry.ErrExists) {
			t.Errorf("%s, before that: %v", what, err)
		}
		if err := giveUp(d); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := d.Mediator.Create(t.Context(), registry.Call{ID: "op-3"}, theirs()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := d.Mediator.Create(t.Context(), registry.Call{ID: "op-4"}, spec()); !errors.Is(err, registry.ErrExists) {
			t.Errorf("%s, the first again: %v", what, err)
		}
	}
}

// A commit that failed leaves no name taken; one that nobody knows of leaves it taken if it came true.
func TestFailedCommitLeavesNoNameTaken(t *testing.T) {
	full := registry.Errorf(registry.ErrExhausted, "the disk is full")
	for what, c := range map[string]struct {
		fail  func(*registrytest.Log)
		taken bool
	}{
		"not written":              {func(l *registrytest.Log) { l.Fail(full) }, false},
		"unknown, and not there":   {func(l *registrytest.Log) { l.Lose(false) }, false},
		"unknown, and it is there": {func(l *registrytest.Log) { l.Lose(true) }, true},
	} {
		d := open(t, of(registry.CreateDelete))
		c.fail(d.log)
		if _, err := d.Mediator.Create(t.Context(), call, spec()); err == nil {
			t.Errorf("%s: no error", what)
		}
		d.expect()
		if what != "not written" {
			d.crash()
		}
		if _, err := d.Mediator.Create(t.Context(), registry.Call{ID: "op-2"}, theirs()); c.taken != (err != nil) {
			t.Errorf("%s: another volume of that name: %v", what, err)
		}
	}
}

// However many want one name at the same time, one gets it, and the plugin is asked once.
func TestOneOfManyGetsTheName(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	errs := make([]error, 8)
	var wg sync.WaitGroup
	for i := range errs {
		s := theirs()
		s.Namespace = registry.Namespace(fmt.Sprint("of-", i))
		wg.Go(func() {
			_, errs[i] = d.Mediator.Create(t.Context(), registry.Call{ID: registry.OperationID(fmt.Sprint("op-", i))}, s)
		})
	}
	wg.Wait()
	won := 0
	for _, err := range errs {
		if err == nil {
			won++
		} else if !errors.Is(err, registry.ErrExists) && !errors.Is(err, registry.ErrConflict) {
			t.Error(err)
		}
	}
	d.expect("CreateVolume data")
	d.view(func(v registry.View) {
		if n := len(v.VolumesNamed("ebs", "data")); won != 1 || n != 1 || len(v.Volumes()) != 1 {
			t.Errorf("%d have the name, and %d were told so: %v", n, won, v.Volumes())
		}
	})
}

func TestRefusedCreationLeavesNothing(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	d.faults = []fault{failed("INVALID_ARGUMENT")}
	if _, err := d.Mediator.Create(t.Context(), call, spec()); err == nil || errors.Is(err, registry.ErrUncertain) {
		t.Errorf("%v", err)
	}
	if v, found := d.stored(); found {
		t.Errorf("left behind: %+v", v)
	}
	better := spec()
	better.CapacityMin = 0
	if _, err := d.Mediator.Create(t.Context(), call, better); err != nil {
		t.Error(err)
	}
}

// A volume that was made while nobody heard the answer is found again by its name.
func TestUnheardCreationIsFoundAgain(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	d.faults = []fault{uncertain("FAILED_PRECONDITION", true)}
	if _, err := d.Mediator.Create(t.Context(), call, spec()); !errors.Is(err, registry.ErrUncertain) {
		t.Fatalf("%v", err)
	}
	if v, _ := d.stored(); v.State != registry.VolumeCreating {
		t.Errorf("%+v", v)
	}
	d.crash()
	if v, err := d.Mediator.Create(t.Context(), call, spec()); err != nil || v.State != registry.VolumeReady {
		t.Errorf("%+v, %v", v, err)
	}
	d.expect("CreateVolume data", "CreateVolume data")
	if len(d.made) != 1 {
		t.Errorf("made: %v", d.made)
	}
}

func TestHalfCreatedVolumeIsFoundAndDeleted(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	d.faults = []fault{uncertain("FAILED_PRECONDITION", true)}
	_, _ = d.Mediator.Create(t.Context(), call, spec())
	d.crash()
	if err := d.Mediator.Delete(t.Context(), call, name); err != nil {
		t.Fatal(err)
	}
	d.expect("CreateVolume data", "CreateVolume data", "DeleteVolume vol-data")
	if _, found := d.stored(); found || len(d.made) != 0 {
		t.Errorf("left behind: %v, %v", found, d.made)
	}
}

func TestCommitLostAfterCreation(t *testing.T) {
	for _, written := range []bool{true, false} {
		d := open(t, of(registry.CreateDelete))
		d.spoil = func(*Created) { d.log.Lose(written) }
		if _, err := d.Mediator.Create(t.Context(), call, spec()); !errors.Is(err, registry.ErrUncertain) {
			t.Errorf("%v", err)
		}
		d.spoil = nil
		d.crash()
		if v, err := d.Mediator.Create(t.Context(), call, spec()); err != nil || v.External != key.External {
			t.Errorf("written %v: %+v, %v", written, v, err)
		}
	}
}

func TestHostileAnswersAreNotStored(t *testing.T) {
	big := map[string]string{"k": strings.Repeat("x", 5000)}
	for what, spoil := range map[string]func(*Created){
		"no volume":         func(c *Created) { *c = Created{} },
		"empty id":          func(c *Created) { c.VolumeID = "" },
		"over-long id":      func(c *Created) { c.VolumeID = strings.Repeat("x", 129) },
		"invalid UTF-8":     func(c *Created) { c.VolumeID = "a\xff" },
		"line break":        func(c *Created) { c.VolumeID = "a\nb" },
		"path":              func(c *Created) { c.VolumeID = "a/../../etc" },
		"large context":     func(c *Created) { c.Context = big },
		"large topology":    func(c *Created) { c.Accessible = []registry.Topology{big} },
		"negative size":     func(c *Created) { c.Capacity = -1 },
		"volume of another": func(c *Created) { c.VolumeID = "vol-other" },
	} {
		t.Run(what, func(t *testing.T) {
			other := ready()
			other.ID, other.Name, other.External, other.Created = "other", "other", "vol-other", false
			d := open(t, of(registry.CreateDelete), other)
			d.spoil = spoil
			_, err := d.Mediator.Create(t.Context(), call, spec())
			if !errors.Is(err, registry.ErrInternal) && !errors.Is(err, registry.ErrExists) {
				t.Errorf("%v", err)
			}
			if v, found := d.stored(); !found || v.State != registry.VolumeCreating || v.External != "" || v.Context != nil {
				t.Errorf("%+v, %v", v, found)
			}
			// It never leads to the deletion of what is somebody else's, and can be forgotten.
			_ = d.Mediator.Delete(t.Context(), call, name)
			if slices.ContainsFunc(d.journal, func(s string) bool { return strings.HasPrefix(s, "DeleteVolume") }) {
				t.Errorf("%q", d.journal)
			}
			if err := d.Mediator.Deregister(t.Context(), call, name); err != nil {
				t.Error(err)
			}
			if _, found := d.stored(); found {
				t.Error("still there")
			}
		})
	}
}

func TestCreateSendsOnlyWhatWasAnnounced(t *testing.T) {
	zone := []registry.Topology{{"zone": "a"}}
	preferring, requiring, newer := spec(), spec(), spec()
	preferring.Preferred, requiring.Required = zone, zone
	newer.Capabilities = []registry.VolumeCapability{{Access: registry.SingleNodeMultiWriter, Attachment: registry.FileSystem}}
	for _, c := range []struct {
		name string
		caps []registry.Capability
		spec registry.VolumeSpec
		kind error
	}{
		{"nothing", nil, spec(), registry.ErrUnsupported},
		{"preferred topology without it", []registry.Capability{registry.CreateDelete}, preferring, nil},
		{"required topology without it", []registry.Capability{registry.CreateDelete}, requiring, registry.ErrUnsupported},
		{"required topology", []registry.Capability{registry.CreateDelete, registry.PluginTopology}, requiring, nil},
		{"newer mode without it", []registry.Capability{registry.CreateDelete}, newer, registry.ErrUnsupported},
		{"newer mode", []registry.Capability{registry.CreateDelete, registry.ControllerMulti}, newer, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, of(c.caps...))
			_, err := d.Mediator.Create(t.Context(), call, c.spec)
			if c.kind != nil {
				if !errors.Is(err, c.kind) {
					t.Errorf("%v", err)
				}
				d.expect()
				return
			}
			topology := slices.Contains(c.caps, registry.PluginTopology)
			if got := d.last.create; err != nil || topology != (len(got.Required)+len(got.Preferred) > 0) {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

func TestCreateWaitsForItsController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, table{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := d.Mediator.Create(ctx, call, spec()); !errors.Is(err, registry.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		if _, found := d.stored(); found {
			t.Error("a volume that nobody was asked for is recorded")
		}
	})
}

func TestNodeOnlyPluginCannotCreate(t *testing.T) {
	node := with()
	node.Role = registry.RoleNode
	d := open(t, table{registry.RoleNode: node})
	if _, err := d.Mediator.Create(t.Context(), call, spec()); !errors.Is(err, registry.ErrUnsupported) {
		t.Errorf("%v", err)
	}
}

func TestRegister(t *testing.T) {
	known := spec()
	known.External = key.External
	node := with()
	node.Role = registry.RoleNode
	refuse := func(v Validated, err error) func(ValidateRequest) (Validated, error) {
		return func(ValidateRequest) (Validated, error) { return v, err }
	}
	for _, c := range []struct {
		name    string
		plugins table
		confirm func(ValidateRequest) (Validated, error)
		asked   []string
		kind    error
	}{
		{"confirmed", of(), nil, []string{"ValidateVolumeCapabilities vol-data"}, nil},
		{"nothing confirmed", of(), refuse(Validated{Message: "no"}, nil), []string{"ValidateVolumeCapabilities vol-data"}, registry.ErrInvalid},
		{"another confirmed", of(), refuse(Validated{Confirmed: []registry.VolumeCapability{{Access: registry.MultiNodeReaderOnly, Attachment: registry.FileSystem}}}, nil),
			[]string{"ValidateVolumeCapabilities vol-data"}, registry.ErrInvalid},
		{"not implemented", of(), refuse(Validated{}, &registry.CallError{Code: "UNIMPLEMENTED", Outcome: registry.OutcomeFailed, Kind: registry.ErrUnsupported}),
			[]string{"ValidateVolumeCapabilities vol-data"}, nil},
		{"unknown there", of(), refuse(Validated{}, &registry.CallError{Code: "NOT_FOUND", Outcome: registry.OutcomeFailed, Kind: registry.ErrNotFound}),
			[]string{"ValidateVolumeCapabilities vol-data"}, registry.ErrNotFound},
		{"no controller", table{registry.RoleNode: node}, nil, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, c.plugins)
			d.plugin.confirm = c.confirm
			v, err := d.Mediator.Register(t.Context(), call, known)
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
			if again, err := d.Mediator.Register(t.Context(), call, known); err != nil || again.CreateIndex != v.CreateIndex {
				t.Errorf("again: %+v, %v", again, err)
			}
		})
	}
}

func TestExternalIDIsUniquePerPlugin(t *testing.T) {
	d := open(t, of(), ready())
	other := spec()
	other.ID, other.External = "alias", key.External
	if _, err := d.Mediator.Register(t.Context(), call, other); !errors.Is(err, registry.ErrExists) || !strings.Contains(err.Error(), "data") {
		t.Errorf("%v", err)
	}
	other.External = ""
	if _, err := d.Mediator.Register(t.Context(), call, other); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("without an external id: %v", err)
	}
}

// uses are records each of which says that the volume is in use.
func uses() map[string][]registry.Record {
	return map[string][]registry.Record{
		"alloc a1":   {claimed()},
		"published":  {registry.Ref{Volume: key, Alloc: "a2", Request: "r", Publish: registry.MarkSent}},
		"staged":     {registry.Placement{Volume: key, Stage: registry.MarkSent}},
		"node i-7":   {registry.Placement{Volume: key, Attach: registry.MarkSent, Node: "i-7"}},
		"since 2001": {func() registry.Claim { c := claimed(); c.Since = time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC); return c }()},
	}
}

// The plugin hears nothing of the deletion of a volume that is in use.
func TestDeleteAsksNobodyWhileInUse(t *testing.T) {
	for says, records := range uses() {
		d := open(t, of(registry.CreateDelete), append(records, ready())...)
		if err := d.Mediator.Delete(t.Context(), call, name); !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", says, err)
		}
		if err := d.Mediator.Deregister(t.Context(), call, name); !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", says, err)
		}
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
		if err := d.Mediator.Delete(t.Context(), call, name); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		d.expect("DeleteVolume vol-data")
		if _, found := d.stored(); found {
			t.Errorf("%s: the record is still there", what)
		}
		if err := d.Mediator.Delete(t.Context(), call, name); err != nil {
			t.Errorf("%s, the same call again: %v", what, err)
		}
		if err := d.Mediator.Delete(t.Context(), registry.Call{ID: "op-2", Method: "Test"}, name); !errors.Is(err, registry.ErrNotFound) {
			t.Errorf("%s, another call: %v", what, err)
		}
	}
}

func TestDeletionThatFailsGoesOnLater(t *testing.T) {
	d := open(t, of(registry.CreateDelete), ready())
	d.made["vol-data"], d.faults = true, []fault{uncertain("INVALID_ARGUMENT", true)}
	if err := d.Mediator.Delete(t.Context(), call, name); err == nil {
		t.Error("no error")
	}
	if v, _ := d.stored(); v.State != registry.VolumeDeleting {
		t.Errorf("state %s", v.State)
	}
	d.crash()
	if _, err := d.Mediator.Create(t.Context(), call, spec()); !errors.Is(err, registry.ErrConflict) && !errors.Is(err, registry.ErrExists) {
		t.Errorf("%v", err)
	}
	if err := d.Mediator.Delete(t.Context(), call, name); err != nil || len(d.made) != 0 {
		t.Errorf("%v, %v", err, d.made)
	}
}

// A volume that its plugin refuses to delete, because it has snapshots or whatever, is as it was.
func TestRefusedDeletionKeepsTheVolume(t *testing.T) {
	for what, faults := range map[string][]fault{
		"at once":                     {failed("PERMISSION_DENIED")},
		"in use, after an unsure try": {uncertain("INTERNAL", false), failed("FAILED_PRECONDITION")},
	} {
		synctest.Test(t, func(t *testing.T) {
			d := open(t, of(registry.CreateDelete), ready())
			d.made["vol-data"], d.faults = true, faults
			if err := d.Mediator.Delete(t.Context(), call, name); err == nil || errors.Is(err, registry.ErrUncertain) {
				t.Errorf("%s: %v", what, err)
			}
			if v, _ := d.stored(); v.State != registry.VolumeReady || v.External != key.External {
				t.Errorf("%s: %+v", what, v)
			}
			if kinds := d.kinds(); !slices.Contains(kinds, registry.EventVolumeKept) {
				t.Errorf("%s: events %v", what, kinds)
			}
			if err := d.Mediator.Delete(t.Context(), call, name); err != nil || len(d.made) != 0 {
				t.Errorf("%s, later: %v, %v", what, err, d.made)
			}
		})
	}
}

// The answer of a deletion that had to find out about the creation first is stored under its own call, not under that of the creation.
func TestDeletionAnswersForItself(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	d.faults = []fault{uncertain("FAILED_PRECONDITION", true)}
	_, _ = d.Mediator.Create(t.Context(), call, spec())
	remove := registry.Call{ID: "op-2", Method: "Delete", Digest: "d2"}
	d.faults = []fault{{}, failed("PERMISSION_DENIED")} // it is found, and not deleted
	if err := d.Mediator.Delete(t.Context(), remove, name); err == nil {
		t.Error("no error")
	}
	d.view(func(v registry.View) {
		if op, found := v.Operation(remove.ID); found {
			t.Errorf("an answer is stored for a call that failed: %+v", op)
		}
	})
	if err := d.Mediator.Delete(t.Context(), remove, name); err != nil {
		t.Fatal(err)
	}
	d.view(func(v registry.View) {
		if op, _ := v.Operation(remove.ID); op.Method != remove.Method || op.Digest != remove.Digest {
			t.Errorf("%+v", op)
		}
	})
}

func TestRegisteredVolumeIsForgottenNotDeleted(t *testing.T) {
	v := ready()
	v.Created = false
	d := open(t, of(registry.CreateDelete), v)
	d.made["vol-data"] = true
	if err := d.Mediator.Delete(t.Context(), call, name); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("%v", err)
	}
	if err := d.Mediator.Deregister(t.Context(), call, name); err != nil {
		t.Error(err)
	}
	d.expect()
	if _, found := d.stored(); found || len(d.made) != 1 {
		t.Errorf("stored %v, made %v", found, slices.Collect(maps.Keys(d.made)))
	}
}
