package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
)

// Who is killed.
const (
	theHost = "host"
	theOld  = "old"
	theNew  = "new"
)

// moment is a point of a swap at which one of the shims has something to do, and so can kill exactly then.
type moment struct {
	step  string
	at    string // a point of package fault
	atOld bool   // it is the old shim that comes there
}

// moments are the points of each step that has some. verify and commit have none, and are told from outside.
var moments = []moment{
	{"prepare", "Hello before", false},
	{"prepare", "Snapshot before", true},
	{"prepare", "Rehearse before", false},
	{"prepare", "Rehearse after", false},
	{"quiesce", "Quiesce before", true},
	{"quiesce", "Quiesce after", true},
	{"fence", "Release before", true},
	{"fence", "Release after", true},
	{"activate", "Activate before", false},
	{"activate", "Activate after", false},
	{"resume", "Volumes.Create before", false}, // the first that was held
	{"resume", "Volumes.Create after", false},
	{"bake", "serving 200ms", false},
}

// kill is the fault by which the victim dies there.
func (m moment) kill(victim string) string {
	switch {
	case victim == theHost:
		return "kill-host"
	case (victim == theOld) == m.atOld:
		return "kill-self"
	}
	return "kill-other"
}

// TestKilledAtEachStep: host, old and new shim die of SIGKILL at each step of a swap, under load. After each death one shim is active and
// serves, nothing that was acknowledged is lost, the plugin's journal is legal, and no mount and no task was touched; nobody had to do anything
// but to start a host that was killed. Who listens all the time is told each event once, in order, and each change that was acknowledged.
// Two of the 24 cannot be: there is no new shim yet at verify, and no old one any more after commit.
func TestKilledAtEachStep(t *testing.T) {
	slow(t)
	for _, m := range moments {
		t.Run(m.step+"/"+strings.ReplaceAll(m.at, " ", "-"), func(t *testing.T) { besieged(t, m.round) })
	}
	t.Run("verify", func(t *testing.T) { besieged(t, killedAtVerify) })
	t.Run("commit", func(t *testing.T) { besieged(t, killedAtCommit) })
}

// besieged has each of the three die in a round of its own.
func besieged(t *testing.T, round func(s *siege, victim string)) {
	s := newSiege(t)
	for _, victim := range []string{theHost, theOld, theNew} {
		t.Logf("victim: the %s", victim)
		s.note(func() { s.failed = nil })
		round(s, victim)
		s.served(victim)
		s.goesOn("after the death of the " + victim)
		s.oneIsActive()
		if victim != theHost {
			s.unheard()
		}
	}
	s.judge()
}

func (m moment) round(s *siege, victim string) {
	mark := s.path("killed-" + victim)
	old, next := "old-"+victim, "new-"+victim
	fatal := m.at + " " + m.kill(victim) + " once " + mark
	if m.atOld {
		s.swapTo(s.binary(s.t, old, fatal))
		next = s.binary(s.t, next)
	} else {
		next = s.binary(s.t, next, fatal)
	}
	s.attempts(next)
	for tries := 0; !exists(mark) && tries < 10; tries++ { // on a busy machine a swap may be given up before it comes there
		report, err := s.client.Swap(s.ctx(), control.Replacement{Path: next})
		s.t.Logf("the swap: %s %v %v", report.Outcome, report.Steps, err)
		if err == nil {
			s.wait("the kill", func() bool { return exists(mark) })
		}
	}
	if !exists(mark) {
		s.t.Fatal("nobody was killed")
	}
	if victim == theHost {
		s.comesBack()
	}
}

// swapTo has another shim serve. On a busy machine a swap may be given up.
func (s *siege) swapTo(path string) host.SwapReport {
	s.t.Helper()
	var report host.SwapReport
	s.must(s.insist("swap to "+path, func() (err error) {
		report, err = s.client.Swap(s.ctx(), control.Replacement{Path: path})
		return err
	}))
	return report
}

