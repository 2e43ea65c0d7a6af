package controller

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

var (
	groupSpec = registry.SnapshotSpec{Namespace: "default", ID: "g", Volumes: []registry.VolumeID{"data", "logs"}}
	groupName = groupSpec.SnapshotName()
)

const (
	createGroup = "CreateVolumeGroupSnapshot g of [vol-data vol-logs] with map[]"
	getGroup    = "GetVolumeGroupSnapshot group-1 [snap-1 snap-2]"
	deleteGroup = "DeleteVolumeGroupSnapshot group-1 [snap-1 snap-2]"
)

// groupAnswer returns the plugin's description of the group, after change has changed it.
func groupAnswer(change func(*csi.GroupSnapshot)) scriptedAnswer {
	g := csi.GroupSnapshot{ID: "group-1", Ready: true, Snapshots: []csi.Snapshot{ // the order does not matter
		{ID: "snap-2", Volume: "vol-logs", Size: 2 << 20, Ready: true, Group: "group-1"},
		{ID: "snap-1", Volume: "vol-data", Size: 1 << 20, Ready: true, Group: "group-1"}}}
	if change != nil {
		change(&g)
	}
	return scriptedAnswer{group: g}
}

func openGroup(t *testing.T, plugins table, answers ...scriptedAnswer) *snapshotDesk {
	d := openSnapshots(t, plugins, answers...)
	second := ready()
	second.ID, second.Name, second.External = "logs", "logs", "vol-logs"
	d.put(second)
	return d
}

func (d *snapshotDesk) group() registry.VolumeSnapshot {
	snap, err := d.Snapshots.snapshot(context.Background(), nameOf(groupSpec))
	if err != nil && !errors.Is(err, registry.ErrNotFound) {
		d.desk.t.Error(err)
	}
	return snap
}

// A group snapshot is created once its plugin has one snapshot of each volume and all are ready. If an outcome is not
// certain, the same call finds it out. An answer about another group is not used.
func TestGroupSnapshotIsCreatedOnceItIsReady(t *testing.T) {
	waits := groupAnswer(func(g *csi.GroupSnapshot) { g.Ready = false })
	for name, c := range map[string]struct {
		answers []scriptedAnswer
		state   registry.SnapshotState // "": no record
		calls   []string
		err     string
	}{
		"at once": {[]scriptedAnswer{groupAnswer(nil)}, registry.SnapshotReady, []string{createGroup}, ""},
		"later": {[]scriptedAnswer{waits, waits, groupAnswer(nil)}, registry.SnapshotReady,
			[]string{createGroup, getGroup, getGroup}, ""},
		"a member is not ready": {[]scriptedAnswer{
			groupAnswer(func(g *csi.GroupSnapshot) { g.Snapshots[0].Ready = false }),
			groupAnswer(nil)}, registry.SnapshotReady, []string{createGroup, getGroup}, ""},
		"after no answer": {[]scriptedAnswer{noAnswer("UNAVAILABLE"), groupAnswer(nil)}, registry.SnapshotReady,
			[]string{createGroup, createGroup}, ""},
		"refused": {[]scriptedAnswer{refused("FAILED_PRECONDITION")}, "", []string{createGroup}, "FAILED_PRECONDITION"},
		"refused after no answer": {[]scriptedAnswer{noAnswer("UNAVAILABLE"), refused("FAILED_PRECONDITION")},
			registry.SnapshotFailed, []string{createGroup, createGroup}, "group-snapshot delete"},
		"gone": {[]scriptedAnswer{waits, refused("NOT_FOUND")}, registry.SnapshotFailed,
			[]string{createGroup, getGroup}, "NOT_FOUND"},
		"a snapshot is missing": {
			[]scriptedAnswer{groupAnswer(func(g *csi.GroupSnapshot) { g.Snapshots = g.Snapshots[:1] })},
			registry.SnapshotFailed, []string{createGroup}, "has 1 snapshots, of 2 volumes"},
		"a volume twice": {
			[]scriptedAnswer{groupAnswer(func(g *csi.GroupSnapshot) { g.Snapshots[0].Volume = "vol-data" })},
			registry.SnapshotFailed, []string{createGroup}, `no snapshot of volume "vol-logs"`},
		"a snapshot twice": {[]scriptedAnswer{groupAnswer(func(g *csi.GroupSnapshot) { g.Snapshots[0].ID = "snap-1" })},
			registry.SnapshotFailed, []string{createGroup}, "twice"},
		"of another group": {[]scriptedAnswer{groupAnswer(func(g *csi.GroupSnapshot) { g.Snapshots[1].Group = "" })},
			registry.SnapshotFailed, []string{createGroup}, "says that it is in group"},
		"another id": {[]scriptedAnswer{waits, groupAnswer(func(g *csi.GroupSnapshot) { g.ID = "group-2" })},
			registry.SnapshotFailed, []string{createGroup, getGroup}, "called it"},
		"another member": {
			[]scriptedAnswer{waits, groupAnswer(func(g *csi.GroupSnapshot) { g.Snapshots[0].ID = "snap-3" })},
			registry.SnapshotFailed, []string{createGroup, getGroup}, "called it"},
		"without an id": {[]scriptedAnswer{{}}, registry.SnapshotFailed, []string{createGroup}, "external id"},
	} {
		runInBubble(t, name, func(t *testing.T) {
			d := openGroup(t, of(registry.GroupSnapshots), c.answers...)
			got, err := d.Create(t.Context(), call, groupSpec)
			wantErr(t, "", err, nil, c.err)
			if d.group().State != c.state {
				t.Errorf("%+v, want %q", d.group(), c.state)
			}
			d.wantJournal(c.calls...)
			if c.state != registry.SnapshotReady {
				return
			}
			if len(got.Members) != 2 || got.Members[1].External != "snap-2" ||
				d.plugin.secrets["token"].Reveal() != canary {
				t.Errorf("%+v, secrets %v", got, d.plugin.secrets)
			}
			noErr(t, "the same again", errOf(d.Create(t.Context(), call, groupSpec)))
			d.wantJournal()
		})
	}
}

