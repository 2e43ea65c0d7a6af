package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/disk"
)

// slow is a program that says that it runs, waits, and then writes to the file that it was given: what loopfs does with
// it can be stopped in its middle.
type slow struct{ dir string }

func newSlow(t *testing.T, m *machine, name string) slow {
	t.Helper()
	s := slow{filepath.Join(m.base, "bin")}
	script := "#!/bin/sh\necho > " + s.dir + "/running\nread line < " + s.dir + "/go\n" +
		"head -c 65536 /dev/urandom >&3\n: > " + s.dir + "/done\n"
	for _, err := range []error{
		os.Mkdir(s.dir, 0o700),
		os.WriteFile(filepath.Join(s.dir, name), []byte(script), 0o700),
		unix.Mkfifo(filepath.Join(s.dir, "running"), 0o600),
		unix.Mkfifo(filepath.Join(s.dir, "go"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func (s slow) env() []string { return []string{"PATH=" + s.dir + ":" + os.Getenv("PATH")} }

// awaitRunning returns when it runs; letGo ends it.
func (s slow) awaitRunning(t *testing.T) {
	t.Helper()
	if _, err := os.ReadFile(filepath.Join(s.dir, "running")); err != nil {
		t.Fatal(err)
	}
}

func (s slow) letGo(t *testing.T) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, "go"), []byte("\n"), 0); err != nil {
		t.Fatal(err)
	}
}

// awaitDone returns when it has written.
func (s slow) awaitDone(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(filepath.Join(s.dir, "done")); err == nil {
			return
		} else if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

func createRequest(name string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{writer}}
}

// begin makes a call that will not end by itself.
func begin(call func() error) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- call() }()
	return ended
}

func TestKillWhileAFileSystemIsMade(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	mkfs := newSlow(t, m, "mkfs.ext4")
	p := m.startCommand("csi", []string{self(t)}, mkfs.env(), "--backend", "loop")
	id, s := p.create("a", writer).VolumeId, m.staging("s")
	ended := begin(func() error { return p.stage(id, s, writer) })
	mkfs.awaitRunning(t)
	p.kill()
	step(t, "the call that was killed", <-ended, codes.Unavailable)
	if left := m.volumeFiles(); len(left) != 3 {
		t.Errorf("the kill was not in the middle: there are %q", left)
	}

	p = m.start("csi", "--backend", "loop") // the socket of the dead one is in the way, its mkfs still runs
	step(t, "stage", p.stage(id, s, writer), codes.OK)
	mkfs.letGo(t)
	mkfs.awaitDone(t)
	write(t, s, "kept")
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "stage again", p.stage(id, s, writer), codes.OK)
	expectText(t, s, "kept")
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "delete", p.delete(id), codes.OK)
	if left := m.volumeFiles(); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

func TestKillWhileACopyIsMade(t *testing.T) {
	need(t, disk.DirBackend)
	m := newMachine(t)
	cp := newSlow(t, m, "cp")
	p := m.startCommand("csi", []string{self(t)}, cp.env(), "--backend", "dir")
	id := p.create("a", writer).VolumeId
	before := m.volumeFiles()
	ended := begin(func() error { _, err := p.snapshot("s", id); return err })
	cp.awaitRunning(t)
	if made := p.snapshots(&csi.ListSnapshotsRequest{}); len(made) > 0 {
		t.Errorf("a half-made snapshot is listed: %v", made)
	}
	step(t, "delete the source", p.delete(id), codes.Aborted)
	step(t, "delete the snapshot", p.deleteSnapshot(string(disk.IDFor(disk.Snapshot, "s"))), codes.Aborted)
	p.kill()
	step(t, "the call that was killed", <-ended, codes.Unavailable)

	p = m.start("csi", "--backend", "dir")
	if left := m.volumeFiles(); !slices.Equal(left, before) {
		t.Errorf("after the next start there are %q, before there were %q", left, before)
	}
	_, err := p.snapshot("s", id)
	step(t, "snapshot again", err, codes.OK)
}

