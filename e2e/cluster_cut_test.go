package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/etcdtest"
)

// TestNodeIsCutOffFromEtcd cuts the network between a node and etcd, until the node is suspect. Its tasks and mounts
// stay, and volumes are unpublished and unstaged. What needs a decision waits, says so, and is decided on what the
// other node has done meanwhile.
func TestNodeIsCutOffFromEtcd(t *testing.T) {
	slow(t)
	t.Parallel()
	var network *etcdtest.Proxy
	nodes := newCluster(t, 2, func(c *host.Config) {
		if c.Node == "node-2" {
			_, at, _ := strings.Cut(c.Cluster, "endpoints = [\"")
			at, _, _ = strings.Cut(at, "\"")
			network = etcdtest.StartProxy(t, at)
			c.Cluster = strings.Replace(c.Cluster, at, network.URL, 1)
		}
	}, allCaps...)
	a, b := nodes[0], nodes[1]
	pa, pb := a.addPlugin("plugin-a", csifake.Monolith), b.addPlugin("plugin-b", csifake.Node)
	for _, volume := range []string{"kept", "released", "wanted"} {
		a.must(a.create(volume))
	}
	b.waitUntil("the volumes are known", func() bool { return len(b.volumeStates()) == 3 })
	kept := b.use("keeps", request{source: "kept"})
	b.writeFile(kept, "file", "text")
	b.use("releases", request{source: "released"})
	group := b.group("wants", request{source: "wanted"})

	network.Cut()
	a.waitEvent(func(e host.Event) bool { return e.Kind == "node suspect" && e.Node == "node-2" })
	a.use("is-faster", request{source: "wanted"})
	a.must(a.create("new"))
	before := len(b.calls())
	released := background(func() error { return b.release("releases") })
	wanted := background(func() error { return errOf(b.prepare(group)) })
	b.waitUntil("the volume is unstaged", func() bool {
		calls := b.calls()
		return len(calls) >= before+2 && calls[before+1].End != nil
	})
	b.wantCalls(before, unpublishOK, unstageOK)
	b.waitUntil("both allocs say what they wait for", func() bool {
		waiting := 0
		list, _, err := b.host.Allocs(b.ctx(), host.AllocQuery{})
		b.must(err)
		for _, alloc := range list {
			for _, w := range alloc.Waiting {
				if strings.Contains(fmt.Sprintf("%+v", w), "etcd has not answered since") {
					waiting++
				}
			}
		}
		return waiting == 2
	})
	if len(released) > 0 || len(wanted) > 0 {
		t.Error("a decision was made without etcd")
	}
	if names := slices.Sorted(maps.Keys(a.claims())); !slices.Equal(names, []string{"is-faster", "keeps", "releases"}) {
		t.Errorf("claims while node-2 is cut off: %q", names)
	}
	b.wantFile(kept, "file", "text")

	network.Heal()
	b.must(b.result("the release", released))
	b.wantConflict(b.result("the claim", wanted), "is-faster", "node-1")
	b.wantFile(kept, "file", "text")
	b.waitUntil("the new volume is known", func() bool { return b.volumeStates()["new"] == "ready" })
	b.must(b.release("keeps"))
	a.must(a.release("is-faster"))
	for _, volume := range []string{"kept", "released", "wanted", "new"} {
		b.must(b.delete(volume))
	}
	b.stopPlugin(pb)
	a.stopPlugin(pa)
}
