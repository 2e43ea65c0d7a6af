package host

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
)

// actor is a side of a swap without a process. It says what it was asked in a script that both share.
type actor struct {
	name   string
	script *[]string
	fails  map[string]error // by call
	hangs  map[string]bool  // until its context ends
	takes  time.Duration    // for each of quiesce, release and activate
	stuck  bool             // it does not die
	gone   chan struct{}
	owner  *string // who has the state
}

var errNo = errors.New("no")

func (a *actor) do(ctx context.Context, call string) error {
	*a.script = append(*a.script, a.name+" "+call)
	if call == "quiesce" || call == "release" || call == "activate" {
		select {
		case <-time.After(a.takes):
		case <-ctx.Done():
			return registry.Errorf(registry.ErrUnavailable, "no answer: %w", context.Cause(ctx))
		}
	}
	if a.hangs[call] {
		<-ctx.Done()
		return registry.Errorf(registry.ErrUnavailable, "no answer: %w", context.Cause(ctx))
	}
	return a.fails[call]
}

func (a *actor) snapshot(ctx context.Context, _ string) error { return a.do(ctx, "snapshot") }
func (a *actor) rehearse(ctx context.Context, _ string) (rehearsal, error) {
	return rehearsal{}, a.do(ctx, "rehearse")
}
func (a *actor) dead() <-chan struct{} { return a.gone }

func (a *actor) death() error {
	if gone(a) {
		return errNo
	}
	return nil
}

func (a *actor) release(ctx context.Context) (left, error) {
	if err := a.do(ctx, "release"); err != nil {
		return left{}, err
	}
	*a.owner = ""
	return left{1, 100}, nil
}

func (a *actor) quiesce(ctx context.Context, _ time.Duration) error { return a.do(ctx, "quiesce") }

func (a *actor) activate(ctx context.Context, l left) (uint64, error) {
	if err := a.do(ctx, "activate"); err != nil {
		return 0, err
	}
	if *a.owner != "" && *a.owner != a.name {
		return 0, registry.Errorf(registry.ErrConflict, "the state is %s's", *a.owner)
	}
	*a.owner = a.name
	return l.generation + 1, nil
}

func (a *actor) again(ctx context.Context) error {
	err := a.do(ctx, "again")
	if err == nil {
		*a.owner = a.name
	}
	return err
}

func (a *actor) kill(context.Context) error {
	*a.script = append(*a.script, a.name+" kill")
	if a.stuck {
		return errNo
	}
	if *a.owner == a.name {
		*a.owner = ""
	}
	select {
	case <-a.gone:
	default:
		close(a.gone)
	}
	return nil
}

var fenced = registry.Errorf(registry.ErrFenced, "a newer generation owns it")

