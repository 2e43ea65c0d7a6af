package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/fault"
)

// twins are two shims of other digests that do the same as the first, made once for all tests.
var twins = sync.OnceValues(func() (made [2]host.Binary, err error) {
	program, err := os.ReadFile(filepath.Join(bin, "holdfast-shim"))
	for i, name := range []string{"holdfast-shim-castor", "holdfast-shim-pollux"} {
		made[i].Path = filepath.Join(os.TempDir(), name)
		if err == nil {
			err = os.WriteFile(made[i].Path, append(program[:len(program):len(program)], name...), 0o700)
		}
	}
	return made, err
})

// succession is a world whose shims follow one another.
type succession struct {
	*world
	pids  []int // of the shims that have served, in their order
	swaps int
	turns [2]host.Binary // that follow one another
}

// newSuccession opens a host that gives a swap as long as it takes on a busy machine: how long calls are held is measured elsewhere.
func newSuccession(t *testing.T, caps ...string) *succession {
	t.Helper()
	w := placed(t, caps...)
	w.config.SwapBudget, w.config.Bake = patience, 50*time.Millisecond
	w.open()
	return w.succession()
}

// succession is the world's, from the shim that serves now.
func (w *world) succession() *succession {
	w.t.Helper()
	turns, err := twins()
	w.must(err)
	s := &succession{world: w, turns: turns}
	s.serves()
	return s
}

// follow has shims with these faults follow one another from now on.
func (s *succession) follow(lines ...string) {
	s.t.Helper()
	for i, name := range []string{"faulty-castor", "faulty-pollux"} {
		s.turns[i] = host.Binary{Path: fault.Binary(s.t, faulty, s.dir, name, lines...)}
	}
}

// halt is a point of package fault at which whichever shim comes there waits, while it is shut.
type halt struct{ point, reached, open string }

// halt is an open one.
func (s *succession) halt(point string) *halt {
	s.t.Helper()
	name := filepath.Join(s.dir, strings.ReplaceAll(point, " ", "-"))
	h := &halt{point, name + "-reached", name + "-open"}
	s.must(h.opens())
	return h
}

// lines are the faults of shims that halt there.
func (h *halt) lines() []string {
	return []string{h.point + " touch " + h.reached, h.point + " wait-for " + h.open}
}

func (h *halt) opens() error { return os.WriteFile(h.open, nil, 0o600) }

func (h *halt) shuts() error {
	_ = os.Remove(h.reached) // of a shim that went on
	return os.Remove(h.open)
}

// serves notes who serves now.
func (s *succession) serves() host.ShimStatus {
	s.t.Helper()
	st, err := s.host.Status(s.ctx())
	s.must(err)
	if n := len(s.pids); n == 0 || s.pids[n-1] != st.PID {
		s.pids = append(s.pids, st.PID)
	}
	return st
}

// swap replaces the shim, and says what that came to.
func (s *succession) swap() host.SwapReport {
	s.t.Helper()
	return s.swapWhile(func() {})
}

// swapWhile replaces the shim while something is done.
func (s *succession) swapWhile(done func()) host.SwapReport {
	s.t.Helper()
	var report host.SwapReport
	ctx, next := s.ctx(), s.turns[s.swaps%2]
	swapped := goes(func() (err error) { report, err = s.host.Swap(ctx, next); return err })
	done()
	s.must(s.ends("the swap", swapped))
	s.swaps++
	if st := s.serves(); st.SHA256 != report.To || st.Generation < report.Generation {
		s.t.Errorf("after the swap %+v the shim is %+v", report, st)
	}
	return report
}

// committed returns once nobody stands by.
func (s *succession) committed() {
	s.t.Helper()
	s.eventually("the last swap is committed", func() bool {
		all := s.host.Swaps()
		return len(all) == 0 || all[0].Outcome != host.SwapBaking
	})
}

// kill kills the shim, and returns once another one serves, which is a new one.
func (s *succession) kill() {
	s.t.Helper()
	s.committed()
	was := s.serves()
	s.must(syscall.Kill(was.PID, syscall.SIGKILL))
	s.eventually("the next shim serves", func() bool { return s.serves().PID != was.PID })
}
