package controller

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// The table updates each field of a volume file, once while the volume is used and once while it is not.
func TestUpdateOfEachField(t *testing.T) {
	const never = "it is fixed when the volume is created"
	for what, c := range map[string]struct {
		change func(*registry.VolumeSpec)
		used   string // the error while the volume is in use; "": none
		unused string
		calls  []string // the calls of a successful change
	}{
		"nothing": {func(*registry.VolumeSpec) {}, "", "", nil},
		"secrets": {
			func(s *registry.VolumeSpec) { s.Secrets = map[string]registry.Secret{"token": {Env: "OTHER"}} },
			"", "", nil},
		"mutable parameters": {func(s *registry.VolumeSpec) { s.Mutable = tier("gold") }, "", "", []string{modifyGold}},
		"a further capability": {func(s *registry.VolumeSpec) {
			s.Capabilities = append(slices.Clone(s.Capabilities), registry.VolumeCapability{
				Access: registry.SingleNodeReaderOnly, Attachment: registry.FileSystem})
		}, "", "", []string{"ValidateVolumeCapabilities vol-data"}},
		"another capability": {func(s *registry.VolumeSpec) {
			s.Capabilities = []registry.VolumeCapability{{Access: registry.SingleNodeReaderOnly,
				Attachment: registry.FileSystem}}
		}, "claimed by alloc", "", []string{"ValidateVolumeCapabilities vol-data"}},
		"mount options": {func(s *registry.VolumeSpec) { s.FSType, s.MountFlags = "xfs", "noatime" },
			"claimed by alloc", "", []string{"ValidateVolumeCapabilities vol-data"}},
		"ownership": {func(s *registry.VolumeSpec) { s.Ownership.Owner = "1000" }, "claimed by alloc", "",
			[]string{"ValidateVolumeCapabilities vol-data"}},
		"plugin":     {func(s *registry.VolumeSpec) { s.Plugin = "nfs" }, never, never, nil},
		"name":       {func(s *registry.VolumeSpec) { s.Name = "other" }, never, never, nil},
		"parameters": {func(s *registry.VolumeSpec) { s.Parameters = tier("gold") }, never, never, nil},
		"source":     {func(s *registry.VolumeSpec) { s.SnapshotID = "s" }, never, never, nil},
		"topology": {func(s *registry.VolumeSpec) { s.Required = []registry.Topology{{"zone": "z"}} }, never, never,
			nil},
		"external id": {func(s *registry.VolumeSpec) { s.External = "vol-other" }, "another volume", "another volume",
			nil},
		"size": {func(s *registry.VolumeSpec) { s.CapacityMin = large << 12 },
			"holdfast volume expand", "holdfast volume expand", nil},
		"a fixed field beside another": {func(s *registry.VolumeSpec) {
			s.Name, s.Secrets = "other", nil
		}, "nothing was changed; name: " + never, never, nil},
	} {
		for _, used := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, used: %v", what, used), func(t *testing.T) {
				records, want := []registry.Record{ready()}, c.unused
				if used {
					records, want = append(records, claimed()), c.used
				}
				d := open(t, modifies(), records...)
				file := ready().VolumeSpec
				file.External, file.Context = "", nil
				c.change(&file)
				would, err := d.Update(t.Context(), call, file, true)
				if err != nil || len(would.Changes) == 0 != (what == "nothing") {
					t.Errorf("dry run: %+v, %v", would.Changes, err)
				}
				if now, _ := d.stored(); now.ModifyIndex != would.Volume.ModifyIndex {
					t.Error("a dry run changes the volume")
				}
				d.expect()
				_, err = d.Update(t.Context(), call, file, false)
				wantErr(t, "", err, nil, want)
				now, _ := d.stored()
				if want != "" {
					d.expect()
					if len(compare(now, ready().VolumeSpec)) > 0 {
						t.Errorf("it has changed: %+v", now)
					}
					return
				}
				d.expect(c.calls...)
				if diff := compare(now, file); len(diff) > 0 || !now.Created {
					t.Errorf("left: %+v", diff)
				}
				v, err := d.Controller.Create(t.Context(), call, file)
				if err != nil || v.State != registry.VolumeReady {
					t.Errorf("the same file to create it: %v", err)
				}
			})
		}
	}
}

// Snapshots with the same secrets as their volume get its new secrets, even more than fit into one commit. Other
// snapshots keep theirs. The volume gets them last, so an interrupted update can be repeated.
func TestSnapshotsGetTheNewSecretsOfTheirVolume(t *testing.T) {
	d := openSnapshots(t, modifies())
	const count = 3 * registry.Batch
	own := map[string]registry.Secret{"token": {Env: "OWN"}}
	for i := range count + 1 {
		snap := registry.VolumeSnapshot{Plugin: key.Plugin, Source: key.External, State: registry.SnapshotReady}
		snap.Namespace, snap.ID, snap.Volume = "default", registry.SnapshotID(fmt.Sprint("s", i)), "data"
		if snap.Secrets = own; i < count {
			snap.Secrets = ready().Secrets
		}
		d.put(snap)
	}
	file := ready().VolumeSpec
	file.Secrets = map[string]registry.Secret{"token": {Env: "NEW"}}
	for _, interrupted := range []bool{true, false} {
		if interrupted {
			d.log.LoseAfter(1, false)
		}
		_, err := d.desk.Controller.Update(t.Context(), call, file, false)
		if interrupted == (err == nil) {
			t.Fatal(err)
		}
		if interrupted {
			d.restart()
		}
		list, _ := d.Snapshots.List(t.Context())
		secrets := map[string]int{} // how many snapshots have each
		for _, s := range list {
			secrets[s.Secrets["token"].Env]++
		}
		v, _ := d.stored()
		whole := secrets["NEW"] == count && v.Secrets["token"].Env == "NEW"
		if whole == interrupted || secrets["NEW"] < registry.Batch || secrets["OWN"] != 1 {
			t.Errorf("interrupted %v: snapshots with each secret: %v; volume %v", interrupted, secrets, v.Secrets)
		}
	}
}

