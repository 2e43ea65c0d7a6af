package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
	"holdfast/registry"
)

// rollbackCase is a swap that fails, and how it ends.
type rollbackCase struct {
	name   string
	old    string                                   // fault of the old shim, once
	first  func(*loadedEnv)                         // is called before the swap
	fresh  string                                   // fault of the candidate
	binary func(s *loadedEnv, t string) host.Binary // makes another candidate at a path
	step   host.SwapStep                            // the step that fails; empty: the swap succeeds
	or     host.SwapStep                            // may fail instead, as a death may be noticed later
	kind   error                                    // kind of the error
	says   string                                   // part of the error
	serves activeAfter                              // the active shim afterwards
}

type activeAfter string

const (
	oldOne   activeAfter = "the old process"
	newOne   activeAfter = "the new process"
	oldAnew  activeAfter = "another process of the old binary"
	dead                 = "exited with code 3"
	panicked             = "exited with code 2"
	killed               = "was killed by signal 9"
)

// refused are faults of a candidate before it has changed anything. The old shim is not affected and no call is held.
var refused = []rollbackCase{
	{name: "no such file", binary: absent, step: host.SwapVerify,
		kind: host.ErrNotFound, says: "install the binary at that path"},
	{name: "a directory", binary: directory, step: host.SwapVerify,
		kind: host.ErrInvalid, says: "is not a regular file"},
	{name: "an empty file", binary: file("", 0o700), step: host.SwapVerify, kind: host.ErrInvalid, says: "is empty"},
	{name: "not executable", binary: file("x", 0o600), step: host.SwapVerify, kind: host.ErrInvalid, says: "chmod +x"},
	{name: "everybody may write to it", binary: file("x", 0o702), step: host.SwapVerify,
		kind: host.ErrDenied, says: "chmod o-w"},
	{name: "another digest", binary: digest(strings.Repeat("0", 64)), step: host.SwapVerify,
		kind: host.ErrInvalid, says: "is not the wanted binary"},
	{name: "no digest", binary: digest("green"), step: host.SwapVerify,
		kind: host.ErrInvalid, says: "is not a SHA-256"},
	{name: "another digest beside it", binary: beside, step: host.SwapVerify,
		kind: host.ErrInvalid, says: "is not the wanted binary"},
	{name: "no program", binary: file("hello, world", 0o700),
		kind: host.ErrUnsupported, says: "it is no ELF executable"},
	{name: "another architecture", binary: foreign,
		kind: host.ErrUnsupported, says: "it is an ELF executable for S390"},
	{name: "another program", binary: file("#!/bin/sh\nexec sleep 0\n", 0o700), says: "exited with code 0"},
	{name: "another protocol", fresh: "start protocol 7",
		kind: host.ErrUnsupported, says: "no common protocol version: the shim offers 7"},
	{name: "a state too new for it", fresh: "Rehearse before schema 99",
		kind: host.ErrUnsupported, says: "has schema 99"},
	{name: "rubbish", fresh: "start rubbish", kind: host.ErrInternal, says: `is no handshake: "hello, world"`},
	{name: "exits at start", fresh: "start exit", says: dead},
	{name: "panics at start", fresh: "start panic", says: "panic: a fault"},
	{name: "killed at start", fresh: "start kill-self", says: killed},
	{name: "exits when greeted", fresh: "Hello before exit", says: dead},
	{name: "killed after it was greeted", fresh: "Hello after kill-self", says: killed},
	{name: "panics when greeted", fresh: "Hello before panic", says: "panic: a fault"},
	{name: "refuses the greeting", fresh: "Hello before error unavailable", says: "a fault: error unavailable"},
	{name: "exits in rehearsal", fresh: "Rehearse before exit", says: dead},
	{name: "panics in rehearsal", fresh: "Rehearse after panic", says: "panic: a fault"},
	{name: "killed in rehearsal", fresh: "Rehearse before kill-self", says: killed},
	{name: "finds the state damaged", fresh: "Rehearse before error damaged",
		kind: host.ErrDamaged, says: "a fault: error damaged"},
	{name: "fails in rehearsal", fresh: "Rehearse after error", kind: host.ErrInternal, says: "a fault: error"},
}

