package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"holdfast/host"
)

// longBudget is more than any step of a swap can need, and less than calls wait for.
const longBudget = patience / 4

// BoundedHold: what changes something is held for at most the budget, with the caller's own deadline running, and never fails of it; over budget
// the swap is given up. Reads go on.
func TestBoundedHold(t *testing.T) {
	slow(t)
	for what, test := range map[string]func(*swaps){
		"reads go on, deadlines run":             (*swaps).heldInQuiesce,
		"a call at the driver is not waited for": (*swaps).notHeldByADriver,
	} {
		t.Run(what, func(t *testing.T) { test(newSwaps(t, func(c *host.Config) { c.SwapBudget = longBudget })) })
	}
	t.Run("over budget", func(t *testing.T) {
		s := newSwaps(t, func(*host.Config) {})
		for _, c := range []struct {
			name, old, fresh string
			outcome          host.SwapOutcome
		}{
			{"the new one does not activate", "", "Activate before hang", host.SwapRolledBack},
			{"the old one is never quiet", "Quiesce before hang", "", host.SwapBaking},
			{"the old one does not let go", "Release before hang", "", host.SwapBaking},
			{"the old one is never quiet, and the new one does not activate", "Quiesce before hang", "Activate after hang", host.SwapRolledBack},
		} {
			t.Run(c.name, func(t *testing.T) { s.heldOverBudget(t, c.old, c.fresh, c.outcome) })
		}
	})
}

// heldInQuiesce stops a swap where it has just begun to hold calls.
func (s *swaps) heldInQuiesce() {
	old := s.faulty("Quiesce before touch DIR/reached times 1", "Quiesce before wait-for DIR/go times 1")
	files := filepath.Join(s.dir, fmt.Sprint("of-shim-", s.count))
	s.good(old)
	swapped := make(chan host.SwapReport, 1)
	go func() {
		report, err := s.host.SwapAs(s.ctx(), s.next(), "tester")
		if err != nil {
			s.t.Errorf("the swap: %v", err)
		}
		swapped <- report
	}()
	s.eventually("calls are held", func() bool { _, err := os.Stat(filepath.Join(files, "reached")); return err == nil })
	if is := s.host.ShimState(); is.Swap == nil || is.Swap.Step != host.SwapQuiesce || is.Swap.By != "tester" || !is.Serving {
		s.t.Errorf("while calls are held: %+v, %+v", is, is.Swap)
	}
	for range 20 {
		if _, _, err := s.host.Volumes(s.ctx(), host.VolumeQuery{}); err != nil {
			s.t.Errorf("a read: %v", err)
		}
	}
	held := make(chan error, 1)
	go func() { held <- s.host.ReleaseAlloc(context.WithoutCancel(s.ctx()), "nobody") }()
	hurried, cancel := context.WithTimeout(s.ctx(), 100*time.Millisecond)
	defer cancel()
	err := s.host.ReleaseAlloc(hurried, "nobody-else")
	if end, _ := hurried.Deadline(); time.Since(end) > time.Second {
		s.t.Errorf("a call was held for %s beyond its deadline", time.Since(end))
	}
	if !errors.Is(err, context.DeadlineExceeded) || hurried.Err() == nil || !strings.Contains(err.Error(), "it is being replaced") {
		s.t.Errorf("a call with a deadline: %v; its deadline: %v", err, hurried.Err())
	}
	select {
	case err := <-held:
		s.t.Errorf("a call was not held: %v", err)
	case <-swapped:
		s.t.Fatal("the swap did not wait")
	default:
	}
	s.must(os.WriteFile(filepath.Join(files, "go"), nil, 0o600))
	s.must(s.ends("the held call", held))
	if report := <-swapped; report.Held < 2 || report.Hold >= longBudget || report.Outcome != host.SwapBaking {
		s.t.Errorf("%+v", report)
	}
	s.goesOn()
}

// notHeldByADriver swaps while a plugin takes its time.
func (s *swaps) notHeldByADriver() {
	s.goesOn()
	s.load.stops(s.t) // its calls would be those that the plugin keeps
	gate := s.plugin.On("CreateVolume").Hold()
	slow := make(chan error, 1)
	go func() { slow <- s.create("slow") }()
	s.arrives(gate, slow)
	for range 3 {
		s.good(s.next())
		if report := s.host.Swaps()[0]; report.Hold >= longBudget {
			s.t.Errorf("%+v", report)
		}
	}
	select {
	case err := <-slow:
		s.t.Errorf("the call at the driver has ended: %v", err)
	default:
	}
	gate.Open()
	s.must(s.ends("the call at the driver", slow))
	s.must(s.delete("slow"))
}

// heldOverBudget swaps where a step takes all the time that it may. Calls have none to lose: those without a deadline end well.
func (s *swaps) heldOverBudget(t *testing.T, old, fresh string, outcome host.SwapOutcome) {
	s.within(t)
	if old != "" {
		s.good(s.faulty(old + " times 1"))
	}
	candidate := s.next()
	if fresh != "" {
		candidate = s.faulty(fresh)
	}
	report, err := s.host.Swap(s.ctx(), candidate)
	if report.Outcome != outcome || (err != nil) != (outcome == host.SwapRolledBack) || report.Hold >= budget {
		t.Errorf("%v; %+v", err, report)
	}
	if least := budget / 4; report.Hold < least {
		t.Errorf("held for %s only: this test has tested nothing", report.Hold)
	}
	s.goesOn()
}

// What the tests of swaps look for is found when it is there.
func TestWhatASwapLeavesIsFound(t *testing.T) {
	s := newSwaps(t, func(*host.Config) {})
	s.goesOn()
	s.load.stops(t)
	before := s.traces()
	finds := func(what string, undo func()) {
		t.Helper()
		if now := s.traces(); now.is(before) {
			t.Errorf("%s is not found", what)
		}
		undo()
		s.eventually(what+" is gone", func() bool { return s.traces().is(before) })
	}
	file := filepath.Join(s.config.StateDir, "rehearsal.db")
	s.must(os.WriteFile(file, nil, 0o600))
	finds("a file", func() { s.must(os.Remove(file)) })
	dir := filepath.Join(s.config.RunDir, "shim-9")
	s.must(os.Mkdir(dir, 0o700))
	finds("a directory of sockets", func() { s.must(os.Remove(dir)) })
	open, err := os.Open(s.dir)
	s.must(err)
	finds("a descriptor", func() { s.must(open.Close()) })
	finds("a process", s.sleeper(nil))
	db, err := os.Open(filepath.Join(s.config.StateDir, "shim.db"))
	s.must(err)
	end := s.sleeper(db)
	s.must(db.Close())
	finds("a second process with the state", end)

	l := newLoad(s.host)
	s.plugin.On("CreateVolume").Times(1).Code(codes.InvalidArgument, "no")
	s.eventually("a failed call is found", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.failed) > 0
	})
	l.cancel()
	l.wg.Wait()
}

// sleeper runs a process that looks like a shim of this world, with a file as its input.
func (s *swaps) sleeper(input *os.File) (end func()) {
	s.t.Helper()
	program, err := os.ReadFile("/bin/sleep")
	s.must(err)
	path := filepath.Join(s.config.StateDir, "shims", "sleeper")
	s.must(os.WriteFile(path, program, 0o700))
	cmd := exec.Command(path, "600")
	if input != nil {
		cmd.Stdin = input
	}
	s.must(cmd.Start())
	return func() {
		s.must(cmd.Process.Kill())
		_ = cmd.Wait() // killed
		s.must(os.Remove(path))
	}
}
