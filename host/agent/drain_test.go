package agent

import (
	"testing"
	"time"

	"holdfast/host"
	"holdfast/registry"
)

// A drain stops all allocs, even while the node is lost. Tasks that ignore it are killed at its deadline, which can be
// changed. An agent that is started meanwhile starts nothing. Jobs run again when the drain has ended.
func TestDrainStopsEverythingUntilItEnds(t *testing.T) {
	withAgent(t, func(e *env) {
		e.driver.ignoreTerm = true
		e.submit(serviceJob("slow", `{"kill_timeout":"1h"}`))
		e.awaitRunning("slow")
		began := time.Now()
		e.shim.nodes <- host.NodeStatus{Node: registry.Node{State: registry.NodeFenced,
			Drain: registry.Drain{By: "alice", Deadline: began.Add(30 * time.Minute)}}}
		e.shim.nodes <- host.NodeStatus{Node: registry.Node{State: registry.NodeDraining,
			Deadline: began.Add(time.Minute)}}
		e.awaitAllEnded()
		if took := time.Since(began); took < time.Minute || took > 2*time.Minute {
			e.Errorf("the deadline of a minute had an effect after %v", took)
		}
		e.hasError(e.trySubmit(serviceJob("other", ""), SubmitOptions{}), registry.ErrUnavailable, "is drained",
			"holdfast node drain --off")
		e.restart(nil)
		e.hasCount("start", 1)
		if n := len(e.agent.Allocs()); n != 1 {
			e.Errorf("%d allocs of a drained node, want the ended one", n)
		}
		e.shim.nodes <- host.NodeStatus{Node: registry.Node{State: registry.NodeReady}}
		e.awaitRunning("slow")
		e.hasCount("start", 2)
	})
}

// The tasks of an earlier agent are adopted before the shim has said whether the node is drained.
func TestAdoptionDoesNotWaitForTheDrain(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(serviceJob("work", ""))
		r := e.awaitRunning("work")
		e.restart(func() { e.shim.slow = time.Second })
		if now := e.agent.record(r.ID).Tasks["main"]; now.State != TaskRunning {
			e.Errorf("the task is %s", now.State)
		}
	})
}

// A drain stops a plugin once no container uses its volumes, or at the deadline.
func TestDrainWaitsForContainers(t *testing.T) {
	for name, deadline := range map[string]time.Duration{"no deadline": 0, "deadline": time.Minute} {
		t.Run(name, func(t *testing.T) {
			withEnginePlugin(t, func(e *env) {
				e.engineMount("a", dockerd)
				n := registry.Node{State: registry.NodeDraining}
				if deadline > 0 {
					n.Deadline = time.Now().Add(deadline)
				}
				e.shim.nodes <- host.NodeStatus{Node: n}
				time.Sleep(30 * time.Second)
				e.hasCount("stop disk", 0)
				if deadline == 0 {
					e.engineUnmount("a", dockerd)
				}
				e.awaitAllEnded()
				e.hasCount("stop disk", 1)
				r := e.engineRequest("b", dockerd)
				e.hasError(e.agent.CheckEnginePlugin(e.Context(), e.shim, r.Plugin, r.Caller), registry.ErrUnavailable,
					"holdfast node drain --off")
			})
		})
	}
}
