package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/internal/etcdtest"
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
	t.Parallel()
	for _, policy := range []string{"wait", "fence"} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
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
			a.waitEvent(func(e host.Event) bool {
				return e.Kind == host.EventKind("node suspect") &&
					e.Node == "node-2"
			})
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
			b.waitEvent(func(e host.Event) bool {
				return e.Kind == host.EventKind("volumes lost") &&
					e.Alloc == "user-b"
			})
			b.must(b.release("user-b"))
			b.use("again-b", request{source: "vol"})
			got := answers(a.calls()[before:])
			if want := []string{"NodeUnpublishVolume OK", "NodeUnstageVolume OK"}; !slices.Equal(got[:min(2, len(got))],
				want) {
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

// publishedAt returns where the machine has its only volume mounted.
func (a *agentEnv) publishedAt() string {
	a.t.Helper()
	found, err := mountinfo.GetMounts(mountinfo.PrefixFilter(filepath.Join(a.state(), "mnt")))
	a.must(err)
	for _, m := range found {
		if strings.Contains(m.Mountpoint, "/publish/") {
			return m.Mountpoint
		}
	}
	a.t.Fatalf("no volume is published: %+v", found)
	return ""
}

// callsOfNode returns the mutating calls that the plugin of a node got.
func (a *agentEnv) callsOfNode(nodeID string) []journal.Call {
	a.t.Helper()
	all, err := csifake.Calls(a.path("journal"))
	a.must(err)
	return slices.DeleteFunc(all, func(c journal.Call) bool {
		return c.Role != "node" || c.Node != nodeID || !journal.Mutates(c.RPC)
	})
}

// newAgentCluster returns the agents of node-1 and node-2, with the plugin at both. The arguments are those of node-2.
func newAgentCluster(t *testing.T, args ...string) (a, b *agentEnv) {
	t.Helper()
	config := filepath.Join(t.TempDir(), "agent.hcl")
	block := fmt.Sprintf("cluster {\n id = \"test\"\n expect = 2\n endpoints = [%q]\n lease_ttl = \"5s\"\n}\n",
		etcdtest.Start(t).Endpoints()[0])
	if err := os.WriteFile(config, []byte(block), 0o600); err != nil {
		t.Fatal(err)
	}
	a = newAgentNode(t, nil, "--config", config)
	b = newAgentNode(t, nil, append(args, "--config", config, "--node", "node-2")...)
	a.byNode, b.byNode = true, true
	b.must(os.Symlink(a.path("journal"), b.path("journal")))
	a.must(a.runJob("fake.hcl"))
	b.must(b.runSubmission(b.jobWith("fake.hcl", "d="+a.dir, `args=["--node-id=node-2-id"]`)))
	return a, b
}

// declareLost freezes agent and shim of node-2, and declares it out of service at this node. thaw has it continue.
func (a *agentEnv) declareLost(b *agentEnv) (thaw func()) {
	a.t.Helper()
	shim, err := b.client.Shim(b.ctx())
	b.must(err)
	signal := func(s unix.Signal) {
		for _, pid := range []int{b.agent.Process.Pid, shim.PID} {
			b.must(unix.Kill(pid, s))
		}
	}
	signal(unix.SIGSTOP)
	a.waitUntil("the node is suspect", func() bool {
		n, err := a.client.Node(a.ctx(), "node-2")
		return err == nil && !n.Alive
	})
	a.must(journal.NoteReboot(a.path("journal"), "csifake.example.org", "node-2-id")) // as the operator says
	a.wantOutput(true, []string{"node out-of-service --confirm=node-2 node-2"}, "node", "status", "node-2")
	a.wantOutput(false, []string{"add --confirm node-2"}, "node", "out-of-service", "node-2")
	a.must(errOf(a.client.NodeOutOfService(a.ctx(), "node-2", "node-2", "it hangs")))
	return func() { signal(unix.SIGCONT) }
}

// waitReady waits until node-2 has recovered from its loss.
func (a *agentEnv) waitReady() {
	a.t.Helper()
	a.waitUntil("the node is ready", func() bool {
		n, err := a.client.Node(a.ctx(), "node-2")
		return err == nil && n.State == host.NodeReady
	})
}

// TestFrozenNodeUnmountsFirst freezes agent and shim of a node while a task has a file of a volume open, and declares
// the node out of service. The volume moves. When the node continues, it stops the task, and unmounts the volume before
// it does anything else: while a file is open, it says so and tries again, and detaches no busy mount lazily.
func TestFrozenNodeUnmountsFirst(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	slow(t)
	t.Parallel()
	a, b := newAgentCluster(t)
	b.must(b.create("disk"))
	b.must(b.runSubmission(b.jobWith("user.hcl", "does=trap '' TERM; exec 9>>/disk/open")))
	task := b.alloc("user").Tasks[0].PID
	target := b.publishedAt()
	held, err := os.Open(target)
	b.must(err)
	defer held.Close()

	thaw := a.declareLost(b)
	a.must(a.runJob("user.hcl"))
	a.wantOutput(true, []string{"node-1"}, "claim", "list")
	before := len(a.callsOfNode("node-2-id"))

	thaw()
	b.waitUntil("the task is killed", func() bool { return !alive(task) })
	b.waitUntil("unmounting is tried again", func() bool { return len(a.callsOfNode("node-2-id")) >= before+3 })
	b.waitUntil("the reason is shown", func() bool {
		out, err := b.holdfast("alloc", "status")
		return err == nil && strings.Contains(out, "busy")
	})
	a.wantOutput(true, []string{"out-of-service"}, "node", "status", "node-2")
	if !strings.Contains(mountLines(t, "self", b.dir), target) {
		t.Errorf("%s is not mounted any more while a file is open", target)
	}
	for _, call := range a.callsOfNode("node-2-id")[before:] {
		if call.RPC != "NodeUnpublishVolume" || codeOf(call) == "OK" {
			t.Errorf("the node that is back makes the call %s: %s", call.RPC, codeOf(call))
		}
	}
	b.must(held.Close())
	b.waitReady()
	if strings.Contains(mountLines(t, "self", b.dir), target) {
		t.Errorf("%s is mounted", target)
	}
	a.must(a.stopJob("user"))
	b.waitUntil("the job of node-2 has the volume again", func() bool { return b.pid("user") != 0 })
	b.must(b.stopJob("user"))
	b.must(b.delete("disk"))
	b.must(b.stopJob("fake"))
	a.must(a.stopJob("fake"))
}