// If the plugin refuses mutable parameters, the error names the fields that were changed before.
func TestUpdateNamesWhatChangedBeforeARefusal(t *testing.T) {
	d := open(t, modifies(), ready())
	d.faults = []fault{failed("INVALID_ARGUMENT")}
	file := ready().VolumeSpec
	file.Secrets, file.Mutable = map[string]registry.Secret{"token": {Env: "NEW"}}, tier("lead")
	_, err := d.Update(t.Context(), call, file, false)
	now, _ := d.stored()
	if err == nil || !strings.Contains(err.Error(), "the rest was changed: secrets.token") ||
		now.Secrets["token"].Env != "NEW" || len(now.Mutable) > 0 {
		t.Errorf("%v, %+v", err, now)
	}
}

// The creation of an existing volume from a changed file fails, and the error names the command that applies it.
func TestCreateWithAChangedFileNamesUpdate(t *testing.T) {
	d := open(t, modifies(), ready())
	file := spec()
	file.FSType = "xfs"
	_, err := d.Controller.Create(t.Context(), call, file)
	if !errors.Is(err, registry.ErrExists) || !strings.Contains(err.Error(), "mount_options.fs_type") ||
		!strings.Contains(err.Error(), "holdfast volume update FILE") {
		t.Error(err)
	}
}

// A volume that Holdfast created may be deleted after it was deregistered and registered or adopted again. Other
// registered volumes may not. A deleted volume is not remembered, and the number of remembered volumes is bounded.
func TestCreatedVolumeCanBeDeletedAfterItsReturn(t *testing.T) {
	back := ready().VolumeSpec
	for what, again := range map[string]func(*desk, context.Context) error{
		"registered": func(d *desk, ctx context.Context) error { _, err := d.Register(ctx, back); return err },
		"adopted": func(d *desk, ctx context.Context) error {
			d.described = csi.Entry{Volume: key.External, Context: back.Context}
			_, err := d.Adopt(ctx, back)
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			d := open(t, of(registry.CreateDelete, registry.GetVolume), ready())
			for range 2 {
				noErr(t, "", d.Deregister(t.Context(), name))
				d.crash()
				noErr(t, "", again(d, t.Context()))
			}
			noErr(t, "", d.Controller.Delete(t.Context(), call, name))
			d.view(func(view registry.View) {
				if all := view.AllDeregistered(); len(all) > 0 {
					t.Errorf("left: %v", all)
				}
			})
			noErr(t, "", again(d, t.Context()))
			wantErr(t, "a registered volume", d.Controller.Delete(t.Context(), call, name), registry.ErrInvalid, "")
		})
	}
	d := open(t, of(registry.CreateDelete))
	var remembered []registry.Record
	for i := range maxDeregistered + 5 {
		v := ready()
		v.ID, v.External = registry.VolumeID(fmt.Sprint("v", i)), registry.ExternalID(fmt.Sprint("x", i))
		if i < maxDeregistered-5 {
			remembered = append(remembered, registry.Deregistered{Volume: v.VolumeKey()})
			continue
		}
		d.put(append(remembered, v)...)
		remembered = nil
		noErr(t, "", d.Deregister(t.Context(), v.VolumeName()))
	}
	d.view(func(view registry.View) {
		_, oldest := view.Deregistered(registry.VolumeKey{Plugin: key.Plugin, External: "x0"})
		_, newest := view.Deregistered(registry.VolumeKey{Plugin: key.Plugin, External: "x1004"})
		if n := len(view.AllDeregistered()); n != maxDeregistered || oldest || !newest {
			t.Errorf("%d are remembered, the oldest: %v, the newest: %v", n, oldest, newest)
		}
	})
}

// If a field is added to volume files, an update must compare it.
func TestUpdateComparesEachFieldOfAVolumeFile(t *testing.T) {
	for _, field := range reflect.VisibleFields(reflect.TypeFor[registry.VolumeSpec]()) {
		v, file := registry.Volume{Capacity: 2}, registry.VolumeSpec{}
		switch field.Name {
		case "Namespace", "ID": // they name another volume
			continue
		case "CapacityMin":
			v.Capacity = 0
		}
		fill(reflect.ValueOf(&file).Elem().FieldByIndex(field.Index))
		if changes := compare(v, file); len(changes) != 1 {
			t.Errorf("%s: %+v", field.Name, changes)
		}
	}
}

// fill sets v to a value that is not zero. Of a struct it sets the first field.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString("x")
	case reflect.Int64:
		v.SetInt(1)
	case reflect.Struct:
		fill(v.Field(0))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		one := reflect.New(v.Type().Elem()).Elem()
		fill(one)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("x"), one)
	}
}
