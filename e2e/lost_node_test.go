package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// lose ends a host and kills its shim, with all that is mounted left.
func (e *env) lose() {
	e.t.Helper()
	e.waitCommitted()
	pid := e.activeShim().PID
	e.must(syscall.Kill(pid, syscall.SIGSTOP)) // so that it does not end in order
	closed := make(chan error, 1)
	go func() { closed <- e.host.Close() }()
	e.must(syscall.Kill(pid, syscall.SIGKILL))
	_ = e.result("close the host", closed)
}

// TestLostNode loses a node with a volume in use. In one run an operator declares it out of service, in the other the
// hosts of the others fence it. Before that nothing is released. When the node is back, its mounts go first.
func TestLostNode(t *testing.T) {
	for _, policy := range []string{"wait", "fence"} {
		t.Run(policy, func(t *testing.T) {
			var fences atomic.Int32
			nodes := newCluster(t, 3, func(c *host.Config) {
				c.Cluster = strings.Replace(c.Cluster, `"4s"`, fmt.Sprintf("\"5s\"\n lost_nodes = %q", policy), 1)
				c.Fence = func(_ context.Context, node string) error {
					if node != "node-2" || fences.Add(1) < 3 {
						return errors.New("no route to the power switch")
					}
					return nil
				}
			}, allCaps...)
			a, b, c := nodes[0], nodes[1], nodes[2]
			pa := a.addPlugin("plugin-a", csifake.Monolith)
			pb, pc := b.addPlugin("plugin-b", csifake.Node), c.addPlugin("plugin-c", csifake.Node)
			a.must(a.create("vol"))
			for _, e := range nodes {
				e.waitUntil("the volume is known", func() bool { return len(e.volumeStates()) == 1 })
			}
			user := b.group("user-b", request{source: "vol"})
			b.must(errOf(b.prepare(user)))
			lost := host.OutOfServiceOptions{By: "alice", Reason: "it burns", Confirm: "node-2"}
			_, err := a.host.NodeOutOfService(a.ctx(), "node-2", lost)
			a.wantConflict(err, "alive", "drain")
			before := len(a.calls())
			b.lose()
			a.must(journal.NoteReboot(a.journal, "csifake.example.org", b.nodeID)) // its machine has lost its power
			a.waitEvent(func(e host.Event) bool { return e.Kind == host.EventKind("node suspect") && e.Node == "node-2" })
			if policy == "wait" {
				_, err = c.prepare(c.group("user-c", request{source: "vol"}))
				c.wantConflict(err, "user-b", "node-2")
				a.wantCalls(before)
				_, err = a.host.NodeOutOfService(a.ctx(), "node-2", lost)
				a.must(err)
			} else {
				a.waitEvent(func(e host.Event) bool { return e.Kind == host.EventKind("node fenced") })
				if n := fences.Load(); n != 3 {
					t.Errorf("the hosts were asked to fence %d times", n)
				}
			}
			c.waitUntil("the claim is released", func() bool { return len(c.claims()) == 0 })
			a.wantCalls(before, "ControllerUnpublishVolume OK")
			c.use("user-c", request{source: "vol"})
			c.must(c.release("user-c"))

			before = len(a.calls())
			b.reopen([]*pluginTask{pb}, user)
			b.waitEvent(func(e host.Event) bool { return e.Kind == host.EventKind("volumes lost") && e.Alloc == "user-b" })
			b.waitReleased("user-b")
			b.use("again-b", request{source: "vol"})
			got := answers(a.calls()[before:])
			if want := []string{"NodeUnpublishVolume OK", "NodeUnstageVolume OK"}; !slices.Equal(got[:min(2, len(got))], want) {
				t.Errorf("the node that is back made the calls %q", got)
			}
			b.must(b.release("again-b"))
			a.waitUntil("the claim is released", func() bool { return len(a.claims()) == 0 })
			a.must(a.delete("vol"))
			c.stopPlugin(pc)
			b.stopPlugin(pb)
			a.stopPlugin(pa)
		})
	}
}
