package e2e

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/registry"
)

// rollbackCase is a swap that fails, and how it ends. Package host tests the order of steps for every failure, package
// launch every bad binary and start.
type rollbackCase struct {
	name   string
	old    string        // fault of the old shim, once
	frozen bool          // the old shim is frozen
	next   string        // fault of the candidate
	step   host.SwapStep // the step that fails; empty: the swap succeeds
	kind   error         // kind of the error; nil: host.ErrUnavailable
	says   string        // part of the error
	active activeAfter   // the active shim afterwards
}

type activeAfter string

const (
	oldProcess activeAfter = "the old process"
	newProcess activeAfter = "the new process"
	oldBinary  activeAfter = "another process of the old binary"

	exited   = "exited with code 3"
	panicked = "panic: a fault"
	killed   = "was killed by signal 9"
	silent   = "there was no answer within"
)

// failures are faults before the commit. In prepare the old shim is not affected. A new shim that does not activate
// gives the state back. From the fence on the old shim is not needed: a failing one is killed.
var failures = []rollbackCase{
	{name: "exits at start", next: "start exit", step: host.SwapPrepare, says: exited, active: oldProcess},
	{name: "hangs at start", next: "start hang", step: host.SwapPrepare, says: "sent no handshake", active: oldProcess},
	{name: "freezes in Hello", next: "Hello after freeze", step: host.SwapPrepare, says: silent, active: oldProcess},
	{name: "is killed after Hello", next: "Hello after kill-self", step: host.SwapPrepare, says: killed,
		active: oldProcess},
	{name: "panics in rehearsal", next: "Rehearse after panic", step: host.SwapPrepare, says: panicked,
		active: oldProcess},
	{name: "finds the state damaged", next: "Rehearse before error damaged", step: host.SwapPrepare,
		kind: host.ErrDamaged, says: "a fault: error damaged", active: oldProcess},
	{name: "old refuses to copy", old: "Snapshot before error", step: host.SwapPrepare,
		kind: host.ErrInternal, says: "copy the state: a fault", active: oldProcess},
	{name: "old refuses to quiesce", old: "Quiesce before error", step: host.SwapQuiesce,
		kind: host.ErrInternal, says: "a fault: error", active: oldProcess},

	{name: "exits before it activates", next: "Activate before exit", step: host.SwapActivate, says: exited,
		active: oldProcess},
	{name: "is killed after it activates", next: "Activate after kill-self", step: host.SwapActivate, says: killed,
		active: oldProcess},
	{name: "hangs before it activates", next: "Activate before hang", step: host.SwapActivate, says: silent,
		active: oldProcess},
	{name: "freezes after it activates", next: "Activate after freeze", step: host.SwapActivate, says: silent,
		active: oldProcess},
	{name: "refuses after it activates", next: "Activate after error damaged", step: host.SwapActivate,
		kind: host.ErrDamaged, says: "a fault: error damaged", active: oldProcess},
	{name: "dies after the fence", old: "Release after kill-other", step: host.SwapActivate, says: killed,
		active: oldProcess},

	{name: "old exits as it copies", old: "Snapshot before exit", active: newProcess},
	{name: "old is frozen", frozen: true, active: newProcess},
	{name: "old exits before it quiesces", old: "Quiesce before exit", active: newProcess},
	{name: "old hangs before it quiesces", old: "Quiesce before hang", active: newProcess},
	{name: "old is killed after it releases", old: "Release after kill-self", active: newProcess},
	{name: "old freezes before it releases", old: "Release before freeze", active: newProcess},
	{name: "old refuses to release", old: "Release before error conflict", active: newProcess},

	{name: "old hangs and new exits", old: "Release before hang", next: "Activate before exit",
		step: host.SwapActivate, says: exited, active: oldBinary},
}

// failuresInBake are faults of a new shim that was active. The old one stands by and takes over. Callbacks.Serve is the
// first call of a host to an active shim.
var failuresInBake = []rollbackCase{
	{name: "exits at once", next: "Callbacks.Serve before exit", step: host.SwapBake, says: exited, active: oldProcess},
	{name: "freezes soon", next: "serving 1s freeze", step: host.SwapBake, says: "it gave no answer for",
		active: oldProcess},
	{name: "panics after a call", next: "Volumes.Create after panic", step: host.SwapBake, says: panicked,
		active: oldProcess},
}

// shortLimit bounds what hangs. It is enough for everything else, also on a slow machine.
const shortLimit = 5 * time.Second

