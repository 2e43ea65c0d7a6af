package host

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/host/internal/launch"
)

// harness is a supervisor of fake peers, in the time of a synctest bubble.
type harness struct {
	t      *testing.T
	host   *Host
	owner  string
	gate   fakeGate
	leave  context.CancelCauseFunc
	ended  chan error
	first  *fakePeer
	second *fakePeer // after swapToSecond
}

// newHarness supervises a first peer. No other can be started in its place.
func newHarness(t *testing.T, c Config) *harness {
	dir := t.TempDir()
	c.Logger = hclog.NewNullLogger()
	orDefault(&c.Bake, defaultBake)
	orDefault(&c.SwapBudget, defaultBudget)
	orDefault(&c.AnswerTimeout, defaultAnswer)
	c.Start = startProcess
	binaries, err := launch.OpenStore(filepath.Join(dir, "shims"))
	if err != nil {
		t.Fatal(err)
	}
	h := &harness{t: t, owner: "first", ended: make(chan error, 1), host: &Host{
		config: c, gate: newGate(), swaps: make(chan *preparedSwap),
		history: openHistory(dir), choice: openChoice(dir), binaries: binaries,
	}}
	h.host.running.Store(&digest{})
	h.host.closing, h.leave = context.WithCancelCause(t.Context())
	h.first = h.peer("first")
	s := newSupervisor(h.host, &h.gate, h.first)
	go func() { h.ended <- s.run(h.host.closing) }()
	t.Cleanup(h.close)
	return h
}

func (h *harness) close() {
	h.leave(errClosed)
	<-h.ended
	h.host.background.Wait()
}

func (h *harness) peer(name string) *fakePeer {
	return newFakePeer(name, faults{}, new([]string), &h.owner)
}

func (h *harness) swapToSecond() {
	h.t.Helper()
	h.second = h.peer("second")
	if err := h.swap(h.second); err != nil {
		h.t.Fatal(err)
	}
}

func (h *harness) swap(next *fakePeer) error {
	s := &swap{
		next: next, gate: &h.gate, limits: limitsWithin(defaultBudget),
		progress: func(SwapReport, SwapStep) {}, report: SwapReport{Began: time.Now()},
	}
	p := &preparedSwap{ctx: h.t.Context(), swap: s, done: make(chan error, 1)}
	h.host.swaps <- p
	return <-p.done
}

// outcome returns the outcome of the last swap.
func (h *harness) outcome() SwapOutcome {
	synctest.Wait()
	return h.host.history.list()[0].Outcome
}

// bubble runs f in fake time as a parallel subtest.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, f)
	})
}

// The old shim replaces a new one that does not answer at the end of its bake, even if the bake ends before the
// watchdog acts. A new shim that is only slow stays.
func TestBakeEndsWithAnAnswer(t *testing.T) {
	t.Parallel()
	const never = time.Hour
	for _, c := range []struct {
		name    string
		from    time.Duration // after the swap: when it stops answering
		until   time.Duration
		errs    bool // it answers with errors instead of not at all
		bake    time.Duration
		outcome SwapOutcome
	}{
		{"answers", never, never, false, 0, SwapCommitted},
		{"frozen at once", 0, never, false, 0, SwapRolledBack},
		{"errors", 0, never, true, 0, SwapRolledBack},
		{"frozen soon", time.Second, never, false, 0, SwapRolledBack},
		{"frozen late", defaultBake - time.Millisecond, never, false, 0, SwapRolledBack},
		{"errors late", defaultBake - time.Millisecond, never, true, 0, SwapRolledBack},
		{"frozen in a short bake", time.Millisecond, never, false, 2 * time.Millisecond, SwapRolledBack},
		{"frozen afterwards", defaultBake + time.Second, never, false, 0, SwapCommitted},
		{"answers late", defaultBake - time.Second, defaultBake + time.Second, false, 0, SwapCommitted},
	} {
		bubble(t, c.name, func(t *testing.T) {
			h := newHarness(t, Config{Bake: c.bake})
			h.swapToSecond()
			silent := &h.second.frozen
			if c.errs {
				silent = &h.second.errs
			}
			time.AfterFunc(c.from, func() { silent.Store(true) })
			time.AfterFunc(c.until, func() { silent.Store(false) })
			time.Sleep(time.Minute)
			if got := h.outcome(); got != c.outcome {
				t.Errorf("the swap is %s", got)
			}
			if back := c.outcome == SwapRolledBack; isDead(h.first) == back || back && h.gate.active.Load() != h.first {
				t.Errorf("the old shim is dead: %t; calls go to %v", isDead(h.first), h.gate.active.Load())
			}
		})
	}
}