// unresponsive are candidates that answer nothing. They are given up after Config.StartTimeout.
var unresponsive = []rollbackCase{
	{name: "hangs at start", fresh: "start hang", says: "sent no handshake"},
	{name: "frozen at start", fresh: "start freeze", says: "sent no handshake"},
	{name: "hangs when greeted", fresh: "Hello before hang", says: "greet the shim: there was no answer within 3s"},
	{name: "frozen when greeted", fresh: "Hello after freeze", says: "greet the shim: there was no answer within 3s"},
	{name: "hangs in rehearsal", fresh: "Rehearse before hang", says: "there was no answer within 3s"},
	{name: "frozen in rehearsal", fresh: "Rehearse after freeze", says: "there was no answer within 3s"},
}

// notActivated are faults while the new shim takes the state, before and after it has begun its generation. The old
// shim takes it back.
var notActivated = []rollbackCase{
	{name: "exits before", fresh: "Activate before exit", says: dead},
	{name: "exits after", fresh: "Activate after exit", says: dead},
	{name: "panics before", fresh: "Activate before panic", says: "panic: a fault"},
	{name: "panics after", fresh: "Activate after panic", says: "panic: a fault"},
	{name: "killed before", fresh: "Activate before kill-self", says: killed},
	{name: "killed after", fresh: "Activate after kill-self", says: killed},
	{name: "hangs before", fresh: "Activate before hang", says: "there was no answer within"},
	{name: "hangs after", fresh: "Activate after hang", says: "there was no answer within"},
	{name: "frozen before", fresh: "Activate before freeze", says: "there was no answer within"},
	{name: "frozen after", fresh: "Activate after freeze", says: "there was no answer within"},
	{name: "refuses before", fresh: "Activate before error exhausted",
		kind: host.ErrExhausted, says: "a fault: error exhausted"},
	{name: "refuses after", fresh: "Activate after error damaged",
		kind: host.ErrDamaged, says: "a fault: error damaged"},
	{name: "fails after", fresh: "Activate after error", kind: host.ErrInternal, says: "a fault: error"},
	{name: "dies in quiesce", old: "Quiesce before kill-other", or: host.SwapQuiesce, says: killed},
	{name: "dies after the fence", old: "Release after kill-other", says: killed},
}

// failingOld are faults of the old shim. From the fence on it is not needed: it is killed, and the new shim is active.
var failingOld = []rollbackCase{
	{name: "refuses to copy", old: "Snapshot before error", step: host.SwapPrepare,
		kind: host.ErrInternal, says: "copy the state: a fault", serves: oldOne},
	{name: "refuses to quiesce", old: "Quiesce before error", step: host.SwapQuiesce,
		kind: host.ErrInternal, says: "a fault: error", serves: oldOne},
	{name: "has quiesced and says it has not", old: "Quiesce after error conflict", step: host.SwapQuiesce,
		kind: host.ErrConflict, says: "a fault", serves: oldOne},
	{name: "exits as it copies", old: "Snapshot before exit"},
	{name: "killed as it has copied", old: "Snapshot after kill-self"},
	{name: "frozen as it copies", old: "Snapshot before freeze"},
	{name: "frozen", first: (*loadedEnv).freezeShim},
	{name: "exits when it should quiesce", old: "Quiesce before exit"},
	{name: "killed when it has quiesced", old: "Quiesce after kill-self"},
	{name: "hangs when it should quiesce", old: "Quiesce before hang"},
	{name: "frozen when it should quiesce", old: "Quiesce before freeze"},
	{name: "frozen when it has quiesced", old: "Quiesce after freeze"},
	{name: "exits when it should release", old: "Release before exit"},
	{name: "panics when it has released", old: "Release after panic"},
	{name: "killed when it should release", old: "Release before kill-self"},
	{name: "hangs when it should release", old: "Release before hang"},
	{name: "hangs when it has released", old: "Release after hang"},
	{name: "frozen when it should release", old: "Release before freeze"},
	{name: "frozen when it has released", old: "Release after freeze"},
	{name: "refuses to release", old: "Release before error conflict"},
	{name: "has released and says it has not", old: "Release after error"},
}