// A second call for a volume is ABORTED at once; one for another volume goes on.
func TestOneCallPerVolume(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	mkfs := newSlow(t, m, "mkfs.ext4")
	p := m.startCommand("csi", []string{self(t)}, mkfs.env(), "--backend", "loop")
	id, s := p.create("a", writer).VolumeId, m.staging("s")
	ended := begin(func() error { return p.stage(id, s, writer) })
	mkfs.awaitRunning(t)
	_, again := p.CreateVolume(t.Context(), createRequest("a"))
	_, snapped := p.snapshot("s", id)
	for what, err := range map[string]error{
		"create": again, "delete": p.delete(id), "stage": p.stage(id, s, writer), "unstage": p.unstage(id, s),
		"snapshot": snapped,
		"expand":   p.expand(id, 32<<20, 0), "expand on the node": p.expandOnNode(id, s),
	} {
		step(t, what, err, codes.Aborted)
	}
	step(t, "delete of another", p.delete(string(disk.IDFor(disk.Volume, "b"))), codes.OK)
	mkfs.letGo(t)
	step(t, "the first call", <-ended, codes.Internal) // that mkfs makes no ext4
	step(t, "delete", p.delete(id), codes.OK)
}

// A caller that gives up ends the making, and nothing of it stays.
func TestAbandonedCallLeavesNothing(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	mkfs := newSlow(t, m, "mkfs.ext4")
	p := m.startCommand("csi", []string{self(t)}, mkfs.env(), "--backend", "loop")
	id, s := p.create("a", writer).VolumeId, m.staging("s")
	before := m.volumeFiles()
	ctx, cancel := context.WithCancel(within(t))
	ended := begin(func() error {
		_, err := p.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: s,
			VolumeCapability: writer})
		return err
	})
	mkfs.awaitRunning(t)
	cancel()
	step(t, "the call that was given up", <-ended, codes.Canceled)
	p.stop() // which waits for running calls
	if left := m.volumeFiles(); !slices.Equal(left, before) {
		t.Errorf("there were %q, are %q", before, left)
	}
}

// drill is a volume's whole life, once after the other, as calls that a caller repeats until they succeed.
type drill struct {
	name string
	call func(p *process) error
}

func lifeOf(m *machine, name, text string) []drill {
	id, s, target := string(disk.IDFor(disk.Volume, disk.Name(name))), m.staging(name+"-s"), m.target(name+"-t")
	return []drill{
		{"create", func(p *process) error { _, err := p.CreateVolume(within(p.t), createRequest(name)); return err }},
		{"stage", func(p *process) error { return p.stage(id, s, writer) }},
		{"publish", func(p *process) error { return p.publish(id, s, target, writer, false) }},
		{"write", func(p *process) error { write(p.t, target, text); return nil }},
		{"unpublish", func(p *process) error { return p.unpublish(id, target) }},
		{"unstage", func(p *process) error { return p.unstage(id, s) }},
		{"stage", func(p *process) error { return p.stage(id, s, reader) }},
		{"publish", func(p *process) error { return p.publish(id, s, target, reader, true) }},
		{"read", func(p *process) error { expectText(p.t, target, text); return nil }},
		{"unpublish", func(p *process) error { return p.unpublish(id, target) }},
		{"unstage", func(p *process) error { return p.unstage(id, s) }},
		{"delete", func(p *process) error { return p.delete(id) }},
	}
}

