package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/internal/etcdtest"
)

// newCluster opens the hosts of several nodes that share an etcd. Their plugins share a journal and a backend.
// configure changes their configs; nil: nothing.
func newCluster(t *testing.T, n int, configure func(*host.Config), caps ...string) (nodes []*env) {
	t.Helper()
	client := etcdtest.Start(t)
	shared := csifake.NewJournal(t, journal.Options{Settled: true, ByNode: true})
	for i := range n {
		e := unopenedNode(t, shared, caps...)
		e.config.Node = fmt.Sprintf("node-%d", i+1)
		e.config.Cluster = fmt.Sprintf("cluster {\n id = \"test\"\n expect = %d\n endpoints = [%q]\n lease_ttl = "+
			"\"4s\"\n}\n", n, client.Endpoints()[0])
		e.nodeID = e.config.Node + "-id"
		if i > 0 {
			e.backend = nodes[0].backend
		}
		if configure != nil {
			configure(&e.config)
		}
		e.open()
		nodes = append(nodes, e)
	}
	return nodes
}

// etcd returns a client of the cluster's etcd.
func (e *env) etcd() *clientv3.Client {
	e.t.Helper()
	_, endpoint, _ := strings.Cut(e.config.Cluster, "endpoints = [\"")
	endpoint, _, _ = strings.Cut(endpoint, "\"")
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}})
	e.must(err)
	e.t.Cleanup(func() { _ = client.Close() })
	return client
}

// TestNodesShareVolumes creates, uses and deletes volumes at two nodes. The first one makes all controller
// calls, because a swap of a shim hands nothing over.
func TestNodesShareVolumes(t *testing.T) {
	t.Parallel()
	nodes := newCluster(t, 2, nil, allCaps...)
	a, b := nodes[0], nodes[1]
	pa := a.addPlugin("plugin-a", csifake.Monolith)
	a.must(a.create("vol-a"))
	pb := b.addPlugin("plugin-b", csifake.Monolith)
	b.must(b.create("vol-b"))
	for _, e := range nodes {
		e.waitUntil("both volumes are known", func() bool { return len(e.volumeStates()) == 2 })
	}
	path := b.use("user-b", request{source: "vol-a"})
	b.writeFile(path, "file", "text")
	_, err := a.prepare(a.group("user-a", request{source: "vol-a"}))
	a.wantConflict(err, "user-b", "node-2")
	for range 3 {
		b.swap()
		a.swap()
	}
	b.wantFile(path, "file", "text")
	b.must(b.release("user-b"))
	a.use("user-a", request{source: "vol-a"})
	a.must(a.release("user-a"))
	made := request{source: "made", lines: "create {\n plugin_id = \"fake\"\n on_stop = \"delete\"\n}\n"}
	b.use("user-c", made) // the executor creates and deletes it
	b.must(b.release("user-c"))
	b.waitUntil("the volume of the alloc is deleted", func() bool { return len(b.volumeStates()) == 2 })
	b.must(b.delete("vol-a"))
	a.must(a.delete("vol-b"))
	executors := 0
	a.eventsUntil(func(event host.Event) bool {
		if event.Kind == "executor" {
			executors++
		}
		return event.Kind == "volume deleted" && event.Volume.ID == "vol-b"
	})
	if executors != 1 {
		t.Errorf("%d nodes became the executor", executors)
	}
	a.stopPlugin(pa) // the executor's: the other candidate takes over at once
	b.must(b.create("vol-c"))
	b.must(b.delete("vol-c"))
	b.stopPlugin(pb)
}

// TestEachNodeExpandsItsMount expands a volume that two nodes use. Each node plugin expands its own mount once. A third
// node, which mounts the volume later, has the new size at once.
func TestEachNodeExpandsItsMount(t *testing.T) {
	t.Parallel()
	nodes := newCluster(t, 3, nil, expandCaps...)
	a := nodes[0]
	var plugins []*pluginTask
	for _, e := range nodes {
		plugins = append(plugins, e.addPlugin("plugin-"+string(e.config.Node), csifake.Monolith))
	}
	a.must(a.create("vol"))
	everywhere := request{source: "vol", mode: manyWriters}
	for _, e := range nodes[:2] {
		e.use("user-"+string(e.config.Node), everywhere)
	}
	a.must(expand(a.ctx(), a.host, volumeName("vol"), 2<<30))
	a.waitUntil("two nodes have expanded", func() bool { return len(a.calls("NodeExpandVolume")) == 2 })
	nodes[2].use("user-node-3", everywhere)
	for _, e := range nodes {
		e.swap()
		e.waitUntil("nothing is pending", func() bool {
			list, _, err := e.host.Volumes(e.ctx(), host.VolumeQuery{})
			return err == nil && len(list) == 1 && list[0].Capacity == 2<<30 && !list[0].Expansion.Pending()
		})
	}
	var at []string
	for _, c := range a.calls("NodeExpandVolume") {
		at = append(at, c.Instance+" "+codeOf(c))
	}
	if slices.Sort(at); !slices.Equal(at, []string{"plugin-node-1 OK", "plugin-node-2 OK"}) {
		t.Errorf("expanded by %q", at)
	}
	for i, e := range nodes {
		e.must(e.release("user-" + string(e.config.Node)))
		if i == len(nodes)-1 {
			a.must(a.delete("vol"))
		}
	}
	for i, e := range nodes {
		e.stopPlugin(plugins[i])
	}
}
