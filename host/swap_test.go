package host

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
)

// fakePeer is a peer without a process. It records its calls in a script that both peers share.
type fakePeer struct {
	faults
	name   string
	script *[]string
	gone   chan struct{}
	owner  *string      // name of the peer that has the state
	frozen atomic.Bool  // does not answer ping, and ends slowly
	errs   atomic.Bool  // answers ping with errors
	stops  atomic.Int64 // calls of stop
}

var errNo = errors.New("no")

func (p *fakePeer) do(ctx context.Context, call string) error {
	*p.script = append(*p.script, p.name+" "+call)
	if call == "quiesce" || call == "release" || call == "activate" {
		select {
		case <-time.After(p.takes):
		case <-ctx.Done():
			return registry.Errorf(registry.ErrUnavailable, "no answer: %w", context.Cause(ctx))
		}
	}
	if p.hangs[call] {
		<-ctx.Done()
		return registry.Errorf(registry.ErrUnavailable, "no answer: %w", context.Cause(ctx))
	}
	return p.fails[call]
}

func (p *fakePeer) exited() <-chan struct{} { return p.gone }

func (p *fakePeer) exitError() error {
	if isDead(p) {
		return errNo
	}
	return nil
}

func (p *fakePeer) release(ctx context.Context) (handoff, error) {
	if err := p.do(ctx, "release"); err != nil {
		return handoff{}, err
	}
	*p.owner = ""
	return handoff{1, 100}, nil
}

func (p *fakePeer) quiesce(ctx context.Context) error { return p.do(ctx, "quiesce") }

func (p *fakePeer) activate(ctx context.Context, from handoff) (uint64, error) {
	if err := p.do(ctx, "activate"); err != nil {
		return 0, err
	}
	if *p.owner != "" && *p.owner != p.name {
		return 0, registry.Errorf(registry.ErrConflict, "%s has the state", *p.owner)
	}
	*p.owner = p.name
	return from.generation + 1, nil
}

func (p *fakePeer) resume(ctx context.Context) error {
	err := p.do(ctx, "resume")
	if err == nil {
		*p.owner = p.name
	}
	return err
}

func (p *fakePeer) kill(context.Context) error {
	*p.script = append(*p.script, p.name+" kill")
	if p.stuck {
		return errNo
	}
	if *p.owner == p.name {
		*p.owner = ""
	}
	if !isDead(p) {
		close(p.gone)
	}
	return nil
}

func (p *fakePeer) pid() int { return 1 }