// failingBoth are faults of both shims. The old one does not release the state and is killed; the new one fails. The
// old binary is started again.
var failingBoth = []rollbackCase{
	{name: "does not release, and the new one dies", old: "Release before hang", fresh: "Activate before exit",
		says: dead},
	{name: "does not release, and the new one hangs", old: "Release before hang", fresh: "Activate before hang",
		says: "there was no answer within 10s"},
	{name: "dies as it releases, and the new one dies later", old: "Release before exit",
		fresh: "Activate after kill-self",
		says:  killed},
}

// failingYoung are faults of a new shim that was active. The old one stands by and takes over. Callbacks.Serve is what
// a host calls first at an active shim.
var failingYoung = []rollbackCase{
	{name: "exits at once", fresh: "Callbacks.Serve before exit", says: dead},
	{name: "panics at once", fresh: "Callbacks.Serve before panic", says: "panic: a fault"},
	{name: "killed soon", fresh: "serving 200ms kill-self", says: killed},
	{name: "frozen soon", fresh: "serving 100ms freeze", says: "it gave no answer for"},
	{name: "errs", fresh: "Status before error internal", says: "it gave no answer for"},
	{name: "exits before a call", fresh: "Volumes.Create before exit", says: dead},
	{name: "panics after a call", fresh: "Volumes.Create after panic", says: "panic: a fault"},
	{name: "killed after a call", fresh: "Volumes.Delete after kill-self", says: killed},
}

// Whatever fails before the commit, a working shim is active: the old process, its binary started again, or, if the old
// one fails, the new one. One error names the step and the reason, and so does the history. No call fails, nothing is
// left, and the next swap succeeds.
func TestRollback(t *testing.T) {
	slow(t)
	all := func(cases []rollbackCase, usual rollbackCase, change func(*host.Config)) func(t *testing.T) {
		return func(t *testing.T) {
			l := newLoadedEnv(t, change)
			for _, c := range cases {
				if c.step == "" {
					c.step = usual.step
				}
				if c.kind == nil {
					c.kind = usual.kind
				}
				if c.serves == "" {
					c.serves = usual.serves
				}
				t.Run(c.name, func(t *testing.T) { l.checkRollback(t, c) })
			}
		}
	}
	keepsOld := func(step host.SwapStep) rollbackCase {
		return rollbackCase{step: step, kind: host.ErrUnavailable, serves: oldOne}
	}
	anew := rollbackCase{step: host.SwapActivate, kind: host.ErrUnavailable, serves: oldAnew}
	t.Run("refused", all(refused, keepsOld(host.SwapPrepare), func(c *host.Config) { c.SwapBudget = waitLimit }))
	t.Run("unresponsive", all(unresponsive, keepsOld(host.SwapPrepare), func(c *host.Config) {
		c.StartTimeout, c.PrepareTimeout = limit, limit
	}))
	t.Run("not activated", all(notActivated, keepsOld(host.SwapActivate), func(*host.Config) {}))
	t.Run("the old one fails", all(failingOld, rollbackCase{serves: newOne}, func(*host.Config) {}))
	t.Run("both fail", all(failingBoth, anew, func(*host.Config) {}))
	t.Run("young", all(failingYoung, keepsOld(host.SwapBake), func(c *host.Config) {
		c.SwapBudget, c.Bake, c.AnswerTimeout = waitLimit, 2*limit, limit
	}))
	t.Run("unresponsive late", all(of(failingYoung, "frozen soon", "errs"), keepsOld(host.SwapBake),
		func(c *host.Config) {
			c.Bake, c.AnswerTimeout = limit, limit // the same, as by default
		}))
}

// of returns the cases of those names.
func of(cases []rollbackCase, names ...string) []rollbackCase {
	return slices.DeleteFunc(slices.Clone(cases), func(c rollbackCase) bool { return !slices.Contains(names, c.name) })
}

// limit is long enough for what succeeds on a slow machine, and short enough to wait for.
const limit = 3 * time.Second

