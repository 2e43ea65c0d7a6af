package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/internal/csifake"
)

var groupCaps = []string{"GROUP_CONTROLLER_SERVICE", "CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT"}

// heldCall is a plugin that stops in the middle of one call after the other.
type heldCall struct {
	*env
	plugin *pluginTask
	gate   *csifake.Gate                // of the call that is under way
	next   func(plugin *csifake.Plugin) // has the plugin stop in the next call
}

// heldScenario is a scenario, and the calls of it in whose middle a plugin stops.
type heldScenario struct {
	rpcs []string
	run  func(*env) error
}

var heldScenarios = map[string]heldScenario{
	"volume": {slices.Insert(slices.Clone(mutatingCalls), 6, "ControllerModifyVolume", "CreateSnapshot",
		"DeleteSnapshot", "CreateVolumeGroupSnapshot", "DeleteVolumeGroupSnapshot"), (*env).scenario},
	"job":   {[]string{"CreateVolume", "ControllerModifyVolume", "DeleteVolume"}, (*env).jobScenario},
	"adopt": {[]string{"ControllerGetVolume", "ValidateVolumeCapabilities"}, (*env).adoptScenario},
}

// inTheMiddleOfEachCall runs each scenario, with the plugin stopped before or after the effect of the calls.
func inTheMiddleOfEachCall(t *testing.T, disturb func(h *heldCall)) {
	for _, when := range []csifake.Moment{csifake.Before, csifake.After} {
		for name, c := range heldScenarios {
			t.Run(fmt.Sprint(name, "/", when), func(t *testing.T) {
				t.Parallel()
				c.inTheMiddle(t, when, disturb)
			})
		}
	}
}

// inTheMiddle runs the scenario and calls disturb while the plugin is in the middle of each call. disturb calls next,
// then opens the gate. Each call must succeed and must have been sent at least twice, with the same fields.
func (c heldScenario) inTheMiddle(t *testing.T, when csifake.Moment, disturb func(h *heldCall)) {
	caps := slices.Concat([]string{"CREATE_DELETE_SNAPSHOT", "MODIFY_VOLUME", "GET_VOLUME"}, expandCaps, groupCaps)
	h := &heldCall{env: newEnv(t, caps...)}
	h.plugin = h.addPlugin("alloc-p", csifake.Monolith)
	hold := func(p *csifake.Plugin, rpc string) {
		rule := p.On(rpc).Times(1)
		if when == csifake.After {
			rule = rule.After()
		}
		h.gate = rule.Hold()
	}
	hold(h.plugin.Plugin, c.rpcs[0])
	done := background(func() error { return c.run(h.env) })
	for i, rpc := range c.rpcs {
		t.Log("in the middle of", rpc)
		h.waitHeld(h.gate, done)
		h.next = func(p *csifake.Plugin) {
			if i+1 < len(c.rpcs) {
				hold(p, c.rpcs[i+1])
			}
		}
		disturb(h)
	}
	h.gate.Open()
	h.must(h.result("the scenario", done))
	for _, rpc := range c.rpcs {
		h.wantOneRequest(rpc, 2)
	}
	h.stopPlugin(h.plugin)
}

// The shim is killed in the middle of each call. The caller gets what it asked for, the claim does not change, and
// nothing is lost or left.
func TestShimKilledInTheMiddle(t *testing.T) {
	t.Parallel()
	inTheMiddleOfEachCall(t, func(h *heldCall) {
		gate, claim := h.gate, h.claims()["alloc-1"]
		h.next(h.plugin.Plugin)
		h.killShim()
		if now := h.claims()["alloc-1"]; now != claim {
			h.t.Errorf("the claim was %+v and is %+v", claim, now)
		}
		gate.Open()
	})
}

// The plugin is killed in the middle of each call and started again. The caller gets what it asked for.
func TestPluginKilledInTheMiddle(t *testing.T) {
	t.Parallel()
	inTheMiddleOfEachCall(t, func(h *heldCall) {
		h.plugin.Kill()
		h.gate.Open()
		h.must(h.host.TaskExited(h.ctx(), h.plugin.task.Key(), h.plugin.task.Attempt, 0, 9, false))
		h.onStart = h.next
		h.plugin = h.startPlugin("alloc-p", csifake.Monolith, h.plugin.task.Attempt+1)
	})
}

// The shim is replaced in the middle of each call. The swap does not wait for the call, the next shim sends it again,
// and no mount changes. For a shim, a call looks the same before and after its effect.
func TestLongCallsSurvive(t *testing.T) {
	// more than the steps take on a slow machine, less than a step waits for a call by the budget, which is waitLimit
	const noWait = waitLimit / 8
	heldScenarios["volume"].inTheMiddle(t, csifake.Before, func(h *heldCall) {
		gate := h.gate
		h.next(h.plugin.Plugin)
		time.Sleep(50 * time.Millisecond) // a swap waits for shorter calls
		before := h.mountTable()
		h.waitCommitted()
		var took time.Duration
		for _, s := range h.swap().Steps {
			if s.Step == host.SwapQuiesce || s.Step == host.SwapFence {
				took += s.Took
			}
		}
		if took >= noWait {
			h.t.Errorf("the swap waited %s for a call that is still at the driver", took)
		}
		if after := h.mountTable(); after != before {
			h.t.Errorf("the swap changed the mounts:\n%s\nand now\n%s", before, after)
		}
		gate.Open()
	})
}

// An old shim that freezes before it is replaced, with a call at the driver, is dead before the new one takes over: it
// cannot be thawed, and the call is sent again with the same fields.
func TestThawedShimIsDead(t *testing.T) {
	t.Parallel()
	e := unopenedEnv(t, allCaps...)
	e.config.SwapBudget = shortBudget // it runs out
	e.open()
	old := e.pids[0]
	p := e.addPlugin("alloc-p", csifake.Monolith)
	gate := p.On("NodeStageVolume").Times(1).Hold()
	done := background(e.scenario)
	e.waitHeld(gate, done)
	frozen := make(chan struct{})
	var once sync.Once
	p.On("Probe").Answer(func(ctx context.Context, _, reply proto.Message, err error) (proto.Message, error) {
		from, known := peer.FromContext(ctx)
		// the candidate has a copy of the state
		if known && !strings.HasSuffix(from.Addr.String(), fmt.Sprintf("process %d", old)) {
			once.Do(func() {
				e.must(unix.Kill(old, unix.SIGSTOP))
				close(frozen)
			})
		}
		return reply, err
	})
	e.swap()
	<-frozen
	if err := unix.Kill(old, unix.SIGCONT); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the old shim can be thawed: %v", err)
	}
	gate.Open()
	e.must(e.result("the scenario", done))
	e.wantOneRequest("NodeStageVolume", 2)
	for _, problem := range overlapErrors(e.calls(), e.pids) {
		t.Error(problem)
	}
	e.stopPlugin(p)
}
