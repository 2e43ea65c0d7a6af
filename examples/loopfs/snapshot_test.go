package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestSnapshotAndRestore(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m, p := runLoopfs(t, backend)
		id, s, s2 := p.create("a", writer).VolumeId, m.staging("s"), m.staging("s2")
		step(t, "stage", p.stage(id, s, writer), codes.OK)
		write(t, s, "old")
		step(t, "unstage", p.unstage(id, s), codes.OK)
		before := time.Now()
		snap, err := p.snapshot("snap", id)
		must(t, err)
		if made := snap.CreationTime.AsTime(); !snap.ReadyToUse || snap.SizeBytes != 16<<20 ||
			snap.SourceVolumeId != id ||
			made.Before(before.Add(-time.Second)) || made.After(time.Now()) {
			t.Errorf("snapshot %v", snap)
		}
		step(t, "stage", p.stage(id, s, writer), codes.OK)
		write(t, s, "new")
		step(t, "unstage", p.unstage(id, s), codes.OK)
		again, err := p.snapshot("snap", id)
		if err != nil || again.SnapshotId != snap.SnapshotId ||
			!again.CreationTime.AsTime().Equal(snap.CreationTime.AsTime()) {
			t.Errorf("the same snapshot again: %v, %v", again, err)
		}
		cloned, err := p.tryCreate("clone", id, 0, 0, writer)
		must(t, err)
		if cloned.CapacityBytes != 16<<20 || cloned.GetContentSource().GetVolume().GetVolumeId() != id {
			t.Errorf("clone: %v", cloned)
		}
		step(t, "delete the source", p.delete(id), codes.OK)
		restored, err := p.tryCreate("restored", snap.SnapshotId, 32<<20, 0, writer)
		must(t, err)
		if restored.CapacityBytes != 32<<20 ||
			restored.GetContentSource().GetSnapshot().GetSnapshotId() != snap.SnapshotId {
			t.Errorf("restored: %v", restored)
		}
		for range 2 {
			step(t, "delete the snapshot", p.deleteSnapshot(snap.SnapshotId), codes.OK)
		}
		replay, err := p.tryCreate("restored", snap.SnapshotId, 32<<20, 0, writer)
		if err != nil || replay.VolumeId != restored.VolumeId {
			t.Errorf("the same volume again, without its source: %v, %v", replay, err)
		}

		step(t, "stage the clone", p.stage(cloned.VolumeId, s, writer), codes.OK)
		step(t, "stage the restored", p.stage(restored.VolumeId, s2, reader), codes.OK)
		expectText(t, s, "new")
		expectText(t, s2, "old")
		usage, _, err := p.stats(restored.VolumeId, s2)
		if err != nil || usage.Total < 24<<20 {
			t.Errorf("the larger copy has %v, %v", usage, err)
		}
		for id, at := range map[string]string{cloned.VolumeId: s, restored.VolumeId: s2} {
			step(t, "unstage", p.unstage(id, at), codes.OK)
			step(t, "delete", p.delete(id), codes.OK)
		}
		m.expectNoVolumes()
	})
}

func TestSourcesOfSnapshotsAndVolumes(t *testing.T) {
	_, p := runLoopfs(t, dirBackend, "--capacity", "96MiB")
	id, other := p.create("a", writer).VolumeId, p.create("b", multi).VolumeId
	none, noSnap := string(idFor(volumeKind, "none")), string(idFor(snapshotKind, "none"))
	snap, err := p.snapshot("s", id)
	must(t, err)
	for what, c := range map[string]struct {
		name, source string
		want         codes.Code
	}{
		"unknown":       {"x", none, codes.NotFound},
		"of a snapshot": {"x", snap.SnapshotId, codes.NotFound},
		"of another":    {"s", other, codes.AlreadyExists},
		"again":         {"s", id, codes.OK},
	} {
		_, err := p.snapshot(c.name, c.source)
		step(t, "snapshot: "+what, err, c.want)
	}
	for what, c := range map[string]struct {
		name, source string
		cap          *csi.VolumeCapability
		least, most  int64
		want         codes.Code
	}{
		"smaller":           {"x", snap.SnapshotId, writer, 0, 15 << 20, codes.OutOfRange},
		"another backend's": {"x", snap.SnapshotId, blockOf(writer), 0, 0, codes.InvalidArgument},
		"another type":      {"x", snap.SnapshotId, mountOf(writer, "xfs", ""), 0, 0, codes.InvalidArgument},
		"unknown snapshot":  {"x", noSnap, writer, 0, 0, codes.NotFound},
		"foreign volume":    {"x", "somebody-elses", writer, 0, 0, codes.NotFound},
		"of itself":         {"none", none, writer, 0, 0, codes.InvalidArgument},
		"too much":          {"x", id, writer, 64 << 20, 0, codes.ResourceExhausted},
		"a taken name":      {"a", other, writer, 0, 0, codes.AlreadyExists},
	} {
		_, err := p.tryCreate(c.name, c.source, c.least, c.most, c.cap)
		step(t, "create from "+what, err, c.want)
	}
	_, err = p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "x", VolumeCapabilities: []*csi.VolumeCapability{writer}, VolumeContentSource: &csi.VolumeContentSource{},
	})
	step(t, "create from nothing", err, codes.InvalidArgument)
	step(t, "delete a volume as a snapshot", p.deleteSnapshot(id), codes.OK)
	step(t, "delete a snapshot as a volume", p.delete(snap.SnapshotId), codes.OK)
	for id, want := range map[string]codes.Code{noSnap: codes.NotFound, snap.SnapshotId: codes.OK, id: codes.NotFound} {
		_, err := p.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
		step(t, "get snapshot "+id, err, want)
	}
	for req, want := range map[*csi.ListSnapshotsRequest]int{
		{}: 1, {SourceVolumeId: id}: 1, {SourceVolumeId: other}: 0, {SnapshotId: snap.SnapshotId}: 1,
		{SnapshotId: id}: 0,
		{SnapshotId: snap.SnapshotId, SourceVolumeId: other}: 0,
	} {
		if answer, err := p.ListSnapshots(t.Context(), req); err != nil || len(answer.Entries) != want {
			t.Errorf("list %v: %v, %v, want %d", req, answer, err, want)
		}
	}
	if answer, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); err != nil || len(answer.Entries) != 2 {
		t.Errorf("volumes: %v, %v, want 2", answer, err)
	}
}