// checkRollback carries out one case and checks its end.
func (s *loadedEnv) checkRollback(t *testing.T, c rollbackCase) {
	s.forSubtest(t)
	if c.old != "" {
		s.swapTo(s.faultyShim(c.old + " times 1"))
	}
	s.waitLoad()
	was, before := s.activeShim(), s.traces()
	if c.first != nil {
		c.first(s)
	}
	report, err := s.host.SwapAs(s.ctx(), c.candidate(s), "tester")
	t.Log(err)
	if c.step == host.SwapBake {
		report, err = s.waitRolledBack(report, err)
	}
	s.checkReport(c, report, err)
	s.checkActive(c.serves, was, report)
	s.waitLoad()
	s.checkTraces(before)
	if c.step == host.SwapVerify {
		return // nothing has begun; the next case shows that swaps go well
	}
	s.swapTo(s.nextGood())
	s.checkTraces(before)
}

// freezeShim freezes the active shim.
func (s *loadedEnv) freezeShim() { s.must(unix.Kill(s.activeShim().PID, unix.SIGSTOP)) }

func (c rollbackCase) candidate(s *loadedEnv) host.Binary {
	if c.binary == nil {
		return s.faultyShim(c.fresh)
	}
	path := filepath.Join(s.dir, strings.ReplaceAll(c.name, " ", "-"))
	s.t.Cleanup(func() { _ = os.RemoveAll(path) })
	return c.binary(s, path)
}

// checkReport compares the report and the error of a swap with the case.
func (s *loadedEnv) checkReport(c rollbackCase, report host.SwapReport, err error) {
	s.t.Helper()
	if c.step == "" {
		if err != nil || report.Outcome != host.SwapBaking || report.Failed != "" {
			s.t.Errorf("%v; %+v", err, report)
		}
		return
	}
	if c.or != "" && report.Failed == c.or {
		c.step = c.or
	}
	outcome, says := host.SwapRefused, fmt.Sprintf("swap: %s: ", c.step)
	if c.step == host.SwapActivate || c.step == host.SwapBake {
		outcome = host.SwapRolledBack
	}
	if err == nil || !errors.Is(err, c.kind) || !strings.HasPrefix(err.Error(), says) ||
		!strings.Contains(err.Error(), c.says) {
		s.t.Errorf("the error is %v: it should begin with %q, be %v and say %q", err, says, c.kind, c.says)
	}
	if report.Outcome != outcome || report.Failed != c.step || !strings.Contains(report.Reason, c.says) ||
		report.By != "tester" {
		s.t.Errorf("%s of %s by %s, as %q; it should be %s of %s by tester, as %q",
			report.Outcome, report.Failed, report.By, report.Reason, outcome, c.step, c.says)
	}
	if (c.step == host.SwapVerify || c.step == host.SwapPrepare) && (report.Hold != 0 || report.Held != 0) {
		s.t.Errorf("%d calls were held, for up to %s", report.Held, report.Hold)
	}
	if told := s.host.Swaps()[0]; !reflect.DeepEqual(told, report) {
		s.t.Errorf("the history says %+v, and the swap said %+v", told, report)
	}
}

// waitRolledBack waits until a swap that succeeded is rolled back, and returns what the history has of it.
func (s *loadedEnv) waitRolledBack(report host.SwapReport, err error) (host.SwapReport, error) {
	s.t.Helper()
	s.must(err)
	s.waitUntil("the old shim takes over", func() bool { return s.host.Swaps()[0].Outcome == host.SwapRolledBack })
	told := s.host.Swaps()[0]
	if !told.Began.Equal(report.Began) {
		s.t.Errorf("the last swap is %+v", told)
	}
	return told, registry.Errorf(registry.ErrUnavailable, "swap: %s: %s", told.Failed, told.Reason)
}