func TestGroupSnapshotIsRefusedBeforeAnyCall(t *testing.T) {
	other := ready()
	other.ID, other.Name, other.External, other.Plugin = "logs", "logs", "vol-logs", "nfs"
	alias := ready()
	alias.ID, alias.Name, alias.Created = "logs", "logs", false
	taken := registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: "default", ID: "g-logs", Name: "x",
		Volume: "data"}, Plugin: key.Plugin, Source: key.External, State: registry.SnapshotReady}
	for name, c := range map[string]struct {
		capability registry.Capability
		known      registry.Record
		volumes    []registry.VolumeID
		kind       error
	}{
		"no capability":    {registry.CreateSnapshot, nil, groupSpec.Volumes, registry.ErrUnsupported},
		"two plugins":      {registry.GroupSnapshots, other, groupSpec.Volumes, registry.ErrInvalid},
		"one volume twice": {registry.GroupSnapshots, alias, groupSpec.Volumes, registry.ErrInvalid},
		"a volume is missing": {
			registry.GroupSnapshots, nil, []registry.VolumeID{"data", "none"}, registry.ErrNotFound},
		"a member's id taken": {registry.GroupSnapshots, taken, groupSpec.Volumes, registry.ErrExists},
	} {
		d := openGroup(t, of(c.capability), groupAnswer(nil))
		if c.known != nil {
			d.put(c.known)
		}
		spec := groupSpec
		spec.Volumes = c.volumes
		wantErr(t, name, errOf(d.Create(t.Context(), call, spec)), c.kind, "")
		d.wantJournal()
	}
}

// Two groups that are being taken do not share the ids of snapshots.
func TestMembersOfTwoGroupsHaveTheirOwnIDs(t *testing.T) {
	d := openGroup(t, of(registry.GroupSnapshots))
	group := func(id registry.SnapshotID, volume registry.VolumeID) registry.VolumeSnapshot {
		spec := registry.SnapshotSpec{
			Namespace: "default", ID: id, Name: string(id), Volumes: []registry.VolumeID{volume},
		}
		return registry.VolumeSnapshot{State: registry.SnapshotCreating, Plugin: key.Plugin, SnapshotSpec: spec}
	}
	d.put(group("a-b", "c"))
	d.view(func(view registry.View) {
		wantErr(t, "the same id", checkNames(view, group("a", "b-c")), registry.ErrExists, "")
		noErr(t, "", checkNames(view, group("a", "c")))
	})
}

