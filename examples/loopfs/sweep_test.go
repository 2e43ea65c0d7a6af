package main

import (
	"bufio"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/installed"
)

// doomed has strace kill the process before the n-th system call of that name. spare ends that.
func (p *process) doomed(effect string, n int, more ...string) (spare func(alive bool)) {
	p.t.Helper()
	cmd := exec.Command("strace", append(more, "-f", "-o", "/dev/null", "-p", fmt.Sprint(p.cmd.Process.Pid),
		"-e", "trace="+effect, "-e", fmt.Sprintf("inject=%s:signal=KILL:when=%d", effect, n))...)
	stderr, err := cmd.StderrPipe()
	must(p.t, err)
	must(p.t, cmd.Start())
	lines := bufio.NewScanner(stderr)
	for lines.Scan() && !strings.Contains(lines.Text(), "attached") {
		p.t.Log(lines.Text())
	}
	return func(alive bool) {
		if alive { // else strace ends by itself: interrupted after the end of its process, it waits for ever
			_ = cmd.Process.Signal(os.Interrupt)
		}
		for lines.Scan() { // to the end, so that strace does not wait for a reader
		}
		_ = cmd.Wait()
	}
}

// sweep is a call that is killed before each of its effects, and its undo. Effects are the system calls that name and
// remove records and images, and that mount, unmount, make and remove targets.
type sweep struct {
	name       string
	call, undo func(p *process) error
	effects    []string
}

// back returns the sweep of the undo.
func (s sweep) back(effects ...string) sweep {
	return sweep{"undo of " + s.name, s.undo, s.call, effects}
}

// sweeper is a machine with a process that is started again after every kill.
type sweeper struct {
	*machine
	args   []string
	p      *process
	always func() // checks what holds after every start
	kills  int
}

// sweep kills the call at every effect. In the end the call succeeds.
func (m *sweeper) sweep(s sweep) {
	m.t.Helper()
	for i, effect := range s.effects {
		for n := 1; m.killed(s, effect, n); n++ {
			m.kills++
		}
		if i < len(s.effects)-1 {
			step(m.t, s.name+", taken back", s.undo(m.p), codes.OK)
		}
	}
}

// killed reports whether the call was killed before its n-th effect of that kind. After every second kill the caller
// repeats the call before it takes it back. In either case everything is as before.
func (m *sweeper) killed(s sweep, effect string, n int) bool {
	m.t.Helper()
	before := m.volumeFiles()
	spare := m.p.doomed(effect, n)
	err := s.call(m.p)
	spare(err == nil)
	if err == nil {
		return false
	}
	if code := status.Code(err); code != codes.Unavailable && code != codes.Canceled { // only the kill may fail it
		m.t.Fatalf("%s: %v\n%s", s.name, err, m.p.logged())
	}
	<-m.p.ended
	m.p = m.start("csi", m.args...)
	m.always()
	what := fmt.Sprintf("%s, killed before %s %d", s.name, effect, n)
	if n%2 == 1 {
		step(m.t, what+" and repeated", s.call(m.p), codes.OK)
	}
	step(m.t, what+" and taken back", s.undo(m.p), codes.OK)
	if after := m.volumeFiles(); !slices.Equal(before, after) {
		m.t.Fatalf("%s: there were %q, are %q\n%s", what, before, after, m.p.logged())
	}
	return true
}

func needStrace(t *testing.T) {
	t.Helper()
	installed.Tool(t, "strace", "strace")
	if err := exec.Command("strace", "-qq", "-o", "/dev/null", "true").Run(); err != nil {
		t.Skipf("strace may not trace here: %v", err)
	}
}

// A process that dies while a volume is frozen leaves it frozen. The next start thaws it, and so does the next call for
// the volume at another process.
func TestKillWhileFrozen(t *testing.T) {
	needStrace(t)
	need(t, loopBackend)
	for name, beside := range map[string]bool{"restarted": false, "beside another process": true} {
		t.Run(name, func(t *testing.T) { killWhileFrozen(t, beside) })
	}
}

func killWhileFrozen(t *testing.T, beside bool) {
	m, p := runLoopfs(t, loopBackend)
	id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
	p.bringUp(id, s, target, writer)
	t.Cleanup(func() { thaw(target) }) // after a failure
	next := p
	if beside {
		next = m.start("other", "--backend", "loop")
	}
	spare := p.doomed("fsync", 2) // that of the record's directory
	_, err := p.snapshot("s", id)
	spare(false)
	step(t, "the killed call", err, codes.Unavailable)
	<-p.ended
	wrote := begin(func() error { return os.WriteFile(filepath.Join(target, "f"), []byte("late"), 0o600) })
	select {
	case err := <-wrote:
		t.Errorf("the kill was not in the middle: a write succeeded, %v", err)
	case <-time.After(20 * time.Millisecond): // long enough for a write to a volume that is not frozen
	}
	if beside {
		step(t, "expand", next.expand(id, 16<<20, 0), codes.OK)
	} else {
		next = m.start("csi", "--backend", "loop")
	}
	awaitWrite(t, wrote)
	_, err = next.snapshot("s", id)
	step(t, "snapshot", err, codes.OK)
	expectText(t, target, "late")
	next.takeDown(id, s, target)
}

