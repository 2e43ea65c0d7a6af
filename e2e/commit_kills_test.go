package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/moby/sys/mountinfo"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
	"holdfast/registry"
)

// TestKilledAtEachCommit kills a shim at each commit of the life of a volume, before and after the commit: creation,
// claim, mount, release and deletion. In a cluster its executor changes twice meanwhile, and the shims of both nodes
// are killed: before a transaction is sent to etcd, before the copy of the node has it, and after. One run without a
// kill finds the commits. Each call succeeds, maybe after its caller has repeated it, the journal is legal, and nothing
// is left.
func TestKilledAtEachCommit(t *testing.T) {
	slow(t)
	for _, c := range []struct {
		name  string
		nodes int
	}{{"bolt", 1}, {"etcd", 2}} {
		var points []commitPoint
		var reached atomic.Int32
		t.Run(c.name, func(t *testing.T) {
			points = newCommitKills(t, c.nodes).trace()
			const each = 8 // the host waits longer after each death
			for group := range slices.Chunk(points, each) {
				t.Run(group[0].String(), func(t *testing.T) {
					t.Parallel()
					k := newCommitKills(t, c.nodes)
					for _, p := range group {
						if k.kill(p) {
							reached.Add(1)
						}
					}
				})
			}
		})
		// how often a decision is repeated, or an instance is seen to be ill, differs between runs
		if n := int(reached.Load()); n < len(points)*3/4 {
			t.Errorf("%s: only %d of %d points were reached", c.name, n, len(points))
		}
	}
}

// commitPoint is a point of a commit: see kill-at of package fault.
type commitPoint struct {
	node, number int
	line         string
}

func (p commitPoint) String() string {
	return fmt.Sprintf("node %d, %d. %s", p.node+1, p.number, p.line)
}

// commitKills is a node, or a cluster of two, whose shims trace their commits.
type commitKills struct {
	t       *testing.T
	nodes   []*env           // the first node is the executor
	plugins []*pluginTask    // of the nodes
	etcd    *clientv3.Client // nil: one node
	runs    int
}

func newCommitKills(t *testing.T, nodes int) *commitKills {
	k := &commitKills{t: t}
	configure := func(c *host.Config) {
		dir := filepath.Dir(c.StateDir)
		var lines []string
		for _, point := range []string{"store before", "store after", "etcd before"} {
			lines = append(lines, point+" kill-at "+filepath.Join(dir, "kill"))
		}
		c.Shim.Path = fault.Binary(t, faulty, dir, "kills", lines...)
	}
	if nodes == 1 {
		e := unopenedEnv(t, allCaps...)
		configure(&e.config)
		e.open()
		k.nodes = append(k.nodes, e)
	} else {
		k.nodes = newCluster(t, nodes, configure, allCaps...)
		k.etcd = k.nodes[0].etcd()
	}
	for _, e := range k.nodes {
		e.config.Shim.Path = filepath.Join(bin, "holdfast-shim") // which checks the state at the end
	}
	k.plugins = make([]*pluginTask, nodes)
	for i := range k.nodes {
		k.start(i)
	}
	t.Cleanup(func() {
		for i := range k.nodes {
			k.stop(i)
		}
	})
	return k
}

// start runs the plugin on a node, stop ends it.
func (k *commitKills) start(node int) {
	e := k.nodes[node]
	k.plugins[node] = e.addPlugin(fmt.Sprintf("plugin-%d-%d", node+1, k.runs), csifake.Monolith)
}

func (k *commitKills) stop(node int) { k.nodes[node].stopPlugin(k.plugins[node]) }

// trace runs once and returns the points of the commits that it sees.
func (k *commitKills) trace() (points []commitPoint) {
	began := make([]int, len(k.nodes))
	for i, e := range k.nodes {
		began[i] = len(traced(e))
	}
	k.run()
	shared := map[string]int{}
	for i, e := range k.nodes {
		numbers := map[string]int{}
		for _, line := range traced(e)[began[i]:] {
			moment, changes, _ := strings.Cut(line, ": ")
			atEtcd := moment == "etcd before"
			if k.etcd != nil && !atEtcd && isShared(changes) {
				continue // the commit of a copy, which may have several transactions of etcd
			}
			numbers[line]++
			points = append(points, commitPoint{i, numbers[line], line})
			if !atEtcd {
				continue
			}
			shared[changes]++
			for copied := range k.nodes {
				for _, moment := range []string{"store before", "store after"} {
					points = append(points, commitPoint{copied, shared[changes], moment + ": " + changes})
				}
			}
		}
	}
	return points
}