// checkActive compares the active shim with the one that should be active.
func (s *loadedEnv) checkActive(by activeAfter, was host.ShimStatus, report host.SwapReport) {
	s.t.Helper()
	st := s.activeShim()
	right := map[activeAfter]bool{
		oldOne:  st.PID == was.PID && st.SHA256 == was.SHA256 && st.Generation >= was.Generation,
		newOne:  st.PID != was.PID && st.SHA256 == report.To && st.Generation > was.Generation,
		oldAnew: st.PID != was.PID && st.SHA256 == was.SHA256 && st.Generation > was.Generation,
	}
	if !right[by] {
		s.t.Errorf("%+v serves, and %+v did; it should be %s", st, was, by)
	}
	if report.Outcome == host.SwapRefused && by == oldOne && st.Generation != was.Generation {
		s.t.Errorf("generation %d has become %d", was.Generation, st.Generation)
	}
}

func absent(_ *loadedEnv, path string) host.Binary { return host.Binary{Path: path} }

func directory(s *loadedEnv, path string) host.Binary {
	s.must(os.Mkdir(path, 0o700))
	return host.Binary{Path: path}
}

func file(text string, mode os.FileMode) func(*loadedEnv, string) host.Binary {
	return func(s *loadedEnv, path string) host.Binary {
		s.must(os.WriteFile(path, []byte(text), 0o600))
		s.must(os.Chmod(path, mode))
		return host.Binary{Path: path}
	}
}

func digest(sum string) func(*loadedEnv, string) host.Binary {
	return func(s *loadedEnv, _ string) host.Binary {
		b := s.faultyShim()
		b.SHA256 = sum
		return b
	}
}

func beside(s *loadedEnv, _ string) host.Binary {
	b := s.faultyShim()
	s.must(os.WriteFile(b.Path+".sha256", []byte(strings.Repeat("0", 64)+"  shim\n"), 0o600))
	return b
}

// foreign is a shim for another machine, as its ELF header says.
func foreign(s *loadedEnv, _ string) host.Binary {
	b := s.faultyShim()
	f, err := os.OpenFile(b.Path, os.O_WRONLY, 0)
	s.must(err)
	defer f.Close()
	_, err = f.WriteAt([]byte{22, 0}, 18) // e_machine: EM_S390
	s.must(err)
	return b
}

// A candidate fails to activate and leaves a mount in its socket directory. It counts as dead: the old shim continues.
func TestRollbackFromAShimThatLeavesAMount(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("to mount something needs root")
	}
	t.Parallel()
	w := newEnv(t, allCaps...)
	w.must(w.host.Close())
	w.config.SwapBudget = waitLimit
	w.open()
	p := w.addPlugin("alloc-p", csifake.Monolith)
	before, err := w.host.Status(w.ctx())
	w.must(err)
	old, err := filepath.Glob(filepath.Join(w.config.RunDir, "shim-*"))
	w.must(err)
	ready, mounted := filepath.Join(w.dir, "ready"), filepath.Join(w.dir, "mounted")
	path := fault.Binary(t, faulty, w.dir, "mounts",
		"Rehearse after touch "+ready, "Rehearse after wait-for "+mounted, "Activate before error exhausted")
	done := make(chan error, 1)
	go func() {
		_, err := w.host.Swap(w.ctx(), host.Binary{Path: path})
		done <- err
	}()
	w.must(waitFor(t.Context(), "the candidate rehearses", func() bool {
		_, err := os.Lstat(ready)
		return err == nil
	}))
	both, err := filepath.Glob(filepath.Join(w.config.RunDir, "shim-*"))
	w.must(err)
	at := slices.IndexFunc(both, func(dir string) bool { return !slices.Contains(old, dir) })
	point := filepath.Join(both[at], "volume")
	w.must(os.Mkdir(point, 0o700))
	w.must(unix.Mount("tmpfs", point, "tmpfs", 0, ""))
	defer unmount(t, point)
	w.must(os.WriteFile(mounted, nil, 0o600))
	if err := <-done; !errors.Is(err, host.ErrExhausted) || strings.Contains(err.Error(), point) {
		t.Errorf("the swap: %v", err)
	}
	after, err := w.host.Status(w.ctx())
	w.must(err)
	if after.PID != before.PID || after.Generation != before.Generation {
		t.Errorf("the shim was %+v and is %+v", before, after)
	}
	w.stopPlugin(p)
}