// The process is killed at random moments of a volume's life; the caller repeats what failed, as one does. Every
// repeated call succeeds, what was written is read, and at the end nothing is left.
func TestKillAtAnyMoment(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		random := rand.New(rand.NewPCG(1, 2))
		p := m.start("csi", "--backend", backend)
		kills := 0
		for life := range 3 {
			for _, d := range lifeOf(m, fmt.Sprint("v", life), fmt.Sprint("text ", life)) {
				for try := 0; ; try++ {
					var timer *time.Timer
					if try < 2 {
						victim := p.cmd.Process
						timer = time.AfterFunc(time.Duration(random.IntN(6000))*time.Microsecond, func() {
							_ = victim.Kill()
						})
					}
					err := d.call(p)
					if timer != nil {
						timer.Stop()
					}
					if err == nil {
						break
					}
					// only the kill may fail a call
					if code := status.Code(err); code != codes.Unavailable && code != codes.Canceled {
						t.Fatalf("%s: %v\n%s", d.name, err, p.log)
					}
					<-p.ended
					kills++
					p = m.start("csi", "--backend", backend)
				}
				if p.dead() {
					kills++
					p = m.start("csi", "--backend", backend)
				}
			}
		}
		if kills < 5 {
			t.Errorf("only %d kills", kills)
		}
		if left := m.volumeFiles(); len(left) > 0 {
			t.Errorf("left are %q", left)
		}
		for _, s := range m.workEntries() {
			if !strings.HasSuffix(s, "-s") { // the caller's own
				t.Errorf("left is %s", s)
			}
		}
	})
}

// dead says whether the process was killed after its last answer. A timer that fires later hits the next call.
func (p *process) dead() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

func (m *machine) workEntries() []string {
	m.t.Helper()
	entries, err := os.ReadDir(m.work)
	if err != nil {
		m.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Mounts and what is written through them do not depend on the process.
func TestMountsOutliveTheProcess(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		id := p.create("a", writer).VolumeId
		s, target := m.staging("s"), m.target("t")
		step(t, "stage", p.stage(id, s, writer), codes.OK)
		step(t, "publish", p.publish(id, s, target, writer, false), codes.OK)
		before := m.mounted()
		p.kill()
		write(t, target, "kept")
		p = m.start("csi", "--backend", backend)
		if after := m.mounted(); !slices.Equal(before, after) {
			t.Errorf("mounted were %q, are %q", before, after)
		}
		step(t, "stage", p.stage(id, s, writer), codes.OK)
		step(t, "publish", p.publish(id, s, target, writer, false), codes.OK)
		step(t, "publish otherwise", p.publish(id, s, target, writer, true), codes.AlreadyExists)
		expectText(t, target, "kept")
		if after := m.mounted(); !slices.Equal(before, after) {
			t.Errorf("mounted were %q, are %q", before, after)
		}
		step(t, "unpublish", p.unpublish(id, target), codes.OK)
		step(t, "unstage", p.unstage(id, s), codes.OK)
	})
}

// Somebody unmounted everything while loopfs was down, as a reboot does: the next start forgets it, and the volume is
// free.
func TestStartForgetsWhatIsMountedNoMore(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		id := p.create("a", writer).VolumeId
		s, target := m.staging("s"), m.target("t")
		step(t, "stage", p.stage(id, s, writer), codes.OK)
		step(t, "publish", p.publish(id, s, target, writer, false), codes.OK)
		p.kill()
		for _, dir := range []string{target, s} {
			if err := unix.Unmount(dir, 0); err != nil {
				t.Fatal(err)
			}
		}
		m.awaitNoLoops()
		p = m.start("csi", "--backend", backend)
		expectGone(t, target)
		step(t, "unpublish", p.unpublish(id, target), codes.OK)
		step(t, "delete", p.delete(id), codes.OK)
	})
}

// The leak check of every test sees a leak: the same device without autoclear.
func TestLeakCheckSeesALeak(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	image, err := os.Create(filepath.Join(m.base, "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	if err := image.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	dev := leak(t, image)
	leaked := m.loops()
	if err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_CLR_FD, 0); err != nil {
		t.Error(err)
	}
	dev.Close()
	if len(leaked) != 1 {
		t.Errorf("the check sees %q", leaked)
	}
}

// leak gives the image a loop device that stays.
func leak(t *testing.T, image *os.File) *os.File {
	t.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			t.Fatal(err)
		}
		dev, err := os.OpenFile(fmt.Sprint("/dev/loop", n), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err = unix.IoctlLoopConfigure(int(dev.Fd()), &unix.LoopConfig{Fd: uint32(image.Fd())}); err == nil {
			return dev
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) { // somebody else took it in between
			t.Fatal(err)
		}
	}
}
