package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// anotherShim is a shim of another digest that does the same: bytes behind a program are not of it.
func (w *world) anotherShim(name string) host.Binary {
	w.t.Helper()
	program, err := os.ReadFile(filepath.Join(bin, "holdfast-shim"))
	w.must(err)
	path := filepath.Join(w.dir, name)
	w.must(os.WriteFile(path, append(program, name...), 0o700))
	return host.Binary{Path: path}
}

// mountTable is what is mounted below the world's directories.
func (w *world) mountTable() string {
	w.t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	w.must(err)
	var ours []string
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, w.dir) {
			ours = append(ours, line)
		}
	}
	return strings.Join(ours, "")
}

// took is how long steps of a swap took together.
func took(report host.SwapReport, steps ...host.SwapStep) (sum time.Duration) {
	for _, s := range report.Steps {
		if slices.Contains(steps, s.Step) {
			sum += s.Took
		}
	}
	return sum
}

// notWaitedFor is less than any step waits for a call that does not end, where the budget is patience, and more than the steps need on a slow machine.
const notWaitedFor = 1500 * time.Millisecond

// One call hangs at the driver while shim follows shim: no swap waits for it, each shim makes the same call again, and the last one has its answer.
func TestOneCallSurvivesManyShims(t *testing.T) {
	t.Parallel()
	s := newSuccession(t, everything...)
	p := s.plugin("alloc-p", csifake.Monolith)
	p.On("NodeStageVolume").Times(4).Hang() // until its caller goes
	done := goes(s.story)
	sent := func(n int) func() bool { return func() bool { return len(s.sent("NodeStageVolume")) == n } }
	s.eventually("the call is made", sent(1))
	for n := range 3 {
		report := s.swap()
		s.eventually("the call is made again", sent(n+2))
		t.Logf("calls were held for %s", report.Hold)
	}
	select {
	case err := <-done:
		t.Fatalf("the story ended while a call of it hangs: %v", err)
	default:
	}
	s.kill()
	s.must(s.ends("the story", done))
	if calls := s.oneRequest("NodeStageVolume", 5); len(calls) > 5 {
		t.Errorf("for five shims there were %d calls", len(calls))
	}
	for _, problem := range twoMasters(s.sent(), s.pids) {
		t.Error(problem)
	}
	s.exit(p)
}