// attempt is a swap that somebody does not survive.
type attempt struct {
	began    time.Time
	from, to string // digests
}

// attempts notes what is about to be tried.
func (s *siege) attempts(path string) {
	s.t.Helper()
	st, err := s.client.Shim(s.ctx())
	s.must(err)
	s.tried = attempt{began: time.Now(), from: st.SHA256, to: sumOf(s.t, path)}
}

// right are the binaries that may serve after the attempt, by what is told of it: the new one if it went well, else the old one, unless that
// was young itself and its death has led back to the one before. A host that died may have told nobody how far it had come.
func (a attempt) right(history []host.SwapReport, victim string) (sums []string) {
	at := func(h host.SwapReport) bool { return h.To == a.to && h.Began.After(a.began) }
	before := func(h host.SwapReport) bool { return h.To == a.from && h.Began.Before(a.began) }
	sums = []string{a.from}
	if i := slices.IndexFunc(history, before); i >= 0 && history[i].Outcome == host.SwapRolledBack {
		sums = []string{history[i].From}
	}
	if i := slices.IndexFunc(history, at); i >= 0 && (history[i].Outcome == host.SwapBaking || history[i].Outcome == host.SwapCommitted) {
		return []string{a.to}
	}
	if victim == theHost {
		sums = append(sums, a.to)
	}
	return sums
}

// served: the binary that should serve does.
func (s *siege) served(victim string) {
	s.t.Helper()
	var history []host.SwapReport
	s.wait("the right shim serves", func() bool {
		var err error
		if history, err = s.client.Swaps(s.ctx()); err != nil {
			return false
		}
		st, err := s.client.Shim(s.ctx())
		return err == nil && slices.Contains(s.tried.right(history, victim), st.SHA256)
	})
	if len(history) > 0 {
		s.t.Logf("the last swap: %s failed at %q: %s", history[0].Outcome, history[0].Failed, history[0].Reason)
	}
}

// killedAtVerify kills while a binary is copied that is long enough for that.
func killedAtVerify(s *siege, victim string) {
	next := s.binary(s.t, "new-"+victim)
	long, err := os.OpenFile(next, os.O_RDWR, 0)
	s.must(err)
	s.must(long.Truncate(256 << 20))
	s.must(long.Close())
	s.attempts(next)
	before := s.shims()
	done := goes(func() error { _, err := s.client.Swap(s.ctx(), control.Replacement{Path: next}); return err })
	copying := func() bool {
		parts, _ := filepath.Glob(filepath.Join(s.state(), "shims", ".add-*"))
		return len(parts) > 0
	}
	s.wait("the binary is copied", copying)
	shim := s.active()
	switch victim {
	case theHost:
		s.must(s.agent.Process.Kill())
	case theOld:
		s.must(unix.Kill(shim[0], unix.SIGKILL))
	case theNew:
		isNew := func(pid int) bool { return !slices.Contains(before, pid) }
		if now := s.shims(); slices.ContainsFunc(now, isNew) { // the one before may go meanwhile: a swap that begins ends its standby
			s.t.Errorf("the shims were %v, and are %v at verify: there is to be no new one yet", before, now)
		}
	}
	s.t.Logf("the swap: %v", s.ends("the swap", done))
	if victim == theHost {
		s.comesBack()
	}
	if copying() {
		s.t.Error("a part of a copy is left")
	}
	s.must(os.Remove(next))
}

// ends gives what comes of something that was begun.
func (s *siege) ends(what string, done <-chan error) error {
	s.t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(2 * patience):
		s.t.Fatalf("%s does not end", what)
		return nil
	}
}

