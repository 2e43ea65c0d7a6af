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

	"holdfast/host/agent/control"
	"holdfast/internal/proc"
)

// Processes to kill.
const (
	victimHost = "host"
	victimOld  = "old"
	victimNew  = "new"
)

var victims = []string{victimHost, victimOld, victimNew}

// killPoint is a point of a swap at which a shim runs code, and so can kill exactly then.
type killPoint struct {
	step  string
	at    string // a point of package fault
	atOld bool   // in the old shim
}

// killPoints are points of each step in which a shim runs code: all but verify and commit.
var killPoints = []killPoint{
	{"prepare", "Snapshot before", true},
	{"prepare", "Rehearse after", false},
	{"quiesce", "Quiesce after", true},
	{"fence", "Release before", true},
	{"fence", "Release after", true},
	{"activate", "Activate before", false},
	{"activate", "Activate after", false},
	{"resume", "Volumes.Create after", false}, // the first call that was held
	{"bake", "serving 200ms", false},
}

// TestKilledAtEachStep kills the host, the old and the new shim at each step of a swap under load. After each death
// one shim is active, nothing acknowledged is lost, the journal is legal, no mount and no task is touched, and a
// watcher gets each event once, in order. An operator only has to restart a killed host.
func TestKilledAtEachStep(t *testing.T) {
	slow(t)
	for _, p := range killPoints {
		t.Run(p.step+"/"+strings.ReplaceAll(p.at, " ", "-"), func(t *testing.T) { killEachVictim(t, p.kill) })
	}
}

// killEachVictim calls kill for each victim in turn.
func killEachVictim(t *testing.T, kill func(s *stress, victim string)) {
	s := newStress(t)
	for _, victim := range victims {
		t.Logf("victim: the %s", victim)
		s.locked(func() { s.failures = nil })
		kill(s, victim)
		s.waitProgress("after the death of the " + victim)
		s.wantOneActive()
		if victim != victimHost {
			s.wantNoFailures()
		}
	}
	s.verify()
}

func (p killPoint) kill(s *stress, victim string) {
	mark := s.path("killed-" + victim)
	action := "kill-other"
	switch {
	case victim == victimHost:
		action = "kill-host"
	case (victim == victimOld) == p.atOld:
		action = "kill-self"
	}
	line := p.at + " " + action + " once " + mark
	next := "new-" + victim
	if p.atOld {
		s.swap(s.binary("old-"+victim, line))
		next = s.binary(next)
	} else {
		next = s.binary(next, line)
	}
	for tries := 0; !exists(mark) && tries < 10; tries++ { // on a busy machine a swap may be given up earlier
		report, err := s.client.Swap(s.ctx(), control.SwapRequest{Path: next})
		s.t.Logf("the swap: %s %v %v", report.Outcome, report.Steps, err)
		if err == nil {
			s.waitUntil("the kill", func() bool { return exists(mark) })
		}
	}
	if !exists(mark) {
		s.t.Fatal("no process was killed")
	}
	if victim == victimHost {
		s.restartAgent()
	}
}

// TestKilledAtRandomTimes kills a random process at a random time of a swap. HOLDFAST_SOAK=10m continues with another
// seed for that long; HOLDFAST_SEED=7 is the seed.
func TestKilledAtRandomTimes(t *testing.T) {
	slow(t)
	seed := uint64(1)
	if text := os.Getenv("HOLDFAST_SEED"); text != "" {
		_, err := fmt.Sscan(text, &seed)
		if err != nil {
			t.Fatalf("HOLDFAST_SEED: %v", err)
		}
	}
	t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { killAtRandomTimes(t, seed, 8, 0) })
	if text := os.Getenv("HOLDFAST_SOAK"); text != "" {
		long, err := time.ParseDuration(text)
		if err != nil {
			t.Fatalf("HOLDFAST_SOAK: %v", err)
		}
		seed := uint64(time.Now().UnixNano())
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { killAtRandomTimes(t, seed, 30, long) })
	}
}

func killAtRandomTimes(t *testing.T, seed uint64, rounds int, long time.Duration) {
	s := newStress(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	binaries := []string{s.binary("one"), s.binary("two"), s.binary("three")}
	typical, began := time.Second, time.Now()
	for n := 0; n < rounds || time.Since(began) < long; n++ {
		s.locked(func() { s.failures = nil })
		victim := victims[rng.IntN(3)]
		after := time.Duration(rng.Float64() * 1.2 * float64(typical))
		took := s.swapAndKill(victim, binaries[n%3], after)
		t.Logf("round %d: the %s, after %s; the swap took %s",
			n, victim, after.Round(time.Millisecond), took.Round(time.Millisecond))
		if victim != victimHost {
			typical = (typical + took) / 2
		}
		s.waitProgress("after the death of the " + victim)
		s.wantOneActive()
		if victim != victimHost {
			s.wantNoFailures()
		}
		if t.Failed() {
			break
		}
	}
	s.verify()
}

// swapAndKill swaps and kills the victim after a time.
func (s *stress) swapAndKill(victim, binary string, after time.Duration) (took time.Duration) {
	old, agent := s.writers(), s.agent.Process.Pid
	began := time.Now()
	done := background(func() error { return errOf(s.client.Swap(s.ctx(), control.SwapRequest{Path: binary})) })
	sleep(s.ctx(), after)
	switch victim {
	case victimHost:
		s.must(unix.Kill(agent, unix.SIGKILL))
	case victimOld:
		_ = unix.Kill(old[0], unix.SIGKILL)
	case victimNew: // if there is one yet
		for _, pid := range shimsOf(s.state()) {
			if pid != old[0] {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
	}
	s.t.Logf("the swap: %v", s.result("the swap", done))
	took = time.Since(began)
	if victim == victimHost {
		s.restartAgent()
	}
	return took
}

// freeze returns once the process is stopped.
func freeze(ctx context.Context, pid int) error {
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		return err
	}
	return waitFor(ctx, "the process is stopped", func() bool {
		stat, err := proc.ReadStat(pid)
		return err == nil && stat.State == 'T'
	})
}

// TestTwoWritersAreFound is a negative control of writers. The first shim is frozen when its host dies, so that it
// lives on. Its state file and its binary are moved, so that neither the lock nor the next host finds it.
func TestTwoWritersAreFound(t *testing.T) {
	m, must := startMachine(t)
	shim, err := control.NewClient(m.socket()).Shim(t.Context())
	must(err)
	if one := m.writers(); !slices.Equal(one, []int{shim.PID}) {
		t.Errorf("%d is active; found are %v", shim.PID, one)
	}
	must(freeze(t.Context(), shim.PID))
	_ = m.endAgent(unix.SIGKILL)
	db := filepath.Join(m.state(), "shim.db")
	text, err := os.ReadFile(db)
	must(err)
	must(os.Rename(db, db+".away"))
	must(os.WriteFile(db, text, 0o600))
	binary, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", shim.PID))
	must(err)
	must(os.Remove(binary))
	must(m.startAgent())
	if two := m.writers(); len(two) != 2 || !slices.Contains(two, shim.PID) {
		t.Errorf("%d and another write, and found are %v\n%s", shim.PID, two, procText(shim.PID, "stat"))
	}
	must(unix.Kill(shim.PID, unix.SIGKILL))
	must(waitFor(t.Context(), "the first is gone", func() bool { return !alive(shim.PID) }))
}

// startMachine starts an agent without a plugin. must ends the test on an error.
func startMachine(t *testing.T) (m *machine, must func(error)) {
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
	must(m.startAgent())
	return m, must
}
