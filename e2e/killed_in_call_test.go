package e2e

import (
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// held is a plugin that stops in the middle of one call after the other.
type held struct {
	*succession
	plugin *pluginTask
	gate   *csifake.Gate                // of the call that is under way
	next   func(plugin *csifake.Plugin) // has the plugin stop in the next call
}

// inTheMiddleOfEachCall runs a volume's scenario and calls disturb while the plugin is in the middle of each mutating
// call, before or after its effect. disturb calls next, then opens the gate. Each call must end well and must have been
// sent twice at least, with the same fields.
func inTheMiddleOfEachCall(t *testing.T, disturb func(h *held)) {
	halves := map[string][]string{"up": mutating[:5], "down": mutating[5:]}
	for _, when := range []string{"before", "after"} {
		for name, rpcs := range halves {
			t.Run(name+"/"+when, func(t *testing.T) {
				t.Parallel()
				w := placed(t, larger...)
				w.config.SwapBudget, w.config.Bake = patience, 50*time.Millisecond
				w.open()
				h := &held{succession: w.succession(), plugin: w.plugin("alloc-p", csifake.Monolith)}
				stopIn := func(p *csifake.Plugin, rpc string) {
					rule := p.On(rpc).Times(1)
					if when == "after" {
						rule = rule.After()
					}
					h.gate = rule.Hold()
				}
				stopIn(h.plugin.Plugin, rpcs[0])
				done := goes(h.story)
				for i, rpc := range rpcs {
					t.Log("in the middle of", rpc)
					h.arrives(h.gate, done)
					h.next = func(p *csifake.Plugin) {
						if i+1 < len(rpcs) {
							stopIn(p, rpcs[i+1])
						}
					}
					disturb(h)
				}
				h.must(h.ends("the scenario", done))
				for _, rpc := range rpcs {
					h.oneRequest(rpc, 2)
				}
				h.exit(h.plugin)
			})
		}
	}
}

// The shim is killed in the middle of each call. The caller gets what it asked for, the claim stays as it was, and nothing
// is lost or left.
func TestShimKilledInTheMiddle(t *testing.T) {
	inTheMiddleOfEachCall(t, func(h *held) {
		gate, claim := h.gate, h.claims()["alloc-1"]
		h.next(h.plugin.Plugin)
		h.killShim()
		if now := h.claims()["alloc-1"]; now != claim {
			t.Errorf("the claim was %+v and is %+v", claim, now)
		}
		gate.Open()
	})
}

// The plugin is killed in the middle of each call, and started again by its orchestrator. The caller gets what it asked for.
func TestPluginKilledInTheMiddle(t *testing.T) {
	inTheMiddleOfEachCall(t, func(h *held) {
		gate := h.gate
		h.plugin.Kill()
		gate.Open()
		h.must(h.host.TaskExited(h.ctx(), h.plugin.task.Key(), h.plugin.task.Attempt, 0, 9, false))
		h.started = h.next
		h.plugin = h.startPlugin("alloc-p", csifake.Monolith, h.plugin.task.Attempt+1)
	})
}

// The shim is replaced in the middle of each call. The swap does not wait for the call, the next shim sends it again, and
// no mount changes.
func TestLongCallsSurvive(t *testing.T) {
	inTheMiddleOfEachCall(t, func(h *held) {
		gate := h.gate
		h.next(h.plugin.Plugin)
		time.Sleep(50 * time.Millisecond) // a swap waits for shorter calls
		before := h.mountTable()
		h.committed()
		report := h.swap()
		if took := took(report, host.SwapQuiesce, host.SwapFence); took >= notWaitedFor {
			t.Errorf("the swap waited %s for a call that is still at the driver", took)
		}
		if after := h.mountTable(); after != before {
			t.Errorf("the swap changed the mounts:\n%s\nand now\n%s", before, after)
		}
		gate.Open()
	})
}
