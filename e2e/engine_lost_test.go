package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/internal/enginetest"
)

// TestContainersOfEnginesLoseTheirVolume freezes agent and shim of a node with a container, and declares the node out
// of service. When it continues, it leaves the volume mounted for the container, starts no other one with it, and says
// which command stops the container. Once the container has stopped, the node is ready, and the next one starts. At the
// end the engine creates and deletes a volume of a plugin that runs at the other node only.
func TestContainersOfEnginesLoseTheirVolume(t *testing.T) {
	slow(t)
	t.Parallel()
	driver := fmt.Sprintf("holdfast-lost-%d", os.Getpid())
	socket := filepath.Join("/run/docker/plugins", driver+".sock")
	t.Cleanup(func() { _ = os.Remove(socket) })
	var a, b *agentEnv
	var stop string
	t.Cleanup(func() { // after the agent has exited
		if t.Failed() {
			return
		}
		if log := b.agentOutput(); !strings.Contains(log, fmt.Sprintf("command=%q", stop)) {
			t.Errorf("the log lacks %q", stop)
		}
	})
	a, b = newAgentCluster(t, "--volume-plugin", socket)
	docker := enginetest.Docker(t)
	docker.Import("box", nil)
	docker.CLI("volume", "create", "--driver", driver, "-o", "plugin=fake", "-o", "size=1M", "notes")
	run := func(name string) error {
		return errOf(docker.Try("run", "-d", "--network", "none", "--name", name, "-v", "notes:/data", "box", "sh",
			"-c", "echo "+name+" >>/data/names; sync; exec sleep 1000"))
	}
	b.must(run("first"))
	id := strings.TrimSpace(docker.CLI("ps", "-q", "--no-trunc"))
	stop = "docker stop " + id[:12]
	thaw := a.declareLost(b)
	a.waitUntil("the claim is released", func() bool {
		list, err := a.client.Claims(a.ctx())
		return err == nil && len(list) == 0
	})
	before := len(a.callsOfNode("node-2-id"))
	thaw()

	b.waitUntil("the loss is shown", func() bool {
		out, _ := b.holdfast("volume", "status", "notes")
		return strings.Contains(out, "containers use volume notes, which this node has lost")
	})
	if err := run("second"); err == nil || !strings.Contains(err.Error(), stop) {
		t.Errorf("a second container: %v", err)
	}
	b.wantOutput(true, []string{id, stop}, "volume", "status", "notes")
	b.wantOutput(false, []string{"unowned", stop}, "doctor")
	if calls := a.callsOfNode("node-2-id")[before:]; len(calls) > 0 {
		t.Errorf("calls while the container runs: %+v", calls)
	}
	docker.CLI("stop", "-t", "1", "first")
	b.waitReady()
	b.must(docker.Remove("second"))
	b.must(b.retry("run the next", func() error {
		_ = docker.Remove("next")
		return run("next")
	}))
	b.must(docker.Remove("first"))
	b.must(docker.Remove("next"))
	b.must(b.retry("remove the volume", func() error { return errOf(docker.Try("volume", "rm", "notes")) }))
	b.wantOutput(true, nil, "doctor")
	b.must(b.stopJob("fake"))
	create := func() error {
		return errOf(docker.Try("volume", "create", "--driver", driver, "-o", "plugin=fake", "-o", "size=1M", "far"))
	}
	b.must(create()) // by node-1
	docker.CLI("volume", "rm", "far")
	a.must(a.stopJob("fake"))
	b.waitUntil("no node has the plugin", func() bool {
		err := create()
		return err != nil && strings.Contains(err.Error(), `plugin "fake" is not running`)
	})
}
