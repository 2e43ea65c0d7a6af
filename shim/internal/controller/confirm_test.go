package controller

import (
	"context"
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/csi"
)

func TestRefusalsAreConfirmed(t *testing.T) {
	type records = []registry.Record
	creating, other, file := ready(), ready(), ready().VolumeSpec
	creating.State = registry.VolumeCreating
	other.Plugin = "nfs"
	file.External, file.FSType = "", "xfs"
	snap := registry.VolumeSnapshot{SnapshotSpec: snapSpec, State: registry.SnapshotReady, Plugin: "ebs",
		External: "snap-1", Source: key.External}
	processed := snap
	processed.State = registry.SnapshotProcessing
	attached := attachedTo("n1")
	put := func(r registry.Record) registry.Change { return registry.Change{Put: records{r}} }
	gone := func(r registry.Record) registry.Change { return registry.Change{Delete: []registry.Key{r.Key()}} }
	has := of(registry.CreateDelete, registry.ControllerExpand, registry.ModifyVolume, registry.AttachDetach,
		registry.CreateSnapshot)

	operations := map[string]func(context.Context, *snapshotDesk) error{
		"create": func(ctx context.Context, d *snapshotDesk) error {
			return errOf(d.desk.Controller.Create(ctx, call, spec()))
		},
		"delete": func(ctx context.Context, d *snapshotDesk) error {
			return d.desk.Controller.Delete(ctx, call, name)
		},
		"deregister": func(ctx context.Context, d *snapshotDesk) error {
			return d.desk.Controller.Deregister(ctx, name)
		},
		"expand": func(ctx context.Context, d *snapshotDesk) error {
			return errOf(d.desk.Controller.Expand(ctx, call, name, registry.CapacityRange{Required: large}))
		},
		"modify": func(ctx context.Context, d *snapshotDesk) error {
			return errOf(d.desk.Controller.Modify(ctx, call, name, tier("gold")))
		},
		"update": func(ctx context.Context, d *snapshotDesk) error {
			return errOf(d.desk.Controller.Update(ctx, call, file, false))
		},
		"detach": func(ctx context.Context, d *snapshotDesk) error {
			return errOf(d.desk.Controller.DetachVolume(ctx, call, name, "n1", registry.Force{By: "ada"}))
		},
		"snapshot": func(ctx context.Context, d *snapshotDesk) error {
			return errOf(d.Snapshots.Create(ctx, call, snapSpec))
		},
		"delete snapshot": func(ctx context.Context, d *snapshotDesk) error {
			return d.Snapshots.Delete(ctx, call, snapName)
		},
		"blocks": func(ctx context.Context, d *snapshotDesk) error { return errOf(d.readySnapshot(ctx, snapName)) },
	}
	for what, c := range map[string]struct {
		records records
		refusal error
		change  registry.Change
		of      []string // operations
	}{
		"a new volume": {nil, registry.ErrNotFound, put(ready()),
			[]string{"delete", "deregister", "expand", "modify", "update", "snapshot"}},
		"a volume that has become ready": {records{creating}, registry.ErrConflict, put(ready()),
			[]string{"expand", "modify", "update", "snapshot"}},
		"a released volume": {records{ready(), attached, claimed()}, registry.ErrConflict, gone(claimed()),
			[]string{"detach"}},
		"an unused volume": {records{ready(), claimed()}, registry.ErrConflict, gone(claimed()),
			[]string{"delete", "update"}},
		"a deleted volume": {records{other}, registry.ErrExists, gone(other), []string{"create"}},
		"a new attachment": {records{ready()}, registry.ErrNotFound, put(attached), []string{"detach"}},
		"a new snapshot":   {records{ready()}, registry.ErrNotFound, put(snap), []string{"delete snapshot", "blocks"}},
		"a ready snapshot": {records{ready(), processed}, registry.ErrConflict, put(snap), []string{"blocks"}},
	} {
		for _, operation := range c.of {
			t.Run(operation+" "+what, func(t *testing.T) {
				d := openSnapshots(t, has, answer(snapReady))
				d.drop(ready().Key())
				d.put(c.records...)
				wantErr(t, "without the change", operations[operation](t.Context(), d), c.refusal, "")
				d.desk.Controller.State = &registrytest.Late{State: d.log, Change: c.change}
				noErr(t, "with the change", operations[operation](t.Context(), d))
			})
		}
	}
}

func TestNewSnapshotIsNotTakenForThePluginsID(t *testing.T) {
	snap := registry.VolumeSnapshot{SnapshotSpec: snapSpec, State: registry.SnapshotReady, Plugin: "ebs",
		External: "snap-1", Source: key.External}
	restored := spec()
	restored.SnapshotID = registry.ExternalID(snap.ID)
	d := open(t, of(registry.CreateDelete, registry.CreateSnapshot))
	d.spoil = func(answer *csi.Created) { answer.Source = registry.Source{Snapshot: snap.External} }
	d.Controller.State = &registrytest.Late{State: d.log, Change: registry.Change{Put: []registry.Record{snap}}}
	_, err := d.Controller.Create(t.Context(), call, restored)
	noErr(t, "Create", err)
	if sent := d.last.create.Source.Snapshot; sent != snap.External {
		t.Errorf("the plugin was asked for snapshot %q, want %q", sent, snap.External)
	}
}