// killedAtCommit kills while the old shim is told to end, because the next swap begins. It is frozen before that, so that this takes as long
// as a host has patience.
func killedAtCommit(s *siege, victim string) {
	s.swapTo(s.binary(s.t, "new-"+victim))
	fresh, err := s.client.Shim(s.ctx())
	s.must(err)
	standby := slices.DeleteFunc(s.shims(), func(pid int) bool { return pid == fresh.PID })
	if len(standby) != 1 {
		s.t.Fatalf("there stand by %v", standby)
	}
	old, agent := standby[0], s.agent.Process.Pid
	line, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/3", old)) // its life line
	s.must(err)
	s.must(unix.Kill(old, unix.SIGSTOP))
	next := s.binary(s.t, "next-"+victim)
	s.attempts(next)
	done := goes(func() error { _, err := s.client.Swap(s.ctx(), control.Replacement{Path: next}); return err })
	s.wait("the old one is told to end", func() bool { return !holds(agent, line) })
	pid := map[string]int{theHost: agent, theOld: old, theNew: fresh.PID}[victim]
	s.must(unix.Kill(pid, unix.SIGKILL))
	_ = unix.Kill(old, unix.SIGCONT)
	s.t.Logf("the next swap: %v", s.ends("the next swap", done))
	if victim == theHost {
		s.comesBack()
	}
	s.wait("the old one is gone", func() bool { return !alive(old) })
}

// holds says whether the process has the file open.
func holds(pid int, file string) bool {
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		if to, _ := os.Readlink(fd); to == file {
			return true
		}
	}
	return false
}

// TestKilledAtRandomTimes is the complement: who dies when within a swap is left to chance. HOLDFAST_CHAOS=10m goes on for that long;
// HOLDFAST_CHAOS_SEED=7 is the seed.
func TestKilledAtRandomTimes(t *testing.T) {
	slow(t)
	for _, seed := range ordinarySeeds(t)[:1] {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { killedAtRandom(t, seed, 8, 0) })
	}
	text := os.Getenv("HOLDFAST_CHAOS")
	if text == "" {
		return
	}
	long, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("HOLDFAST_CHAOS: %v", err)
	}
	for range 2 {
		seed := uint64(time.Now().UnixNano())
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { killedAtRandom(t, seed, 30, long) })
	}
}