// awaitWrite waits for a write to a volume that has to be thawed.
func awaitWrite(t *testing.T, wrote <-chan error) {
	t.Helper()
	select {
	case err := <-wrote:
		must(t, err)
	case <-time.After(time.Minute):
		t.Fatal("the volume is still frozen")
	}
}

// thaw ends a freeze if there is one.
func thaw(dir string) {
	if f, err := os.Open(dir); err == nil {
		_ = unix.IoctlSetInt(int(f.Fd()), 0xC0045878, 0)
		f.Close()
	}
}

func TestKillAtEveryEffect(t *testing.T) {
	needStrace(t)
	for _, backend := range []string{loopBackend, dirBackend} {
		t.Run(backend, func(t *testing.T) {
			need(t, backend)
			sweepAll(t, backend)
		})
	}
}

func sweepAll(t *testing.T, backend string) {
	m := &sweeper{machine: newMachine(t), args: []string{"--backend", backend, "--capacity", "4GiB"}, always: func() {}}
	m.p = m.start("csi", m.args...)
	id, s, target := m.p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
	m.p.bringUp(id, s, target, writer)
	write(t, target, "kept")
	if backend == loopBackend {
		m.always = func() {
			awaitWrite(t, begin(func() error { return os.WriteFile(filepath.Join(target, "thawed"), nil, 0o600) }))
		}
		t.Cleanup(func() { thaw(target) }) // after a failure
		m.sweepStage()
		m.sweepRaw()
	} else { // a directory is not copied while it is published for writing
		step(t, "unpublish", m.p.unpublish(id, target), codes.OK)
	}
	m.sweepCopies(id)
	expectText(t, s, "kept")
	m.p.takeDown(id, s, target)
	step(t, "delete", m.p.delete(id), codes.OK)
	m.expectNoVolumes()
	if t.Logf("%d kills", m.kills); m.kills < 20 {
		t.Errorf("only %d kills", m.kills)
	}
}

func (m *sweeper) sweepCopies(id string) {
	snap, restored := string(idFor(snapshotKind, "s")), string(idFor(volumeKind, "r"))
	other := m.p.create("other", writer).VolumeId
	snapshot := sweep{"snapshot",
		func(p *process) error { _, err := p.snapshot("s", id); return err },
		func(p *process) error { return p.deleteSnapshot(snap) },
		[]string{"renameat"}}
	restore := sweep{"restore",
		func(p *process) error { _, err := p.tryCreate("r", snap, 0, 0, writer); return err },
		func(p *process) error { return p.delete(restored) },
		[]string{"renameat"}}
	group := sweep{"group snapshot",
		func(p *process) error { _, err := p.snapshotGroup("g", id, other); return err },
		func(p *process) error { return p.deleteGroup(string(idFor(groupKind, "g"))) },
		[]string{"renameat"}}
	size := int64(16 << 20)
	expand := sweep{"expand",
		func(p *process) error { size += 1 << 20; return p.expand(id, size, 0) },
		func(p *process) error { return p.expand(id, size, 0) },
		[]string{"renameat"}}
	for _, s := range []sweep{snapshot, restore, restore.back("renameat"), snapshot.back("unlinkat"), expand, group,
		group.back("renameat", "unlinkat")} {
		m.sweep(s)
	}
	step(m.t, "delete", m.p.delete(other), codes.OK)
}

// sweepStage sweeps the first stage of a volume, and its unstage.
func (m *sweeper) sweepStage() {
	id, s := string(idFor(volumeKind, "fresh")), m.staging("fresh-s")
	create := func(p *process) error { _, err := p.tryCreate("fresh", "", 0, 0, writer); return err }
	stage := sweep{"first stage",
		func(p *process) error { return p.stage(id, s, writer) },
		func(p *process) error { return cmp.Or(p.unstage(id, s), p.delete(id), create(p)) },
		[]string{"renameat", "move_mount"}}
	unstage := sweep{"unstage", func(p *process) error { return p.unstage(id, s) }, stage.call,
		[]string{"umount2", "renameat"}}
	step(m.t, "create", create(m.p), codes.OK)
	m.sweep(stage)
	m.sweep(unstage)
	step(m.t, "delete", m.p.delete(id), codes.OK)
}

func (m *sweeper) sweepRaw() {
	raw := blockOf(multi)
	id, s, target := m.p.create("raw", raw).VolumeId, m.staging("raw-s"), m.target("raw-t")
	stage := sweep{"raw stage",
		func(p *process) error { return p.stage(id, s, raw) },
		func(p *process) error { return p.unstage(id, s) },
		[]string{"renameat"}}
	publish := sweep{"raw publish",
		func(p *process) error { return p.publish(id, s, target, raw, true) },
		func(p *process) error { return p.unpublish(id, target) },
		[]string{"renameat", "mknodat", "move_mount"}}
	modify := sweep{"modify",
		func(p *process) error { return p.modify(id, readAheadKey, "64") },
		func(p *process) error { return p.modify(id, readAheadKey, "128") },
		[]string{"renameat"}}
	for _, s := range []sweep{stage, publish, publish.back("umount2", "unlinkat", "renameat"), stage.back("renameat"),
		modify} {
		m.sweep(s)
	}
	step(m.t, "delete", m.p.delete(id), codes.OK)
}