// A snapshot of a mounted volume has everything that was written before it, needs no repair, and is of one moment: of
// two files that grow in turns, it never has more of the second one than of the first.
func TestSnapshotInUse(t *testing.T) {
	m, p := runLoopfs(t, loopBackend)
	id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
	p.bringUp(id, s, target, writer)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		appendBoth(t, stop, filepath.Join(target, "first"), filepath.Join(target, "second"))
	}()
	names := []string{"s1", "s2", "s3"}
	for _, name := range names {
		must(t, os.WriteFile(filepath.Join(target, name), []byte(name), 0o600))
		_, err := p.snapshot(name, id)
		must(t, err)
	}
	close(stop)
	<-stopped
	s2 := m.staging("s2")
	size := func(name string) int64 {
		st, err := os.Stat(filepath.Join(s2, name))
		if os.IsNotExist(err) {
			return 0
		}
		must(t, err)
		return st.Size()
	}
	for _, name := range names {
		snap := string(idFor(snapshotKind, name))
		if out, err := exec.Command("e2fsck", "-f", "-n",
			filepath.Join(m.data, "volumes", snap, "image")).CombinedOutput(); err != nil {
			t.Errorf("snapshot %s needs repair: %v\n%s", name, err, out)
		}
		v, err := p.tryCreate("r"+name, snap, 0, 0, writer)
		must(t, err)
		step(t, "stage", p.stage(v.VolumeId, s2, writer), codes.OK)
		if first, second := size("first"), size("second"); first < second || size(name) != 2 {
			t.Errorf("snapshot %s has %d bytes of the first file, %d of the second, %d of that written before it", name,
				first, second, size(name))
		}
		step(t, "unstage", p.unstage(v.VolumeId, s2), codes.OK)
	}
	p.takeDown(id, s, target)
}

// appendBoth appends to two files in turns.
func appendBoth(t *testing.T, stop <-chan struct{}, first, second string) {
	var files []*os.File
	for _, path := range []string{first, second} {
		f, err := os.Create(path)
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		files = append(files, f)
	}
	for range 10 << 10 {
		for _, f := range files {
			if _, err := f.Write(make([]byte, 100)); err != nil {
				t.Error(err)
			}
		}
		select {
		case <-stop:
			return
		default:
		}
	}
	<-stop
}

// A volume that cannot be frozen is not copied while it is published for writing, and the error says what to do.
func TestSnapshotOfWhatCannotBeFrozen(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m, p := runLoopfs(t, backend)
		c, r := writer, reader
		if backend == loopBackend {
			c, r = blockOf(writer), blockOf(reader)
		}
		id, s, target := p.create("a", c).VolumeId, m.staging("s"), m.target("t")
		p.bringUp(id, s, target, c)
		_, err := p.snapshot("s", id)
		if step(t, "snapshot", err, codes.FailedPrecondition); !strings.Contains(status.Convert(err).Message(),
			"unpublish it first") {
			t.Errorf("the error does not say what to do: %v", err)
		}
		step(t, "unpublish", p.unpublish(id, target), codes.OK)
		_, err = p.snapshot("s", id)
		step(t, "snapshot of a staged volume", err, codes.OK)
		step(t, "unstage", p.unstage(id, s), codes.OK)
		p.bringUp(id, s, target, r)
		_, err = p.snapshot("s2", id)
		step(t, "snapshot of a volume that is only read", err, codes.OK)
		p.takeDown(id, s, target)
	})
}
