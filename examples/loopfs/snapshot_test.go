package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/internal/installed"
)

func TestSnapshotAndRestore(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		id, s := p.create("a", writer).VolumeId, m.staging("s")
		step(t, "stage", p.stage(id, s, writer), codes.OK)
		write(t, s, "old")
		step(t, "unstage", p.unstage(id, s), codes.OK)

		before := time.Now()
		snap, err := p.snapshot("snap", id)
		if err != nil || !snap.ReadyToUse || snap.SizeBytes != 16<<20 || snap.SourceVolumeId != id ||
			snap.CreationTime.AsTime().Before(before.Add(-time.Second)) ||
			snap.CreationTime.AsTime().After(time.Now()) {
			t.Fatalf("snapshot %v, %v", snap, err)
		}
		step(t, "stage", p.stage(id, s, writer), codes.OK)
		write(t, s, "new")
		step(t, "unstage", p.unstage(id, s), codes.OK)
		again, err := p.snapshot("snap", id)
		if err != nil || again.SnapshotId != snap.SnapshotId ||
			!again.CreationTime.AsTime().Equal(snap.CreationTime.AsTime()) {
			t.Errorf("the same again is %v, %v", again, err)
		}
		cloned, err := p.createFrom("clone", id, writer, 0, 0)
		if err != nil || cloned.CapacityBytes != 16<<20 || cloned.GetContentSource().GetVolume().GetVolumeId() != id {
			t.Fatalf("clone: %v, %v", cloned, err)
		}
		step(t, "delete the source", p.delete(id), codes.OK)
		restored, err := p.createFrom("restored", snap.SnapshotId, writer, 32<<20, 0)
		if err != nil || restored.CapacityBytes != 32<<20 ||
			restored.GetContentSource().GetSnapshot().GetSnapshotId() != snap.SnapshotId {
			t.Fatalf("restore: %v, %v", restored, err)
		}
		step(t, "delete the snapshot", p.deleteSnapshot(snap.SnapshotId), codes.OK)
		step(t, "delete the snapshot again", p.deleteSnapshot(snap.SnapshotId), codes.OK)
		replay, err := p.createFrom("restored", snap.SnapshotId, writer, 32<<20, 0)
		if err != nil || replay.VolumeId != restored.VolumeId {
			t.Errorf("the same again, without its source: %v, %v", replay, err)
		}

		s2 := m.staging("s2") // all of them on one node at a time
		step(t, "stage the clone", p.stage(cloned.VolumeId, s, writer), codes.OK)
		step(t, "stage the restored", p.stage(restored.VolumeId, s2, reader), codes.OK)
		expectText(t, s, "new")
		expectText(t, s2, "old")
		usage, _, err := p.stats(restored.VolumeId, s2)
		if err != nil || usage.Total < 24<<20 {
			t.Errorf("the larger copy has %v, %v", usage, err)
		}
		step(t, "unstage", p.unstage(cloned.VolumeId, s), codes.OK)
		step(t, "unstage", p.unstage(restored.VolumeId, s2), codes.OK)
		step(t, "delete", p.delete(cloned.VolumeId), codes.OK)
		step(t, "delete", p.delete(restored.VolumeId), codes.OK)
		if left := m.volumeFiles(); len(left) > 0 {
			t.Errorf("left are %q", left)
		}
	})
}

func TestSnapshotTable(t *testing.T) {
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir", "--mode", "controller", "--capacity", "96MiB")
	id, other := p.create("a", writer).VolumeId, p.create("b", multi).VolumeId
	none, noSnap := string(disk.IDFor(disk.Volume, "none")), string(disk.IDFor(disk.Snapshot, "none"))
	snap, err := p.snapshot("s", id)
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		name, source string
		want         codes.Code
	}{
		"no name":       {"", id, codes.InvalidArgument},
		"no source":     {"x", "", codes.InvalidArgument},
		"hostile name":  {"../x", id, codes.InvalidArgument},
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
		"unknown volume":    {"x", none, writer, 0, 0, codes.NotFound},
		"foreign volume":    {"x", "somebody-elses", writer, 0, 0, codes.NotFound},
		"no id":             {"x", "", writer, 0, 0, codes.InvalidArgument},
		"hostile id":        {"x", "../x", writer, 0, 0, codes.InvalidArgument},
		"of itself":         {"none", none, writer, 0, 0, codes.InvalidArgument},
		"too much":          {"x", id, writer, 64 << 20, 0, codes.ResourceExhausted},
		"a taken name":      {"a", other, writer, 0, 0, codes.AlreadyExists},
	} {
		_, err := p.createFrom(c.name, c.source, c.cap, c.least, c.most)
		step(t, "create from "+what, err, c.want)
	}
	_, err = p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "x", VolumeCapabilities: []*csi.VolumeCapability{writer}, VolumeContentSource: &csi.VolumeContentSource{},
	})
	step(t, "create from nothing", err, codes.InvalidArgument)
	step(t, "delete no snapshot", p.deleteSnapshot(""), codes.InvalidArgument)
	step(t, "delete an unknown snapshot", p.deleteSnapshot("somebody-elses"), codes.OK)
	step(t, "delete a volume as a snapshot", p.deleteSnapshot(id), codes.OK)
	step(t, "delete a snapshot as a volume", p.delete(snap.SnapshotId), codes.OK)
	for id, want := range map[string]codes.Code{
		"": codes.InvalidArgument, noSnap: codes.NotFound, snap.SnapshotId: codes.OK, id: codes.NotFound,
	} {
		got, err := p.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
		step(t, "get snapshot "+id, err, want)
		if want == codes.OK && got.Snapshot.SourceVolumeId == "" {
			t.Errorf("it is %v", got)
		}
	}
	if ids, _ := p.list(0, ""); len(ids) != 2 {
		t.Errorf("snapshots are listed as volumes: %q", ids)
	}
}

