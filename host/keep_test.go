package host

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/host/internal/launch"
)

// tenant is an actor that is kept: it can be frozen for a while.
type tenant struct {
	*actor
	frozen atomic.Bool
	errs   atomic.Bool // it answers with errors only
	ended  atomic.Int64
}

func (n *tenant) pid() int { return 1 }

func (n *tenant) answers(ctx context.Context) error {
	for n.frozen.Load() {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if n.errs.Load() {
		return errNo
	}
	return nil
}

// end ends one that has let the state go, or is the last.
func (n *tenant) end(context.Context) error {
	n.ended.Add(1)
	if n.stuck {
		return errNo
	}
	if n.frozen.Load() {
		time.Sleep(killLimit)
	}
	if !gone(n) {
		close(n.gone)
	}
	return nil
}

// house is a keeper of tenants, in the time of a synctest bubble.
type house struct {
	t      *testing.T
	host   *Host
	owner  string
	open   atomic.Pointer[tenant] // who calls go to; nil: they are held
	leave  context.CancelCauseFunc
	ended  chan error
	first  *tenant
	second *tenant // from swapped on
}

// newHouse keeps a first tenant. Nobody can be started in its place.
func newHouse(t *testing.T, c Config) *house {
	dir := t.TempDir()
	c.Logger = hclog.NewNullLogger()
	orDefault(&c.Bake, defaultBake)
	orDefault(&c.SwapBudget, defaultBudget)
	orDefault(&c.AnswerTimeout, defaultAnswer)
	binaries, err := launch.OpenStore(filepath.Join(dir, "shims"))
	if err != nil {
		t.Fatal(err)
	}
	h := &house{t: t, owner: "first", ended: make(chan error, 1), host: &Host{
		config: c, gate: newGate(), swaps: make(chan *ask), history: openHistory(dir), choice: openChoice(dir), binaries: binaries,
	}}
	h.host.closing, h.leave = context.WithCancelCause(t.Context())
	h.first = h.tenant("first")
	k := newKeeper(h.host, h.doors(), h.first)
	go func() { h.ended <- k.run(h.host.closing) }()
	t.Cleanup(h.close)
	return h
}

func (h *house) close() {
	h.leave(errClosed)
	<-h.ended
	h.host.asked.Wait()
}

func (h *house) tenant(name string) *tenant {
	return &tenant{actor: &actor{name: name, script: new([]string), owner: &h.owner, gone: make(chan struct{})}}
}

func (h *house) doors() doors {
	return doors{
		holdWrites: func() {}, holdAll: func(error) { h.open.Store(nil) }, held: func() int { return 0 },
		open: func(s side) { h.open.Store(s.(*tenant)) },
	}
}

// swapped has a second tenant take over.
func (h *house) swapped() {
	h.t.Helper()
	h.second = h.tenant("second")
	if err := h.swap(h.second); err != nil {
		h.t.Fatal(err)
	}
}

func (h *house) swap(fresh *tenant) error {
	s := &swap{fresh: fresh, doors: h.doors(), limits: within(defaultBudget), tell: func(SwapReport, SwapStep) {}, report: SwapReport{Began: time.Now()}}
	a := &ask{ctx: h.t.Context(), swap: s, fresh: fresh, done: make(chan error, 1)}
	h.host.swaps <- a
	return <-a.done
}

// outcome is what has become of the last swap.
func (h *house) outcome() SwapOutcome {
	synctest.Wait()
	return h.host.history.list()[0].Outcome
}

// A bake ends with an answer of the new shim. One that is mute by then is followed by the old one, with the defaults as well, where the time of the bake is
// over before it is known to be mute; one that is slow is not.
func TestBakeEndsWithAnAnswer(t *testing.T) {
	const never = time.Hour
	for _, c := range []struct {
		what         string
		mute, answer time.Duration // after the swap: from when until when it gives no answer
		errs         bool          // it gives errors instead
		bake         time.Duration
		outcome      SwapOutcome
	}{
		{"answers", never, never, false, 0, SwapCommitted},
		{"frozen at once", 0, never, false, 0, SwapRolledBack},
		{"errs", 0, never, true, 0, SwapRolledBack},
		{"frozen soon", time.Second, never, false, 0, SwapRolledBack},
		{"frozen late", defaultBake - time.Millisecond, never, false, 0, SwapRolledBack},
		{"errs late", defaultBake - time.Millisecond, never, true, 0, SwapRolledBack},
		{"frozen in a short bake", time.Millisecond, never, false, 2 * time.Millisecond, SwapRolledBack},
		{"frozen afterwards", defaultBake + time.Second, never, false, 0, SwapCommitted},
		{"answers late", defaultBake - time.Second, defaultBake + time.Second, false, 0, SwapCommitted},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHouse(t, Config{Bake: c.bake})
				h.swapped()
				mute := &h.second.frozen
				if c.errs {
					mute = &h.second.errs
				}
				time.AfterFunc(c.mute, func() { mute.Store(true) })
				time.AfterFunc(c.answer, func() { mute.Store(false) })
				time.Sleep(time.Minute)
				if got := h.outcome(); got != c.outcome {
					t.Errorf("it is %s", got)
				}
				if back := c.outcome == SwapRolledBack; gone(h.first) == back || back && h.open.Load() != h.first {
					t.Errorf("the old one is dead: %t; %v serves", gone(h.first), h.open.Load())
				}
			})
		})
	}
}