// isShared reports whether nodes share the records that are written. No commit mixes these with records of one node.
func isShared(changes string) bool {
	bucket, _, _ := strings.Cut(strings.Fields(changes)[0][1:], ":")
	return registry.Bucket(bucket).Shared()
}

func traced(e *env) []string {
	text, err := os.ReadFile(filepath.Join(e.dir, "kill.trace"))
	e.must(err)
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// kill runs once while the shim is killed at a point, and reports whether the run has reached the point.
func (k *commitKills) kill(p commitPoint) (reached bool) {
	e := k.nodes[p.node]
	file := filepath.Join(e.dir, "kill")
	e.must(os.WriteFile(file, fmt.Appendf(nil, "%d %s", p.number, p.line), 0o600))
	k.t.Logf("%s", p)
	k.run()
	return os.Remove(file) != nil
}

// run is the life of a volume that the last node uses.
func (k *commitKills) run() {
	k.runs++
	executor, user := 0, len(k.nodes)-1
	u, volume := k.nodes[user], fmt.Sprint("vol-", k.runs)
	k.again("create", func() error { return u.create(volume) })
	var path string
	k.again("claim", func() (err error) { path, err = u.prepare(u.group("user", request{source: volume})); return err })
	u.writeFile(path, "file", "text")
	if executor != user { // the user's node becomes the executor
		k.stop(executor)
	}
	u.wantFile(path, "file", "text")
	k.again("release", func() error { return u.release("user") })
	if executor != user { // and is not any more
		k.start(executor)
		k.stop(user)
	}
	k.again("delete", func() error { return u.delete(volume) })
	if executor != user {
		k.start(user)
	}
	var left []string
	if err := waitFor(k.t.Context(), "nothing is left",
		func() bool { left = k.left(); return len(left) == 0 }); err != nil {
		k.t.Fatalf("%v: %q", err, left)
	}
}

// again repeats a call until it succeeds. Its error may only be that its outcome is unknown, or that it cannot be made
// now.
func (k *commitKills) again(what string, call func() error) {
	k.t.Helper()
	for err := call(); err != nil; err = call() {
		if k.t.Logf("%s: %v", what, err); !errors.Is(err, host.ErrUnavailable) && !errors.Is(err, host.ErrUncertain) {
			k.t.Fatalf("%s: %v", what, err)
		}
	}
}

// left lists the records and mounts that remain after the volume is deleted.
func (k *commitKills) left() (left []string) {
	for _, e := range k.nodes {
		add := func(what string, n int) {
			if n > 0 {
				left = append(left, fmt.Sprintf("%s: %d %s", e.config.Node, n, what))
			}
		}
		add("volumes", len(e.volumeStates()))
		add("claims", len(e.claims()))
		st, err := e.host.Status(e.ctx())
		e.must(err)
		add("intents", st.OpenIntents)
		add("allocs", st.Allocs)
		mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(e.dir))
		e.must(err)
		add("mounts", len(mounts)-2) // of the host
	}
	if k.etcd == nil {
		return left
	}
	answer, err := k.etcd.Get(k.t.Context(), "/holdfast/test/r/", clientv3.WithPrefix())
	k.nodes[0].must(err)
	for _, kv := range answer.Kvs {
		bucket, _, _ := strings.Cut(strings.TrimPrefix(string(kv.Key), "/holdfast/test/r/"), "/")
		// the answer to a call whose caller has died stays for an hour
		answered := bucket == "remote_calls" && strings.Contains(string(kv.Value), `"done":true`)
		if len(kv.Value) > 0 && !answered &&
			!slices.Contains([]string{"nodes", "node_leases", "executors", "formations"}, bucket) {
			left = append(left, fmt.Sprintf("etcd: %s %s", bucket, kv.Value))
		}
	}
	return left
}