// killedAtRandom has somebody die in so many swaps, and in more until a time is over.
func killedAtRandom(t *testing.T, seed uint64, rounds int, long time.Duration) {
	s := newSiege(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	binaries := []string{s.binary(t, "one"), s.binary(t, "two"), s.binary(t, "three")}
	typical := time.Second
	begin := time.Now()
	for n := 0; n < rounds || time.Since(begin) < long; n++ {
		s.note(func() { s.failed = nil })
		victim := []string{theHost, theOld, theNew}[rng.IntN(3)]
		after := time.Duration(rng.Float64() * 1.2 * float64(typical))
		took := s.randomly(victim, binaries[n%3], after)
		t.Logf("seed %d, round %d: the %s, after %s; the swap took %s", seed, n, victim, after.Round(time.Millisecond), took.Round(time.Millisecond))
		if victim != theHost {
			typical = (typical + took) / 2
		}
		s.goesOn("after the death of the " + victim)
		s.served(victim)
		s.oneIsActive()
		if victim != theHost {
			s.unheard()
		}
		if t.Failed() {
			break
		}
	}
	s.judge()
}

// randomly swaps, and has somebody die so long after that began.
func (s *siege) randomly(victim, binary string, after time.Duration) (took time.Duration) {
	old, agent := s.active(), s.agent.Process.Pid
	s.attempts(binary)
	begin := time.Now()
	done := goes(func() error { _, err := s.client.Swap(s.ctx(), control.Replacement{Path: binary}); return err })
	pause(s.ctx(), after)
	switch victim {
	case theHost:
		s.must(unix.Kill(agent, unix.SIGKILL))
	case theOld:
		_ = unix.Kill(old[0], unix.SIGKILL)
	case theNew: // whichever runs beside the old one: none where it has not come to that
		for _, pid := range s.shims() {
			if pid != old[0] {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
	}
	err := s.ends("the swap", done)
	took = time.Since(begin)
	s.t.Logf("the swap: %v", err)
	if victim == theHost {
		s.comesBack()
	}
	return took
}

// startedMachine is a machine whose agent runs, and how its test ends of an error.
func startedMachine(t *testing.T) (m *machine, must func(error)) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("the mounts of a state directory need root")
	}
	t.Parallel()
	must = func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m, err := newMachine()
	must(err)
	t.Cleanup(func() { must(m.sweep()) })
	must(m.start())
	return m, must
}

// TestTwoWritersAreFound: who judges that one shim is active finds two. The first is frozen when its host dies, and so lives on; the file of its
// state is put away, and a copy put in its place, so that the lock keeps nobody out; and so is its binary, so that the next host does not know it.
func TestTwoWritersAreFound(t *testing.T) {
	m, must := startedMachine(t)
	shim, err := control.NewClient(m.socket()).Shim(t.Context())
	must(err)
	if one := m.active(); !slices.Equal(one, []int{shim.PID}) {
		t.Errorf("%d is active; found is %v", shim.PID, one)
	}
	must(frozen(t.Context(), shim.PID))
	_ = m.end(unix.SIGKILL)
	db := filepath.Join(m.state(), "shim.db")
	text, err := os.ReadFile(db)
	must(err)
	must(os.Rename(db, db+".away"))
	must(os.WriteFile(db, text, 0o600))
	binary, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", shim.PID))
	must(err)
	must(os.Remove(binary))
	must(m.start())
	if two := m.active(); len(two) != 2 || !slices.Contains(two, shim.PID) {
		t.Errorf("%d and another write, and found is %v\n%s", shim.PID, two, proc(shim.PID, "stat"))
	}
	must(unix.Kill(shim.PID, unix.SIGKILL))
	must(until(t.Context(), "the first is dead", func() bool { return !alive(shim.PID) }))
}

// frozen returns when the process is stopped: the signal is sent before that.
func frozen(ctx context.Context, pid int) error {
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		return err
	}
	return until(ctx, "the process is stopped", func() bool { return strings.Contains(proc(pid, "stat"), ") T ") })
}

// A shim that is frozen when its host is killed does not end with it. The next host does not wait for it, nor for a person to end it.
func TestNextHostEndsAFrozenShim(t *testing.T) {
	m, must := startedMachine(t)
	old := m.active()[0]
	must(frozen(t.Context(), old))
	_ = m.end(unix.SIGKILL)
	must(m.start())
	if now := m.shims(); len(now) != 1 || now[0] == old {
		t.Errorf("shims are %v; %d was frozen", now, old)
	}
	must(m.end(unix.SIGTERM))
	if text := m.said(); !strings.Contains(text, fmt.Sprintf("is killed: pid=%d", old)) {
		t.Errorf("the agent does not say that it killed %d:\n%s", old, text)
	}
}

// A shim that dies in the middle of a step is named as the reason, with its last words, and not the connection that broke.
func TestDeathInAStepIsTold(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	w.must(w.host.Close())
	w.config.SwapBudget = patience
	w.open()
	p := w.plugin("alloc-p", csifake.Monolith)
	for i, c := range []struct{ at, step string }{{"Hello before", "prepare"}, {"Rehearse before", "prepare"}, {"Activate after", "activate"}} {
		path := fault.Binary(t, faulty, w.dir, fmt.Sprint("dies-", i), c.at+" panic")
		_, err := w.host.Swap(w.ctx(), host.Binary{Path: path})
		if err == nil || !strings.Contains(err.Error(), "swap: "+c.step) || !strings.Contains(err.Error(), "exited with code 2") ||
			!strings.Contains(err.Error(), "panic: a fault: panic") || strings.Contains(err.Error(), "connection") {
			t.Errorf("%s: %v", c.at, err)
		}
	}
	w.exit(p)
}