func TestListSnapshots(t *testing.T) {
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir", "--mode", "controller")
	a, b := p.create("a", writer).VolumeId, p.create("b", writer).VolumeId
	var made []string
	of := map[string][]string{}
	for name, source := range map[string]string{"1": a, "2": b, "3": a, "4": a, "5": b} {
		snap, err := p.snapshot(name, source)
		if err != nil {
			t.Fatal(err)
		}
		made, of[source] = append(made, snap.SnapshotId), append(of[source], snap.SnapshotId)
	}
	slices.Sort(made)
	slices.Sort(of[a])
	for what, c := range map[string]struct {
		req  *csi.ListSnapshotsRequest
		want []string
	}{
		"all":         {&csi.ListSnapshotsRequest{}, made},
		"one page":    {&csi.ListSnapshotsRequest{MaxEntries: 2}, made[:2]},
		"the next":    {&csi.ListSnapshotsRequest{MaxEntries: 2, StartingToken: made[1]}, made[2:4]},
		"the rest":    {&csi.ListSnapshotsRequest{StartingToken: made[3]}, made[4:]},
		"by id":       {&csi.ListSnapshotsRequest{SnapshotId: made[2]}, made[2:3]},
		"by source":   {&csi.ListSnapshotsRequest{SourceVolumeId: a}, of[a]},
		"no such id":  {&csi.ListSnapshotsRequest{SnapshotId: "none"}, nil},
		"no source":   {&csi.ListSnapshotsRequest{SourceVolumeId: "none"}, nil},
		"both differ": {&csi.ListSnapshotsRequest{SnapshotId: of[a][0], SourceVolumeId: b}, nil},
	} {
		if got := p.snapshots(c.req); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", what, got, c.want)
		}
	}
	for _, req := range []*csi.ListSnapshotsRequest{{StartingToken: "x"}, {StartingToken: a}} {
		_, err := p.ListSnapshots(t.Context(), req)
		step(t, "a token of nothing", err, codes.Aborted)
	}
	_, err := p.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: -1})
	step(t, "negative max", err, codes.InvalidArgument)
}

