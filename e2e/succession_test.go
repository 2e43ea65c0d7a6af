package e2e

import (
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"holdfast/host"
)

// twins are two shims of other digests that do the same as the first, made once for all tests.
var twins = sync.OnceValues(func() (made [2]host.Binary, err error) {
	program, err := os.ReadFile(filepath.Join(bin, "holdfast-shim"))
	for i, name := range []string{"holdfast-shim-castor", "holdfast-shim-pollux"} {
		made[i].Path = filepath.Join(bin, name)
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
}

// newSuccession opens a host that gives a swap as long as it takes on a busy machine: how long calls are held is measured elsewhere.
func newSuccession(t *testing.T, caps ...string) *succession {
	t.Helper()
	w := placed(t, caps...)
	w.config.SwapBudget, w.config.Bake = patience, 50*time.Millisecond
	w.open()
	s := &succession{world: w}
	s.serves()
	return s
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
func (s *succession) swap() host.Swapped {
	s.t.Helper()
	binaries, err := twins()
	s.must(err)
	report, err := s.host.Swap(s.ctx(), binaries[s.swaps%2])
	s.must(err)
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
