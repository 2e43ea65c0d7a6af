package e2e

import (
	"errors"
	"testing"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// TestClusterDescribesItsNodes lists the nodes at either node, asks which of them can take an alloc, drains one from
// the other, and has a forced release of a claim of a node that is alive refused.
func TestClusterDescribesItsNodes(t *testing.T) {
	nodes := newCluster(t, 2, nil, allCaps...)
	a, b := nodes[0], nodes[1]
	pa := a.addPlugin("plugin-a", csifake.Monolith)
	pb := b.addPlugin("plugin-b", csifake.Node)
	a.must(a.create("vol"))
	// follow waits until a list of the nodes, which blocks between changes, is as wanted.
	follow := func(e *env, what string, wanted func(map[host.NodeName]host.NodeStatus) bool) {
		t.Helper()
		for at := host.Seq(0); ; {
			list, index, err := e.host.Nodes(e.ctx(), host.NodeQuery{Blocking: host.Blocking{MinIndex: at}})
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			all := map[host.NodeName]host.NodeStatus{}
			for _, n := range list {
				all[n.Name] = n
			}
			if at = index; wanted(all) {
				return
			}
		}
	}
	plugin := func(n host.NodeStatus) (p host.NodePluginStatus) {
		for _, p := range n.Plugins {
			return p
		}
		return p
	}
	for _, e := range nodes {
		follow(e, "both nodes are known", func(all map[host.NodeName]host.NodeStatus) bool {
			one, two := plugin(all["node-1"]), plugin(all["node-2"])
			return all["node-1"].Alive && all["node-2"].Alive && one.Executor && !two.Executor &&
				one.Health(host.RoleController) == host.Healthy && two.Health(host.RoleController) == "" &&
				two.Health(host.RoleNode) == host.Healthy && two.NodeID == "node-2-id"
		})
	}
	b.waitUntil("the volume is known", func() bool { return len(b.volumeStates()) == 1 })
	g := b.group("user", request{source: "vol"})
	feasible := func(e *env) map[host.NodeName][]host.Infeasible {
		list, _, err := e.host.FeasibleNodes(e.ctx(), g)
		e.must(err)
		reasons := map[host.NodeName][]host.Infeasible{}
		for _, n := range list {
			reasons[n.Node] = n.Reasons
		}
		return reasons
	}
	for _, e := range nodes {
		if got := feasible(e); len(got) != 2 || len(got["node-1"])+len(got["node-2"]) > 0 {
			t.Errorf("%s: %+v", e.config.Node, got)
		}
	}
	_, err := b.prepare(g)
	b.must(err)
	a.waitUntil("the claim is known", func() bool { return len(a.claims()) == 1 })
	_, err = a.host.ForceReleaseClaim(a.ctx(), volumeName("vol"), "user", host.Force{By: "e2e", Confirm: "user"})
	a.wantConflict(err, "node node-2, which has the claim, is alive")
	b.must(b.release("user"))

	_, err = a.host.DrainNode(a.ctx(), "node-2", host.DrainOptions{By: "e2e", Reason: "disks"})
	a.must(err)
	follow(b, "the drain is known", func(all map[host.NodeName]host.NodeStatus) bool {
		return all["node-2"].State == host.NodeDraining && all["node-2"].Reason == "disks"
	})
	if got := feasible(b); len(got["node-1"]) > 0 || len(got["node-2"]) != 1 ||
		got["node-2"][0].Kind != host.InfeasibleNode {
		t.Errorf("while node-2 is drained: %+v", got)
	}
	_, err = a.host.DrainNode(a.ctx(), "node-2", host.DrainOptions{By: "e2e", End: true})
	a.must(err)
	follow(b, "the drain is over",
		func(all map[host.NodeName]host.NodeStatus) bool { return all["node-2"].State == host.NodeReady })
	for _, confirm := range []host.NodeName{"", "node-1", "node-2"} {
		o := host.OutOfServiceOptions{By: "e2e", Confirm: confirm}
		if _, err := a.host.NodeOutOfService(a.ctx(), "node-2", o); !errors.Is(err, host.ErrConflict) {
			t.Errorf("out of service while alive, confirmed as %q: %v", confirm, err)
		}
	}
	b.stopPlugin(pb)
	a.stopPlugin(pa)
}
