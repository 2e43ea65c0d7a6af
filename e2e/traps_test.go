package e2e

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"holdfast/host"
)

// A shim that writes what breaks readers of logs, and one that leaves a child with its pipes, are replaced and replace others like any shim, and
// the child ends with them. One that dies meanwhile is refused at once, though the pipes stay open.
func TestSwapsOfNoisyShims(t *testing.T) {
	slow(t)
	s := newSwaps(t, func(*host.Config) {})
	s.goesOn()
	before, kin := s.traces(), s.kin()
	for _, lines := range [][]string{
		{"start noise", "Rehearse before noise", "Activate before noise", "Release before noise"},
		{"start fork"},
		{"Rehearse before fork", "Activate after fork", "Release after fork"},
	} {
		s.good(s.faulty(lines...))
		s.good(s.next())
		s.goesOn()
	}
	for _, lines := range [][]string{{"start fork", "start exit"}, {"start fork", "start rubbish"}, {"Rehearse before fork", "Rehearse before panic"}} {
		report, err := s.host.Swap(s.ctx(), s.faulty(lines...))
		if err == nil || report.Outcome != host.SwapRefused {
			t.Errorf("%q: %v; %+v", lines, err, report)
		}
	}
	s.good(s.next())
	s.leftNothing(before)
	s.eventually("the children have ended", func() bool { return s.kin() == kin })
}

// kin counts the processes that were started below this world's directories or by a shim of it.
func (s *swaps) kin() (n int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		program, _ := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		if err == nil && pid != os.Getpid() && alive(pid) && strings.Contains(program+proc(pid, "environ"), s.dir) {
			n++
		}
	}
	return n
}
