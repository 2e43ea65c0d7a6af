package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// slow is a program, such as mkfs.ext4, that reports that it runs, waits, and then writes noise to its last argument.
type slow struct {
	*testing.T
	dir string
}

func newSlow(t *testing.T, m *machine, program string) slow {
	t.Helper()
	s := slow{t, filepath.Join(m.base, "bin")}
	must(t, os.Mkdir(s.dir, 0o700))
	must(t, os.WriteFile(filepath.Join(s.dir, program),
		[]byte("#!/bin/sh\nexec 2>/dev/null\necho > "+s.dir+"/running\nread line < "+
			s.dir+"/go\nfor f; do :; done\nhead -c 65536 /dev/urandom >$f\n: > "+s.dir+"/done\n"), 0o700))
	must(t, unix.Mkfifo(filepath.Join(s.dir, "running"), 0o600))
	must(t, unix.Mkfifo(filepath.Join(s.dir, "go"), 0o600))
	return s
}

// runSlow starts loopfs with the loop backend and a slow program.
func runSlow(t *testing.T, program string) (*machine, *process, slow) {
	t.Helper()
	need(t, loopBackend)
	m := newMachine(t)
	s := newSlow(t, m, program)
	return m, m.startCommand("csi", []string{self(t)}, s.env(), "--backend", "loop"), s
}

func (s slow) env() []string { return []string{"PATH=" + s.dir + ":" + os.Getenv("PATH")} }

func (s slow) awaitRunning() {
	s.Helper()
	_, err := os.ReadFile(filepath.Join(s.dir, "running"))
	must(s.T, err)
}

// finish lets the program write.
func (s slow) finish() {
	s.Helper()
	must(s.T, os.WriteFile(filepath.Join(s.dir, "go"), []byte("\n"), 0))
	until(s.T, "the slow program has written", func() bool {
		_, err := os.Stat(filepath.Join(s.dir, "done"))
		return err == nil
	})
}

// begin makes a call that does not end by itself.
func begin(call func() error) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- call() }()
	return ended
}

// A mkfs that outlives its loopfs does not write to the volume.
func TestKillWhileAFileSystemIsMade(t *testing.T) {
	m, p, mkfs := runSlow(t, "mkfs.ext4")
	ended := begin(func() error { _, err := p.tryCreate("a", "", 0, 0, writer); return err })
	mkfs.awaitRunning()
	p.kill()
	step(t, "the killed call", <-ended, codes.Unavailable)
	if left := m.volumeFiles(); len(left) != 1 {
		t.Errorf("the kill was not in the middle: there are %q", left)
	}

	p = m.start("csi", "--backend", "loop")
	id, s := p.create("a", writer).VolumeId, m.staging("s")
	step(t, "stage", p.stage(id, s, writer), codes.OK)
	write(t, s, "kept")
	mkfs.finish()
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "stage again", p.stage(id, s, writer), codes.OK)
	expectText(t, s, "kept")
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "delete", p.delete(id), codes.OK)
	m.expectNoVolumes()
}

// The files that a killed process has left of a volume are removed by the next call for it, at another process.
func TestAnotherProcessRemovesWhatAKillLeft(t *testing.T) {
	m, p, mkfs := runSlow(t, "mkfs.ext4")
	other := m.start("other", "--backend", "loop")
	ended := begin(func() error { _, err := p.tryCreate("a", "", 0, 0, writer); return err })
	mkfs.awaitRunning()
	p.kill()
	step(t, "the killed call", <-ended, codes.Unavailable)
	step(t, "delete", other.delete(string(idFor(volumeKind, "a"))), codes.OK)
	m.expectNoVolumes()
	mkfs.finish()
}

// A group is not deleted while one of its snapshots is copied.
func TestGroupIsNotDeletedWhileItIsCopied(t *testing.T) {
	need(t, dirBackend)
	m := newMachine(t)
	cp := newSlow(t, m, "cp")
	p := m.start("csi", "--backend", "dir")
	id := p.create("a", writer).VolumeId
	g, err := p.snapshotGroup("g", id)
	must(t, err)
	slow := m.startCommand("slow", []string{self(t)}, cp.env(), "--backend", "dir")
	ended := begin(func() error { _, err := slow.tryCreate("b", g.Snapshots[0].SnapshotId, 0, 0, writer); return err })
	cp.awaitRunning()
	step(t, "delete the group", p.deleteGroup(g.GroupSnapshotId), codes.Aborted)
	cp.finish()
	<-ended
	step(t, "delete the group", p.deleteGroup(g.GroupSnapshotId), codes.OK)
}

// A process that is stopped while a volume is frozen thaws it first.
func TestStopWhileFrozen(t *testing.T) {
	m, p, cp := runSlow(t, "cp")
	id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
	p.bringUp(id, s, target, writer)
	t.Cleanup(func() { thaw(target) }) // after a failure
	ended := begin(func() error { _, err := p.snapshot("s", id); return err })
	cp.awaitRunning()
	p.stop() // which takes stopTimeout
	<-ended
	awaitWrite(t, begin(func() error { return os.WriteFile(filepath.Join(target, "f"), []byte("late"), 0o600) }))
	m.start("csi", "--backend", "loop").takeDown(id, s, target)
}

// A second call for a volume gets ABORTED at once, also from a second process. A call for another volume does not wait.
func TestOneCallPerVolume(t *testing.T) {
	m, p, mkfs := runSlow(t, "mkfs.ext4")
	ended := begin(func() error { _, err := p.tryCreate("a", "", 0, 0, writer); return err })
	mkfs.awaitRunning()
	other := m.start("other", "--backend", "loop") // its start does not remove what p makes
	id, s := string(idFor(volumeKind, "a")), m.staging("s")
	for _, p := range []*process{p, other} {
		_, created := p.tryCreate("a", "", 0, 0, writer)
		_, snapped := p.snapshot("s", id)
		for what, err := range map[string]error{
			"create": created, "delete": p.delete(id), "stage": p.stage(id, s, writer), "unstage": p.unstage(id, s),
			"snapshot": snapped, "expand": p.expand(id, 32<<20, 0), "expand on the node": p.expandOnNode(id, s),
		} {
			step(t, what, err, codes.Aborted)
		}
		step(t, "delete another", p.delete(string(idFor(volumeKind, "b"))), codes.OK)
	}
	mkfs.finish()
	step(t, "the first call", <-ended, codes.OK)
	step(t, "delete", p.delete(id), codes.OK)
}

// A call whose caller has gone is ended, and leaves nothing.
func TestAbandonedCallLeavesNothing(t *testing.T) {
	m, p, mkfs := runSlow(t, "mkfs.ext4")
	ctx, cancel := context.WithCancel(t.Context())
	ended := begin(func() error {
		_, err := p.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: "a",
			VolumeCapabilities: []*csi.VolumeCapability{writer}})
		return err
	})
	mkfs.awaitRunning()
	cancel()
	step(t, "the abandoned call", <-ended, codes.Canceled)
	p.stop() // waits for running calls
	m.expectNoVolumes()
}

// The negative control: the leak check of every test finds a loop device without autoclear.
func TestLeakCheckFindsALeak(t *testing.T) {
	need(t, loopBackend)
	m := newMachine(t)
	image := filepath.Join(m.base, "image")
	must(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
	device, err := exec.Command("losetup", "--show", "-f", image).Output()
	must(t, err)
	leaked := m.loops()
	must(t, exec.Command("losetup", "-d", strings.TrimSpace(string(device))).Run())
	if len(leaked) != 1 {
		t.Errorf("the check finds %q", leaked)
	}
}
