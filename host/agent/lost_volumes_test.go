package agent

import (
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/registry"
)

// An alloc that has lost its volumes is stopped, and its record has the reason. Its job places another alloc. The agent
// learns of the loss from an event or, at its start, from the state of the shim.
func TestAllocThatHasLostItsVolumesIsStopped(t *testing.T) {
	for name, lose := range map[string]func(*env, host.AllocID){
		"while the agent runs": func(e *env, id host.AllocID) {
			e.shim.events <- host.Event{Kind: registry.EventVolumesLost, Alloc: id, Detail: "node a was fenced"}
		},
		"before it starts": func(e *env, id host.AllocID) {
			e.restart(func() { e.shim.lost = id })
		},
	} {
		t.Run(name, func(t *testing.T) {
			withAgent(t, func(e *env) {
				e.submit(userJob("web", ""))
				e.awaitRunning("web")
				first := e.agent.Allocs()[0].ID
				lose(e, first)
				e.awaitCount("start", 2)
				e.awaitRunning("web")
				var noted bool
				for _, n := range e.agent.record(first).Notes {
					noted = noted || strings.Contains(n.Text, "stopping, as its volumes were lost: ") &&
						strings.Contains(n.Text, "fenced")
				}
				if r := e.agent.record(first); !r.State.Ended() || !noted {
					e.Errorf("the alloc that lost its volumes is %s: %+v", r.State, r.Notes)
				}
			})
		})
	}
}
