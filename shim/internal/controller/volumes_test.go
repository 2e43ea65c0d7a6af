package controller

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
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