func TestStandbyThatWasFrozenTakesOverOnceItAnswers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, Config{Bake: time.Hour})
		h.swapToSecond()
		h.first.frozen.Store(true)
		time.Sleep(time.Minute)
		h.first.frozen.Store(false)
		time.Sleep(time.Minute)
		_ = h.second.kill(t.Context())
		time.Sleep(time.Minute)
		if got := h.outcome(); got != SwapRolledBack || h.gate.active.Load() != h.first || isDead(h.first) {
			t.Errorf("the swap is %s; calls go to %v", got, h.gate.active.Load())
		}
		h.first.frozen.Store(true)
		time.Sleep(time.Minute)
		if synctest.Wait(); !isDead(h.first) {
			t.Error("it is active, frozen, and not killed")
		}
	})
}

// Calls are held, so the binary of a frozen standby is started instead.
func TestRollbackDoesNotWaitForAFrozenStandby(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, Config{Bake: time.Hour})
		h.swapToSecond()
		h.first.frozen.Store(true)
		_ = h.second.kill(t.Context())
		time.Sleep(2 * defaultBudget)
		synctest.Wait()
		if st := h.host.ShimState(); h.outcome() != SwapRolledBack || !isDead(h.first) || st.Failures == 0 {
			t.Errorf("the swap is %s; the first shim is dead: %t; %+v", h.outcome(), isDead(h.first), st)
		}
	})
}

// Calls are held until the old shim serves again, so nothing slow comes before that.
func TestRollbackRevivesTheOldShimFirst(t *testing.T) {
	t.Parallel()
	for name, slow := range map[string]func(h *harness, until <-chan struct{}){
		"the disk hangs": func(h *harness, until <-chan struct{}) {
			hang := func() error { <-until; return nil }
			go func() { _ = h.host.history.writer.do(hang) }()
			go func() { _ = h.host.choice.writer.do(hang) }()
		},
		"the dead shim's files are removed slowly": func(h *harness, _ <-chan struct{}) { h.second.frozen.Store(true) },
	} {
		bubble(t, name, func(t *testing.T) {
			h := newHarness(t, Config{Bake: time.Hour})
			h.swapToSecond()
			synctest.Wait()
			until := make(chan struct{})
			slow(h, until)
			synctest.Wait()
			began := time.Now()
			_ = h.second.kill(t.Context())
			synctest.Wait()
			if at := h.gate.active.Load(); at != h.first || !h.host.ShimState().Serving || time.Since(began) > 0 {
				t.Errorf("calls go to %v after %v", at, time.Since(began))
			}
			close(until)
			time.Sleep(time.Minute)
			if st := h.host.ShimState(); h.outcome() != SwapRolledBack || st.Reason != errNo.Error() {
				t.Errorf("the swap is %s: %+v", h.outcome(), st)
			}
			h.host.history.writer.wait()
			if past := openHistory(filepath.Dir(h.host.history.path)); past.list()[0].Outcome != SwapRolledBack {
				t.Errorf("on disk: %+v", past.list())
			}
		})
	}
}

