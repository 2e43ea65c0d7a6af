package agent

import (
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/registry"
)

// An alloc that has lost its volumes is stopped, with the reason in its record. Its job places another one.
func TestAllocThatHasLostItsVolumesIsStopped(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(serviceJob("web", ""))
		e.awaitRunning("web")
		first := e.agent.Allocs()[0].ID
		e.shim.events <- host.Event{Kind: registry.EventVolumesLost, Alloc: first, Detail: "node a was declared out of service"}
		e.awaitCount("start", 2)
		e.awaitRunning("web")
		var noted bool
		for _, n := range e.agent.record(first).Notes {
			noted = noted || strings.Contains(n.Text, "stopping, as its volumes were lost: node a was declared out of service")
		}
		if r := e.agent.record(first); !r.State.Ended() || !noted {
			e.Errorf("the alloc that lost its volumes is %s: %+v", r.State, r.Notes)
		}
	})
}