// Whatever fails before the commit, a working shim is active: the old process, its binary started again, or, if the old
// one fails, the new one. One error names the step and the reason, and so does the history. No call fails, nothing is
// left, and the next swap succeeds.
func TestRollback(t *testing.T) {
	slow(t)
	for name, env := range map[string]struct {
		cases  []rollbackCase
		change func(*host.Config)
	}{
		"before the commit": {failures,
			func(c *host.Config) { c.StartTimeout, c.PrepareTimeout = shortLimit, shortLimit }},
		"in the bake": {failuresInBake, func(c *host.Config) {
			c.SwapBudget, c.Bake, c.AnswerTimeout = waitLimit, 3*shortLimit, shortLimit
		}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLoadedEnv(t, env.change)
			for _, c := range env.cases {
				t.Run(c.name, func(t *testing.T) { l.checkRollback(t, c) })
			}
		})
	}
}

// checkRollback carries out one case and checks its end.
func (l *loadedEnv) checkRollback(t *testing.T, c rollbackCase) {
	l.forSubtest(t)
	if c.old != "" {
		l.swapTo(l.faultyShim(c.old + " times 1"))
	}
	l.waitLoad()
	was, before := l.activeShim(), l.traces()
	if c.frozen {
		l.must(unix.Kill(was.PID, unix.SIGSTOP))
	}
	report, err := l.host.SwapAs(l.ctx(), l.faultyShim(c.next), "tester")
	t.Log(err)
	if c.step == host.SwapBake {
		report, err = l.waitRolledBack(report, err)
	}
	l.checkReport(c, report, err)
	l.checkActive(c.active, was, report)
	l.waitLoad()
	l.checkTraces(before)
	l.swapTo(l.nextGood())
	l.checkTraces(before)
}

// checkReport compares the report and the error of a swap with the case.
func (l *loadedEnv) checkReport(c rollbackCase, report host.SwapReport, err error) {
	l.t.Helper()
	if c.step == "" {
		if err != nil || report.Outcome != host.SwapBaking || report.Failed != "" {
			l.t.Errorf("%v; %+v", err, report)
		}
		return
	}
	outcome, begin := host.SwapRefused, fmt.Sprintf("swap: %s: ", c.step)
	if c.step == host.SwapActivate || c.step == host.SwapBake {
		outcome = host.SwapRolledBack
	}
	if c.kind == nil {
		c.kind = host.ErrUnavailable
	}
	if !errors.Is(err, c.kind) || !strings.HasPrefix(err.Error(), begin) || !strings.Contains(err.Error(), c.says) {
		l.t.Errorf("the error is %v; want %q, kind %v, containing %q", err, begin, c.kind, c.says)
	}
	if report.Outcome != outcome || report.Failed != c.step || !strings.Contains(report.Reason, c.says) ||
		report.By != "tester" {
		l.t.Errorf("the report is %+v; want %s at %s by tester, with %q", report, outcome, c.step, c.says)
	}
	if c.step == host.SwapPrepare && (report.Hold != 0 || report.Held != 0) {
		l.t.Errorf("%d calls were held, for up to %s", report.Held, report.Hold)
	}
	if last := l.host.Swaps()[0]; !reflect.DeepEqual(last, report) {
		l.t.Errorf("the history has %+v, and the swap returned %+v", last, report)
	}
}

// waitRolledBack waits until a swap that succeeded is rolled back, and returns its report in the history.
func (l *loadedEnv) waitRolledBack(report host.SwapReport, err error) (host.SwapReport, error) {
	l.t.Helper()
	l.must(err)
	l.waitUntil("the old shim takes over", func() bool { return l.host.Swaps()[0].Outcome == host.SwapRolledBack })
	last := l.host.Swaps()[0]
	if !last.Began.Equal(report.Began) {
		l.t.Errorf("the last swap is %+v", last)
	}
	return last, registry.Errorf(registry.ErrUnavailable, "swap: %s: %s", last.Failed, last.Reason)
}

// checkActive compares the active shim with the one that should be active.
func (l *loadedEnv) checkActive(want activeAfter, was host.ShimStatus, report host.SwapReport) {
	l.t.Helper()
	st := l.activeShim()
	right := map[activeAfter]bool{
		oldProcess: st.PID == was.PID && st.SHA256 == was.SHA256 && st.Generation >= was.Generation,
		newProcess: st.PID != was.PID && st.SHA256 == report.To && st.Generation > was.Generation,
		oldBinary:  st.PID != was.PID && st.SHA256 == was.SHA256 && st.Generation > was.Generation,
	}
	if !right[want] || report.Outcome == host.SwapRefused && st.Generation != was.Generation {
		l.t.Errorf("%+v is active, and %+v was; want %s", st, was, want)
	}
}