// The old shim is frozen when its bake is over. While it is being ended, the supervisor handles everything else.
func TestOldShimEndsBesideTheSupervisor(t *testing.T) {
	t.Parallel()
	for name, meanwhile := range map[string]func(h *harness){
		"the active one dies": func(h *harness) {
			_ = h.second.kill(h.t.Context())
			synctest.Wait()
			if at := h.gate.active.Load(); at != nil || h.host.ShimState().Serving {
				h.t.Errorf("calls go to %v: %+v", at, h.host.ShimState())
			}
		},
		"the next swap": func(h *harness) {
			third := h.peer("third")
			if err := h.swap(third); err != nil || h.gate.active.Load() != third {
				h.t.Errorf("%v; calls go to %v", err, h.gate.active.Load())
			}
			if all := h.host.history.list(); len(all) != 2 || all[1].Outcome != SwapCommitted || !isDead(h.first) {
				h.t.Errorf("%+v; the first shim is dead: %t", all, isDead(h.first))
			}
		},
		"the next swap, and Close": func(h *harness) {
			third, swapped := h.peer("third"), make(chan error, 1)
			go func() { swapped <- h.swap(third) }()
			synctest.Wait()
			h.leave(errClosed)
			if err := <-swapped; !errors.Is(err, errClosed) || !isDead(third) {
				h.t.Errorf("%v; the candidate is dead: %t", err, isDead(third))
			}
		},
	} {
		bubble(t, name, func(t *testing.T) {
			h := newHarness(t, Config{})
			h.swapToSecond()
			h.first.frozen.Store(true)
			time.Sleep(defaultBake + time.Second)
			if synctest.Wait(); isDead(h.first) || h.first.stops.Load() != 1 || h.outcome() != SwapBaking {
				t.Fatalf("the first shim is dead: %t", isDead(h.first))
			}
			meanwhile(h)
			time.Sleep(killLimit)
			if got := h.outcome(); got == SwapBaking && name == "the active one dies" || !isDead(h.first) {
				t.Errorf("the swap is %s; the first shim is dead: %t", got, isDead(h.first))
			}
		})
	}
}

// While a killed shim does not exit, none is started and none is swapped to. Its exit is enough for the next start.
func TestNoShimIsStartedBesideAnUnkillableOne(t *testing.T) {
	t.Parallel()
	for name, failures := range map[string]int{"it does not release": 1, "it does not answer": 0} {
		bubble(t, name, func(t *testing.T) {
			h := newHarness(t, Config{})
			h.first.hangs, h.first.stuck = map[string]bool{"release": true}, true
			if h.first.frozen.Store(name == "it does not answer"); h.first.frozen.Load() {
				time.Sleep(time.Minute)
			}
			for _, name := range []string{"second", "third"} {
				next := h.peer(name)
				err := h.swap(next)
				if !errors.Is(err, errUnkillable) || !isDead(next) || slices.Contains(*next.script, name+" activate") {
					t.Errorf("a swap: %v; the candidate is dead: %t; its calls: %q", err, isDead(next), *next.script)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if st := h.host.ShimState(); h.gate.active.Load() != nil || st.Serving || st.Failures != failures ||
					!st.Next.IsZero() {
					t.Errorf("calls go to %v: %+v", h.gate.active.Load(), st)
				}
			}
			close(h.first.gone)
			time.Sleep(time.Minute)
			if synctest.Wait(); h.host.ShimState().Failures < 2 {
				t.Errorf("no start is tried: %+v", h.host.ShimState())
			}
		})
	}
}

// A swap that the supervisor does not take in time has the failed step and the reason in its report.
func TestSwapThatIsNotTakenIsReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := &Host{swaps: make(chan *preparedSwap)}
		next := newFakePeer("next", faults{}, new([]string), new(string))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		s := &swap{next: next, progress: func(SwapReport, SwapStep) {}, report: SwapReport{Outcome: SwapRefused}}
		err := h.superviseSwap(&preparedSwap{ctx: ctx, swap: s})
		if r := s.report; !errors.Is(err, context.DeadlineExceeded) || r.Failed != SwapQuiesce || r.Reason == "" ||
			r.Outcome != SwapRefused || !isDead(next) {
			t.Errorf("%v; %+v; the candidate is dead: %t", err, r, isDead(next))
		}
	})
}

func TestStartPausesDoubleUpToACeiling(t *testing.T) {
	t.Parallel()
	pauses := newStartPauses()
	if first := pauses.next(); first != 0 {
		t.Errorf("the first pause is %s", first)
	}
	want := firstPause
	for range 1000 {
		if got := pauses.next(); got != want {
			t.Fatalf("pause %d is %s, want %s", pauses.failures, got, want)
		}
		want = min(2*want, longestPause)
	}
	if want != longestPause || want > 10*time.Second {
		t.Errorf("the longest pause is %s", want)
	}
}
