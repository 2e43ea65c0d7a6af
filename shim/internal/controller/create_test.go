package controller

import (
	"context"
	"slices"
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/csi"
)

// The next shim has to compute the hash of a creation that this one has left open. So only a new field may change this
// hash, not another order of the fields.
func TestHashOfAnOpenCreationStays(t *testing.T) {
	v := registry.Volume{VolumeSpec: registrytest.Filled[registry.VolumeSpec](t, 0), Created: true}
	const want = "74431e6212307684bc70253ab6f5ddfbf1414bcf5b94ad1f8fd8de7728fdbcf1"
	if got := createHash(v); got != want {
		t.Errorf("hash %q, want %q", got, want)
	}
}

// While an executor creates the volume of a job, the alloc may end at another node, which records that the volume is to
// be deleted. The result of the creation keeps that record, so no alloc can claim the volume.
func TestCreationKeepsADiscardOfAnotherNode(t *testing.T) {
	for _, usable := range []bool{true, false} {
		d := open(t, of(registry.CreateDelete))
		d.spoil = func(c *csi.Created) {
			v, _ := d.stored()
			v.DeleteWith = "a1"
			d.put(v)
			if !usable {
				c.Capacity = -1
			}
		}
		_, err := d.Controller.Create(t.Context(), call, spec())
		if v, _ := d.stored(); v.DeleteWith != "a1" || v.State == registry.VolumeReady || (err == nil) != usable {
			t.Errorf("usable %v: %s, deleted with %q, %v", usable, v.State, v.DeleteWith, err)
		}
	}
}

// meddling is a vault that calls meddle first.
type meddling struct {
	vault
	meddle func()
}

func (m meddling) Resolve(
	ctx context.Context, refs map[string]registry.Secret,
) (map[string]registry.SecretValue, error) {
	m.meddle()
	return m.vault.Resolve(ctx, refs)
}

// A job's volume is infeasible for each reason for which its creation would be refused.
func TestFeasibleCreateSaysWhatCreateWouldMeet(t *testing.T) {
	zone := []registry.Topology{{"zone": "a"}}
	for what, c := range map[string]struct {
		change func(*registry.VolumeSpec)
		kind   registry.InfeasibleKind
	}{
		"nothing":              {func(*registry.VolumeSpec) {}, ""},
		"a name that is taken": {func(s *registry.VolumeSpec) { s.Name = "data" }, registry.InfeasibleNotReady},
		"a preference that is not required": {func(s *registry.VolumeSpec) {
			s.Required, s.Preferred = zone, []registry.Topology{{"zone": "b"}}
		}, registry.InfeasibleRequest},
		"a source that is unknown": {func(s *registry.VolumeSpec) { s.CloneID = "none" }, registry.InfeasibleNotReady},
	} {
		d := open(t, of(registry.CreateDelete, registry.PluginTopology, registry.CloneVolume), ready())
		s := spec()
		s.ID, s.Name = "other", "other"
		c.change(&s)
		var kinds []registry.InfeasibleKind
		d.view(func(view registry.View) {
			for _, r := range d.FeasibleCreate(view, s) {
				kinds = append(kinds, r.Kind)
			}
		})
		var want []registry.InfeasibleKind
		if c.kind != "" {
			want = append(want, c.kind)
		}
		err := errOf(d.Controller.Create(t.Context(), call, s))
		if !slices.Equal(kinds, want) || (err != nil) != (c.kind != "") {
			t.Errorf("%s: infeasible %q, want %q; %v", what, kinds, want, err)
		}
	}
}

// Before a creation is recorded, the deletion of its source may begin, or another source may get the name.
func TestSourceChangesBeforeItsCopyIsRecorded(t *testing.T) {
	deleting, other := ready(), ready()
	deleting.State, other.External = registry.VolumeDeleting, "vol-other"
	for _, source := range []registry.Volume{deleting, other} {
		d := open(t, of(registry.CreateDelete, registry.CloneVolume), ready())
		d.Controller = d.build(d.Plugins, meddling{meddle: func() { d.put(source) }})
		clone := spec()
		clone.ID, clone.CloneID, clone.CapacityMax = "copy", name.ID, 0
		wantErr(t, "", errOf(d.Controller.Create(t.Context(), call, clone)), registry.ErrConflict, "")
		d.expect()
	}
}

// A source that the file names by the plugin's id may have a record, which says that its deletion has begun.
func TestSourceThatIsBeingDeletedIsNotCopied(t *testing.T) {
	deleting := ready()
	deleting.State = registry.VolumeDeleting
	snap := registry.VolumeSnapshot{SnapshotSpec: snapSpec, Plugin: key.Plugin, Source: key.External,
		External: "snap-1", State: registry.SnapshotDeleting}
	for _, change := range []func(*registry.VolumeSpec){
		func(s *registry.VolumeSpec) { s.CloneExternal = key.External },
		func(s *registry.VolumeSpec) { s.SnapshotID = snap.External },
	} {
		d := open(t, of(registry.CreateDelete, registry.CloneVolume, registry.CreateSnapshot), deleting, snap)
		wantErr(t, "", errOf(d.Controller.Create(t.Context(), call, filled(change))), registry.ErrConflict,
			"is being deleted")
		d.expect()
	}
}