// A snapshot of a mounted volume has everything that was written before it, needs no repair, and is of one moment: of
// two files that are always written one after the other, it never has more of the later one.
func TestSnapshotInUse(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
	step(t, "stage", p.stage(id, s, writer), codes.OK)
	step(t, "publish", p.publish(id, s, target, writer, false), codes.OK)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		appendBoth(t, target, stop)
	}()
	names := []string{"s1", "s2", "s3"}
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(target, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := p.snapshot(name, id); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	<-stopped
	s2 := m.staging("s2")
	for _, name := range names {
		snap := string(disk.IDFor(disk.Snapshot, disk.Name(name)))
		if out, err := exec.Command("e2fsck", "-f", "-n",
			filepath.Join(m.data, "images", snap+".img")).CombinedOutput(); err != nil {
			t.Errorf("snapshot %s needs repair: %v\n%s", name, err, out)
		}
		v, err := p.createFrom("r"+name, snap, writer, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		step(t, "stage", p.stage(v.VolumeId, s2, writer), codes.OK)
		if first, second := sizeOf(t, s2, "first"), sizeOf(t, s2, "second"); first < second {
			t.Errorf("snapshot %s has %d bytes of what is written first, and %d of the second", name, first, second)
		}
		if sizeOf(t, s2, name) != 2 {
			t.Errorf("snapshot %s lacks what was written before it", name)
		}
		step(t, "unstage", p.unstage(v.VolumeId, s2), codes.OK)
	}
	step(t, "unpublish", p.unpublish(id, target), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
}

// appendBoth appends to two files in turns.
func appendBoth(t *testing.T, dir string, stop <-chan struct{}) {
	var files []*os.File
	for _, name := range []string{"first", "second"} {
		f, err := os.Create(filepath.Join(dir, name))
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

func sizeOf(t *testing.T, dir, name string) int64 {
	t.Helper()
	st, err := os.Stat(filepath.Join(dir, name))
	if os.IsNotExist(err) {
		return 0
	}
	if err != nil {
		t.Fatal(err)
	}
	return st.Size()
}

// What cannot be frozen is not copied while it is written to, and the error says what to do.
func TestSnapshotOfWhatCannotBeFrozen(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		c, r := writer, reader
		if backend == disk.LoopBackend {
			c, r = blockOf(writer), blockOf(reader)
		}
		id, s, target := p.create("a", c).VolumeId, m.staging("s"), m.target("t")
		step(t, "stage", p.stage(id, s, c), codes.OK)
		step(t, "publish", p.publish(id, s, target, c, false), codes.OK)
		_, err := p.snapshot("s", id)
		if m.reflinks() && backend == disk.LoopBackend {
			step(t, "snapshot", err, codes.OK)
		} else if step(t, "snapshot", err, codes.FailedPrecondition); !strings.Contains(status.Convert(err).Message(),
			"unpublish it first") {
			t.Errorf("the error does not say what to do: %v", err)
		}
		step(t, "unpublish", p.unpublish(id, target), codes.OK)
		_, err = p.snapshot("s", id)
		step(t, "snapshot of what is staged", err, codes.OK)
		step(t, "unstage", p.unstage(id, s), codes.OK)
		step(t, "stage", p.stage(id, s, r), codes.OK)
		step(t, "publish", p.publish(id, s, target, r, true), codes.OK)
		_, err = p.snapshot("s2", id)
		step(t, "snapshot of what is only read", err, codes.OK)
		step(t, "unpublish", p.unpublish(id, target), codes.OK)
		step(t, "unstage", p.unstage(id, s), codes.OK)
	})
}

// Where the data directory has reflinks, even a raw volume that is written to can be copied: with all that was written
// before.
func TestReflinks(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	m.dataOnXFS()
	p := m.start("csi", "--backend", "loop")
	raw := blockOf(multi)
	id, s, target := p.create("a", raw).VolumeId, m.staging("s"), m.target("t")
	step(t, "stage", p.stage(id, s, raw), codes.OK)
	step(t, "publish", p.publish(id, s, target, raw, false), codes.OK)
	f, err := os.OpenFile(target, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(pattern, 1<<20); err != nil { // and not synced
		t.Fatal(err)
	}
	snap, err := p.snapshot("s", id)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(make([]byte, len(pattern)), 1<<20); err != nil {
		t.Fatal(err)
	}
	f.Close()
	step(t, "unpublish", p.unpublish(id, target), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	restored, err := p.createFrom("r", snap.SnapshotId, raw, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	step(t, "stage", p.stage(restored.VolumeId, s, raw), codes.OK)
	step(t, "publish", p.publish(restored.VolumeId, s, target, raw, false), codes.OK)
	expectPattern(t, target, 1<<20)
	step(t, "unpublish", p.unpublish(restored.VolumeId, target), codes.OK)
	step(t, "unstage", p.unstage(restored.VolumeId, s), codes.OK)
	p.stop()
}

// Copies of one xfs are mounted beside each other, and a copy is of its source's type.
func TestCopiesOfXFS(t *testing.T) {
	need(t, disk.LoopBackend)
	installed.FileSystem(t, "xfs")
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop", "--capacity", "2GiB")
	xfs := mountOf(writer, "xfs", "")
	made, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "a",
		VolumeCapabilities: []*csi.VolumeCapability{xfs}})
	if err != nil || made.Volume.CapacityBytes != 300<<20 {
		t.Fatalf("the smallest xfs is %v, %v", made, err)
	}
	id, s, s2 := made.Volume.VolumeId, m.staging("s"), m.staging("s2")
	step(t, "stage", p.stage(id, s, xfs), codes.OK)
	write(t, s, "kept")
	_, err = p.createFrom("b", id, writer, 0, 0)
	step(t, "clone as ext4", err, codes.InvalidArgument)
	clone, err := p.createFrom("b", id, mountOf(writer, "", ""), 400<<20, 0)
	if err != nil {
		t.Fatal(err)
	}
	step(t, "stage the clone as ext4", p.stage(clone.VolumeId, s2, writer), codes.FailedPrecondition)
	step(t, "stage the clone", p.stage(clone.VolumeId, s2, mountOf(writer, "", "")), codes.OK)
	expectText(t, s2, "kept")
	if size := bytesAt(t, s2); size < 330<<20 {
		t.Errorf("the larger clone has %d bytes", size)
	}
	write(t, s2, "other")
	expectText(t, s, "kept")
	step(t, "unstage", p.unstage(clone.VolumeId, s2), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
}