func (p *fakePeer) ping(ctx context.Context) error {
	for p.frozen.Load() {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if p.errs.Load() {
		return errNo
	}
	return nil
}

func (p *fakePeer) stop(context.Context) error {
	p.stops.Add(1)
	if p.stuck {
		return errNo
	}
	if p.frozen.Load() {
		time.Sleep(killLimit)
	}
	if !isDead(p) {
		close(p.gone)
	}
	return nil
}

var fenced = registry.Errorf(registry.ErrFenced, "a newer generation owns it")

// faults are what a fakePeer does wrong.
type faults struct {
	fails map[string]error // by call
	hangs map[string]bool  // by call, until its context ends
	takes time.Duration    // for each of quiesce, release and activate
	stuck bool             // it does not die
}

func fails(calls ...string) (f faults) {
	f.fails = map[string]error{}
	for _, c := range calls {
		f.fails[c] = errNo
	}
	return f
}

func hangs(calls ...string) (f faults) {
	f.hangs = map[string]bool{}
	for _, c := range calls {
		f.hangs[c] = true
	}
	return f
}

func (f faults) thatDoNotDie() faults { f.stuck = true; return f }

// swapCases has every failure of the steps that hold calls, with the shim that is active afterwards and the calls in
// order.
var swapCases = []struct {
	name     string
	old      faults
	next     faults
	oldDies  bool
	nextDies bool
	canceled bool   // the caller has gone
	active   string // empty: none
	failed   SwapStep
	outcome  SwapOutcome
	calls    string
}{
	{name: "success", active: "new", outcome: SwapBaking,
		calls: "hold writes, old quiesce, old release, hold all, new activate, open new"},
	{name: "the new one has died since", nextDies: true, active: "old", failed: SwapQuiesce, outcome: SwapRefused,
		calls: "old resume, open old, new kill"},
	{name: "the caller has gone", canceled: true, active: "old", failed: SwapQuiesce, outcome: SwapRefused,
		calls: "hold writes, old quiesce, old resume, open old, new kill"},
	{name: "all are slow", old: faults{takes: defaultBudget / 4}, next: faults{takes: defaultBudget / 4},
		active: "new", outcome: SwapBaking,
		calls: "hold writes, old quiesce, old release, hold all, new activate, open new"},
	{name: "all together exceed the budget", old: faults{takes: defaultBudget * 28 / 100},
		next: faults{takes: defaultBudget / 2}, active: "old", failed: SwapActivate, outcome: SwapRolledBack,
		calls: "hold writes, old quiesce, old release, hold all, new activate, new kill, old resume, open old"},
	{name: "the old one refuses to quiesce", old: fails("quiesce"), active: "old", failed: SwapQuiesce,
		outcome: SwapRefused,
		calls:   "hold writes, old quiesce, old resume, open old, new kill"},
	{name: "the old one refuses to quiesce and to resume", old: fails("quiesce", "resume"),
		failed: SwapQuiesce, outcome: SwapRolledBack,
		calls: "hold writes, old quiesce, old resume, old kill, new kill"},
	{name: "the old one hangs at quiesce", old: hangs("quiesce", "release"), active: "new", outcome: SwapBaking,
		calls: "hold writes, old quiesce, old release, hold all, old kill, new activate, open new"},
	{name: "the old one is dead", oldDies: true, old: fails("quiesce", "release"), active: "new", outcome: SwapBaking,
		calls: "hold writes, old quiesce, old release, hold all, old kill, new activate, open new"},
	{name: "the old one hangs at release", old: hangs("release"), active: "new", outcome: SwapBaking,
		calls: "hold writes, old quiesce, old release, hold all, old kill, new activate, open new"},
	{name: "the old one hangs at release and does not die", old: hangs("release").thatDoNotDie(),
		failed: SwapFence, outcome: SwapRolledBack,
		calls: "hold writes, old quiesce, old release, hold all, old kill, new kill"},
	{name: "the new one cannot activate", next: fails("activate"), active: "old", failed: SwapActivate,
		outcome: SwapRolledBack,
		calls:   "hold writes, old quiesce, old release, hold all, new activate, new kill, old resume, open old"},
	{name: "the new one hangs at activate", next: hangs("activate"), active: "old", failed: SwapActivate,
		outcome: SwapRolledBack,
		calls:   "hold writes, old quiesce, old release, hold all, new activate, new kill, old resume, open old"},
	{name: "the new one has begun a generation", next: hangs("activate"),
		old: faults{fails: map[string]error{"resume": fenced}}, active: "old", failed: SwapActivate,
		outcome: SwapRolledBack,
		calls: "hold writes, old quiesce, old release, hold all, new activate, new kill, old resume, " +
			"old activate, open old"},
	{name: "neither can", next: fails("activate"), old: fails("resume"), failed: SwapActivate, outcome: SwapRolledBack,
		calls: "hold writes, old quiesce, old release, hold all, new activate, new kill, old resume, old kill"},
	{name: "the old one was killed, and the new one cannot activate", old: hangs("release"), next: fails("activate"),
		failed: SwapActivate, outcome: SwapRolledBack,
		calls: "hold writes, old quiesce, old release, hold all, old kill, new activate, new kill"},
	{name: "the old one was killed, and the new one hangs at activate", old: hangs("release"), next: hangs("activate"),
		failed: SwapActivate, outcome: SwapRolledBack,
		calls: "hold writes, old quiesce, old release, hold all, old kill, new activate, new kill"},
	{name: "the new one neither activates nor dies", next: hangs("activate").thatDoNotDie(),
		failed: SwapActivate, outcome: SwapRolledBack,
		calls: "hold writes, old quiesce, old release, hold all, new activate, new kill"},
}

// fakeGate records its calls in the script of the peers, if there is one.
type fakeGate struct {
	script       *[]string
	active       atomic.Pointer[fakePeer] // the peer that calls go to; nil: they are held
	held, opened time.Time                // when calls began to be held, and when they went on
}

func (g *fakeGate) note(call string) {
	if g.script != nil {
		*g.script = append(*g.script, call)
	}
}

func (g *fakeGate) holdWrites() {
	g.note("hold writes")
	g.held = time.Now()
}

func (g *fakeGate) holdAll(error) {
	g.note("hold all")
	g.active.Store(nil)
}

func (g *fakeGate) open(p peer) {
	g.note("open " + p.(*fakePeer).name)
	g.opened = time.Now()
	g.active.Store(p.(*fakePeer))
}

func (g *fakeGate) countHeld() int { return 7 }

func newFakePeer(name string, f faults, script *[]string, owner *string) *fakePeer {
	return &fakePeer{faults: f, name: name, script: script, owner: owner, gone: make(chan struct{})}
}

// Each case runs in fake time.
func TestSwapProtocol(t *testing.T) {
	t.Parallel()
	for _, c := range swapCases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var script []string
				owner := "old"
				old, next := newFakePeer("old", c.old, &script, &owner), newFakePeer("new", c.next, &script, &owner)
				if c.oldDies {
					close(old.gone)
					owner = ""
				}
				if c.nextDies {
					close(next.gone)
				}
				ctx, cancel := context.WithCancel(t.Context())
				if c.canceled {
					cancel()
				}
				defer cancel()
				gate := &fakeGate{script: &script}
				s := &swap{
					old: old, next: next, progress: func(SwapReport, SwapStep) {}, limits: limitsWithin(defaultBudget),
					report: SwapReport{Outcome: SwapRefused}, gate: gate,
				}
				active, err := s.handOver(ctx)
				got := ""
				if p, is := active.(*fakePeer); is {
					got = p.name
				}
				if calls := strings.Join(script, ", "); got != c.active || calls != c.calls {
					t.Errorf("%q is active after\n\t%s\nwant %q after\n\t%s", got, calls, c.active, c.calls)
				}
				r := s.report
				if (err != nil) != (c.failed != "") || r.Failed != c.failed || r.Outcome != c.outcome ||
					(r.Held == 7) == c.nextDies {
					t.Errorf("%v; %+v", err, r)
				}
				if r.HeldSince != gate.held ||
					!gate.held.IsZero() && !gate.opened.IsZero() && r.HeldSince.Add(r.Hold) != gate.opened {
					t.Errorf("calls were held from %s until %s; the report has %s for %s", gate.held, gate.opened,
						r.HeldSince, r.Hold)
				}
				if err != nil && !strings.Contains(err.Error(), "swap: "+string(c.failed)+": ") {
					t.Errorf("the error does not name its step: %v", err)
				}
				ofBudget := errors.Is(err, errTooLate) && !isDead(old) // a larger budget would help
				if ofBudget != strings.Contains(r.Reason, "--shim-swap-budget") {
					t.Errorf("the advice of %q", r.Reason)
				}
				if c.active != "" && owner != c.active {
					t.Errorf("%q is active, and %q has the state", c.active, owner)
				}
				if slices.Contains(script, "new kill") && c.active == "new" {
					t.Error("the active shim was killed")
				}
			})
		})
	}
}

// After a swap to a state that the old shim cannot read, no rollback would be possible.
func TestSwapRefusesAStateThatTheOldShimCannotRead(t *testing.T) {
	t.Parallel()
	for readable, refused := range map[uint32]bool{0: false, 2: false, 3: false, 4: true} {
		err := (&shim{schema: 3}).checkReadable(readable)
		if errors.Is(err, registry.ErrUnsupported) != refused || refused != (err != nil) {
			t.Errorf("readable by schema %d and newer: %v", readable, err)
		}
	}
}