// Volumes can be created from the members of a group snapshot. The members are deleted with the group only.
func TestMembersGoWithTheirGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openGroup(t, of(registry.GroupSnapshots, registry.CreateSnapshot, registry.CreateDelete), groupAnswer(nil))
		noErr(t, "", errOf(d.Create(t.Context(), call, groupSpec)))
		d.plugin.journal = nil
		member := registry.SnapshotName{Namespace: "default", ID: "g-logs"}
		list, _ := d.Snapshots.List(t.Context())
		if len(list) != 2 || list[1].SnapshotName() != member || list[1].Group != "group-1" || list[1].Size != 2<<20 {
			t.Errorf("listed: %+v", list)
		}
		d.view(func(view registry.View) {
			spec := ready().VolumeSpec
			spec.SnapshotID, spec.CapacityMin = "g-logs", 0
			if from, size, err := sourceOf(view, spec); err != nil || from.Snapshot != "snap-2" || size != 2<<20 {
				t.Errorf("%+v, %d, %v", from, size, err)
			}
		})
		for what, err := range map[string]error{"delete": d.Snapshots.Delete(t.Context(), call, member),
			"deregister": d.Deregister(t.Context(), call, member)} {
			wantErr(t, what, err, registry.ErrConflict, "group snapshot default/g")
		}
		same := registry.SnapshotSpec{Namespace: "default", ID: "g-logs", Volume: "logs"}
		wantErr(t, "another snapshot of that id", errOf(d.Create(t.Context(), call, same)), registry.ErrExists, "")
		d.wantJournal()
		d.plugin.answers = []scriptedAnswer{noAnswer("UNAVAILABLE"), {}}
		noErr(t, "", d.DeleteGroup(t.Context(), call, groupName))
		d.wantJournal(deleteGroup, deleteGroup)
		if list, _ := d.Snapshots.List(t.Context()); len(list) > 0 || d.group().State != "" {
			t.Errorf("left: %+v, %+v", list, d.group())
		}
	})
}

// If the answer to a group snapshot cannot be used, the group is deleted with the ids of that answer. It is not
// deleted if another record has one of the ids, or if the plugin says that a snapshot is of another volume.
func TestUnusableGroupSnapshotIsDeleted(t *testing.T) {
	theirs := registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: "default", ID: "s", Name: "s",
		Volume: "data"}, Plugin: key.Plugin, Source: key.External, External: "snap-1", State: registry.SnapshotReady}
	for what, c := range map[string]struct {
		change func(*csi.GroupSnapshot)
		known  registry.Record
		call   string // the call that deletes it
	}{
		"a snapshot is missing": {func(g *csi.GroupSnapshot) { g.Snapshots = g.Snapshots[:1] }, nil,
			"DeleteVolumeGroupSnapshot group-1 [snap-2]"},
		"of no volume": {func(g *csi.GroupSnapshot) { g.Snapshots[0].Volume = "" }, nil,
			"DeleteVolumeGroupSnapshot group-1 [snap-2 snap-1]"},
		"of another volume":     {func(g *csi.GroupSnapshot) { g.Snapshots[0].Volume = "vol-x" }, nil, ""},
		"without an id":         {func(g *csi.GroupSnapshot) { g.ID = "" }, nil, ""},
		"with a known snapshot": {nil, theirs, ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			d := openGroup(t, of(registry.GroupSnapshots), groupAnswer(c.change), groupAnswer(c.change))
			if c.known != nil {
				d.put(c.known)
			}
			if _, err := d.Create(t.Context(), call, groupSpec); err == nil {
				t.Errorf("%s: created", what)
			}
			d.wantJournal(createGroup)
			if c.call == "" {
				err := d.DeleteGroup(t.Context(), call, groupName)
				wantErr(t, what, err, nil, "deregister")
				d.wantJournal(createGroup)
				return
			}
			d.plugin.answers = []scriptedAnswer{noAnswer("UNAVAILABLE"), {}}
			noErr(t, what, d.DeleteGroup(t.Context(), call, groupName))
			d.wantJournal(c.call, c.call)
			if list, _ := d.Snapshots.List(t.Context()); d.group().State != "" || len(list) > 0 {
				t.Errorf("%s: left %+v", what, d.group())
			}
		})
	}
}

// Two group snapshots of the same volumes, and the deletion of a third one, do not deadlock.
func TestGroupSnapshotsOfTheSameVolumesEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openGroup(t, of(registry.GroupSnapshots))
		done := make(chan error)
		limited, stop := context.WithTimeout(t.Context(), time.Hour)
		defer stop()
		for _, id := range []registry.SnapshotID{"g", "h"} {
			spec := groupSpec
			spec.ID = id
			go func() { done <- errOf(d.Create(limited, call, spec)) }()
		}
		synctest.Wait()
		d.plugin.mu.Lock()
		if len(d.plugin.journal) != 1 {
			t.Errorf("in flight at once: %q", d.plugin.journal)
		}
		d.plugin.mu.Unlock()
		d.plugin.answer(refused("INVALID_ARGUMENT"))
		for range 2 {
			if err := <-done; err == nil || errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		}
	})
}