// protocolCases are every failure of the steps that hold calls, and where it ends: who serves, and what was asked in which order.
var protocolCases = []struct {
	name    string
	old     actor
	fresh   actor
	oldDies bool
	newDies bool
	goes    bool   // whoever wanted the swap
	active  string // empty: nobody
	failed  SwapStep
	outcome SwapOutcome
	asked   string
}{
	{name: "all is well", active: "new", outcome: SwapBaking,
		asked: "hold writes, old quiesce, old release, hold all, new activate, open new"},
	{name: "the new one has died meanwhile", newDies: true, active: "old", failed: SwapQuiesce, outcome: SwapRefused,
		asked: "old again, open old, new kill"},
	{name: "whoever wanted it goes", goes: true, active: "old", failed: SwapQuiesce, outcome: SwapRefused,
		asked: "hold writes, old quiesce, old again, open old, new kill"},
	{name: "all of them take their time", old: actor{takes: defaultBudget / 4}, fresh: actor{takes: defaultBudget / 4}, active: "new", outcome: SwapBaking,
		asked: "hold writes, old quiesce, old release, hold all, new activate, open new"},
	{name: "and together more than there is", old: actor{takes: defaultBudget * 28 / 100}, fresh: actor{takes: defaultBudget / 2},
		active: "old", failed: SwapActivate, outcome: SwapRolledBack,
		asked: "hold writes, old quiesce, old release, hold all, new activate, new kill, old again, open old"},
	{name: "the old one refuses to be quiet", old: actor{fails: map[string]error{"quiesce": errNo}}, active: "old", failed: SwapQuiesce, outcome: SwapRefused,
		asked: "hold writes, old quiesce, old again, open old, new kill"},
	{name: "the old one refuses to be quiet, and to go on", old: actor{fails: map[string]error{"quiesce": errNo, "again": errNo}}, failed: SwapQuiesce, outcome: SwapRolledBack,
		asked: "hold writes, old quiesce, old again, old kill, new kill"},
	{name: "the old one hangs when it is to be quiet", old: actor{hangs: map[string]bool{"quiesce": true, "release": true}}, active: "new", outcome: SwapBaking,
		asked: "hold writes, old quiesce, old release, hold all, old kill, new activate, open new"},
	{name: "the old one is dead", oldDies: true, old: actor{fails: map[string]error{"quiesce": errNo, "release": errNo}}, active: "new", outcome: SwapBaking,
		asked: "hold writes, old quiesce, old release, hold all, old kill, new activate, open new"},
	{name: "the old one does not let go", old: actor{hangs: map[string]bool{"release": true}}, active: "new", outcome: SwapBaking,
		asked: "hold writes, old quiesce, old release, hold all, old kill, new activate, open new"},
	{name: "the old one neither lets go nor dies", old: actor{hangs: map[string]bool{"release": true}, stuck: true}, failed: SwapFence, outcome: SwapRolledBack,
		asked: "hold writes, old quiesce, old release, hold all, old kill, new kill"},
	{name: "the new one cannot take over", fresh: actor{fails: map[string]error{"activate": errNo}}, active: "old", failed: SwapActivate, outcome: SwapRolledBack,
		asked: "hold writes, old quiesce, old release, hold all, new activate, new kill, old again, open old"},
	{name: "the new one hangs as it takes over", fresh: actor{hangs: map[string]bool{"activate": true}}, active: "old", failed: SwapActivate, outcome: SwapRolledBack,
		asked: "hold writes, old quiesce, old release, hold all, new activate, new kill, old again, open old"},
	{name: "the new one has begun a generation", fresh: actor{hangs: map[string]bool{"activate": true}}, old: actor{fails: map[string]error{"again": fenced}},
		active: "old", failed: SwapActivate, outcome: SwapRolledBack,
		asked: "hold writes, old quiesce, old release, hold all, new activate, new kill, old again, old activate, open old"},
	{name: "neither can", fresh: actor{fails: map[string]error{"activate": errNo}}, old: actor{fails: map[string]error{"again": errNo}}, failed: SwapActivate, outcome: SwapRolledBack,
		asked: "hold writes, old quiesce, old release, hold all, new activate, new kill, old again, old kill"},
	{name: "the old one was killed, and the new one cannot", old: actor{hangs: map[string]bool{"release": true}}, fresh: actor{fails: map[string]error{"activate": errNo}},
		failed: SwapActivate, outcome: SwapRolledBack,
		asked: "hold writes, old quiesce, old release, hold all, old kill, new activate, new kill"},
	{name: "the new one neither takes over nor dies", fresh: actor{hangs: map[string]bool{"activate": true}, stuck: true}, failed: SwapActivate, outcome: SwapRolledBack,
		asked: "hold writes, old quiesce, old release, hold all, new activate, new kill"},
}

// Each case is carried out in fake time; the report begins as Swap's does, and says what has happened.
func TestSwapProtocol(t *testing.T) {
	for _, c := range protocolCases {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var script []string
				owner := "old"
				old, fresh := c.old, c.fresh
				old.name, old.script, old.owner, old.gone = "old", &script, &owner, make(chan struct{})
				fresh.name, fresh.script, fresh.owner, fresh.gone = "new", &script, &owner, make(chan struct{})
				if c.oldDies {
					close(old.gone)
					owner = ""
				}
				if c.newDies {
					close(fresh.gone)
				}
				ctx, cancel := context.WithCancel(t.Context())
				if c.goes {
					cancel()
				}
				defer cancel()
				var held, opened time.Time
				s := &swap{old: &old, fresh: &fresh, tell: func(SwapReport, SwapStep) {}, limits: within(defaultBudget), report: SwapReport{Outcome: SwapRefused}, doors: doors{
					holdWrites: func() { script, held = append(script, "hold writes"), time.Now() },
					holdAll:    func(error) { script = append(script, "hold all") },
					held:       func() int { return 7 },
					open:       func(p side) { script, opened = append(script, "open "+p.(*actor).name), time.Now() },
				}}
				active, err := s.handOver(ctx)
				got := ""
				if a, is := active.(*actor); is {
					got = a.name
				}
				if asked := strings.Join(script, ", "); got != c.active || asked != c.asked {
					t.Errorf("%q serves after\n\t%s\nnot %q after\n\t%s", got, asked, c.active, c.asked)
				}
				if (err != nil) != (c.failed != "") || s.report.Failed != c.failed || s.report.Outcome != c.outcome || (s.report.Held == 7) == c.newDies {
					t.Errorf("%v; %+v", err, s.report)
				}
				if r := s.report; r.HeldSince != held || !held.IsZero() && !opened.IsZero() && r.HeldSince.Add(r.Hold) != opened {
					t.Errorf("calls were held from %s until %s; it says from %s for %s", held, opened, r.HeldSince, r.Hold)
				}
				if err != nil && !strings.Contains(err.Error(), "swap: "+string(c.failed)+": ") {
					t.Errorf("the error does not name its step: %v", err)
				}
				if c.active != "" && owner != c.active {
					t.Errorf("%q serves, and the state is %q's", c.active, owner)
				}
				if slices.Contains(script, "new kill") && c.active == "new" {
					t.Error("it serves, and is dead")
				}
			})
		})
	}
}