// A shim that was mute while it stood by, and is not any more, takes over for good when the new one dies.
func TestShimThatWasMuteWhileItStoodBy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, Config{Bake: time.Hour})
		h.swapped()
		h.first.frozen.Store(true)
		time.Sleep(time.Minute)
		h.first.frozen.Store(false)
		time.Sleep(time.Minute)
		_ = h.second.kill(t.Context())
		time.Sleep(time.Minute)
		if got := h.outcome(); got != SwapRolledBack || h.open.Load() != h.first || gone(h.first) {
			t.Errorf("the swap is %s; %v serves", got, h.open.Load())
		}
		h.first.frozen.Store(true)
		time.Sleep(time.Minute)
		if synctest.Wait(); !gone(h.first) {
			t.Error("it is mute now, and lives")
		}
	})
}

// Calls are held until the old shim serves again, so nothing slow is done before: neither a write to a disk that hangs, nor the removal of what
// the dead one has left.
func TestRollbackRevivesTheOldShimFirst(t *testing.T) {
	for what, slow := range map[string]func(h *house, until <-chan struct{}){
		"the disk hangs": func(h *house, until <-chan struct{}) {
			hangs := func() error { <-until; return nil }
			go func() { _ = h.host.history.pen.write(hangs) }()
			go func() { _ = h.host.choice.pen.write(hangs) }()
		},
		"the dead one has left much": func(h *house, _ <-chan struct{}) { h.second.frozen.Store(true) },
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHouse(t, Config{Bake: time.Hour})
				h.swapped()
				synctest.Wait()
				until := make(chan struct{})
				slow(h, until)
				synctest.Wait()
				began := time.Now()
				_ = h.second.kill(t.Context())
				if synctest.Wait(); h.open.Load() != h.first || !h.host.ShimState().Serving || time.Since(began) > 0 {
					t.Errorf("%v serves after %v", h.open.Load(), time.Since(began))
				}
				close(until)
				time.Sleep(time.Minute)
				if st := h.host.ShimState(); h.outcome() != SwapRolledBack || st.Reason != errNo.Error() {
					t.Errorf("the swap is %s: %+v", h.outcome(), st)
				}
				h.host.history.pen.rest()
				if past := openHistory(filepath.Dir(h.host.history.path)); past.list()[0].Outcome != SwapRolledBack {
					t.Errorf("on disk: %+v", past.list())
				}
			})
		})
	}
}

// The old shim is frozen when its time is over. While it is being ended, the death of the active one is noticed, and a swap that waits for its end can be
// given up by Close.
func TestOldShimEndsBesideTheKeeper(t *testing.T) {
	for name, more := range map[string]func(h *house){
		"the active one dies": func(h *house) {
			_ = h.second.kill(h.t.Context())
			synctest.Wait()
			if at := h.open.Load(); at != nil || h.host.ShimState().Serving {
				h.t.Errorf("%v serves: %+v", at, h.host.ShimState())
			}
		},
		"the next swap": func(h *house) {
			third := h.tenant("third")
			if err := h.swap(third); err != nil || h.open.Load() != third {
				h.t.Errorf("%v; %v serves", err, h.open.Load())
			}
			if all := h.host.history.list(); len(all) != 2 || all[1].Outcome != SwapCommitted || !gone(h.first) {
				h.t.Errorf("%+v; the first one is dead: %t", all, gone(h.first))
			}
		},
		"the next swap, and Close": func(h *house) {
			third, swapped := h.tenant("third"), make(chan error, 1)
			go func() { swapped <- h.swap(third) }()
			synctest.Wait()
			h.leave(errClosed)
			if err := <-swapped; !errors.Is(err, errClosed) || !gone(third) {
				h.t.Errorf("%v; the candidate is dead: %t", err, gone(third))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHouse(t, Config{})
				h.swapped()
				h.first.frozen.Store(true)
				time.Sleep(defaultBake + time.Second)
				if synctest.Wait(); gone(h.first) || h.first.ended.Load() != 1 || h.outcome() != SwapBaking {
					t.Fatalf("the first one is dead: %t", gone(h.first))
				}
				more(h)
				time.Sleep(killLimit)
				if got := h.outcome(); got == SwapBaking && name == "the active one dies" || !gone(h.first) {
					t.Errorf("it is %s; the first one is dead: %t", got, gone(h.first))
				}
			})
		})
	}
}

// As long as a shim that was killed does not die, whether for a swap or as it gave no answer, none is started, and none is swapped to. Its death is
// enough for the next start.
func TestNobodyIsStartedBesideTheUndead(t *testing.T) {
	for what, failures := range map[string]int{"it does not let go": 1, "it is mute": 0} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHouse(t, Config{})
				h.first.hangs, h.first.stuck = map[string]bool{"release": true}, true
				if h.first.frozen.Store(what == "it is mute"); h.first.frozen.Load() {
					time.Sleep(time.Minute)
				}
				h.isOutlived(failures)
				close(h.first.gone)
				time.Sleep(time.Minute)
				if synctest.Wait(); h.host.ShimState().Failures < 2 {
					t.Errorf("no start is tried: %+v", h.host.ShimState())
				}
			})
		})
	}
}

// isOutlived: nobody takes the place of the first.
func (h *house) isOutlived(failures int) {
	h.t.Helper()
	for _, name := range []string{"second", "third"} {
		fresh := h.tenant(name)
		if err := h.swap(fresh); !errors.Is(err, errNobody) || !gone(fresh) || slices.Contains(*fresh.script, name+" activate") {
			h.t.Errorf("a swap: %v; the candidate is dead: %t; it was asked to %q", err, gone(fresh), *fresh.script)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if st := h.host.ShimState(); h.open.Load() != nil || st.Serving || st.Failures != failures || !st.Next.IsZero() {
			h.t.Errorf("%v serves: %+v", h.open.Load(), st)
		}
	}
}
