package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

func TestGroupSnapshotIsWholeOrNot(t *testing.T) {
	m, p := runLoopfs(t, dirBackend, "--capacity", "80MiB")
	a, b := p.create("a", writer).VolumeId, p.create("b", writer).VolumeId
	g, err := p.snapshotGroup("g", a, b)
	must(t, err)
	ids := []string{g.Snapshots[0].GetSnapshotId(), g.Snapshots[1].GetSnapshotId()}
	if !g.ReadyToUse || g.Snapshots[0].GroupSnapshotId != g.GroupSnapshotId || g.CreationTime == nil {
		t.Errorf("group %v", g)
	}
	if again, err := p.snapshotGroup("g", b, a, b); err != nil || again.String() != g.String() {
		t.Errorf("again: %v, %v, want %v", again, err, g)
	}
	for what, c := range map[string]struct {
		name    string
		sources []string
		want    codes.Code
	}{
		"of other volumes":  {"g", []string{a}, codes.AlreadyExists},
		"of no volumes":     {"h", nil, codes.InvalidArgument},
		"of a missing one":  {"h", []string{a, string(idFor(volumeKind, "none"))}, codes.NotFound},
		"without space":     {"h", []string{a, b}, codes.ResourceExhausted}, // for the second snapshot
		"with a wrong name": {"h\b", []string{a}, codes.InvalidArgument},
	} {
		_, err := p.snapshotGroup(c.name, c.sources...)
		step(t, what, err, c.want)
	}
	get := func(id string, snapshots ...string) error {
		_, err := p.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{
			GroupSnapshotId: id, SnapshotIds: snapshots,
		})
		return err
	}
	step(t, "get", get(g.GroupSnapshotId, ids...), codes.OK)
	step(t, "get with other snapshots", get(g.GroupSnapshotId, ids[0]), codes.InvalidArgument)
	step(t, "delete with other snapshots", p.deleteGroup(g.GroupSnapshotId, ids[0], a), codes.InvalidArgument)
	step(t, "delete a member", p.deleteSnapshot(ids[0]), codes.InvalidArgument)
	if list, err := p.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{}); err != nil || len(list.Entries) != 2 {
		t.Errorf("snapshots: %v, %v", list, err)
	}
	for range 2 {
		step(t, "delete", p.deleteGroup(g.GroupSnapshotId, ids...), codes.OK)
	}
	step(t, "get the deleted", get(g.GroupSnapshotId), codes.NotFound)
	for _, id := range []string{a, b} {
		step(t, "delete", p.delete(id), codes.OK)
	}
	m.expectNoVolumes()
}

// Two files in two volumes grow in turns. A group snapshot never has more of the second one than of the first.
func TestGroupSnapshotIsOfOneMoment(t *testing.T) {
	m, p := runLoopfs(t, loopBackend)
	var ids, stages, targets []string
	for _, name := range []string{"first", "second"} {
		ids = append(ids, p.create(name, writer).VolumeId)
		stages, targets = append(stages, m.staging("s"+name)), append(targets, m.target(name))
		p.bringUp(ids[len(ids)-1], stages[len(stages)-1], targets[len(targets)-1], writer)
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		appendBoth(t, stop, filepath.Join(targets[0], "f"), filepath.Join(targets[1], "f"))
	}()
	restored := m.staging("restored")
	size := func(snapshot string) int64 {
		v, err := p.tryCreate("r"+snapshot, snapshot, 0, 0, writer)
		must(t, err)
		step(t, "stage", p.stage(v.VolumeId, restored, writer), codes.OK)
		st, err := os.Stat(filepath.Join(restored, "f"))
		must(t, err)
		step(t, "unstage", p.unstage(v.VolumeId, restored), codes.OK)
		return st.Size()
	}
	until(t, "both files exist", func() bool {
		_, err := os.Stat(filepath.Join(targets[1], "f"))
		return err == nil
	})
	for _, name := range []string{"g1", "g2", "g3"} {
		g, err := p.snapshotGroup(name, ids...)
		must(t, err)
		sizes := map[string]int64{}
		for _, s := range g.Snapshots {
			sizes[s.SourceVolumeId] = size(s.SnapshotId)
		}
		if sizes[ids[0]] < sizes[ids[1]] {
			t.Errorf("group %s has %d bytes of the first file, %d of the second", name, sizes[ids[0]], sizes[ids[1]])
		}
	}
	close(stop)
	<-stopped
	for i, id := range ids {
		p.takeDown(id, stages[i], targets[i])
	}
}
