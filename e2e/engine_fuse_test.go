package e2e

import (
	"os"
	"testing"

	"holdfast/host/agent"
	"holdfast/internal/enginetest"
)

// A FUSE driver in a container is rolled while a file on its mount is open: its old container serves the mount until
// the volume is released, and is stopped then. The shim knows this from the processes of the container that have
// /dev/fuse.
func TestRollKeepsFUSEMountsOfContainers(t *testing.T) {
	slow(t)
	t.Parallel()
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("this kernel has no FUSE: %v", err)
	}
	enginetest.Each(t, func(t *testing.T, engine *enginetest.Engine) {
		engine.Import("loopfs", nil) // of the user
		engine.Import("csifake", engine.Programs(bin+"/csifake"))
		e := newEngineEnv(t, engine, "fuse")
		t.Cleanup(e.logTasks)
		e.must(os.Symlink("data/journal", e.path("journal")))
		e.runFake(`"--mount=fuse"`)
		e.createVolume("fake", "csifake")
		e.job("engine_user.hcl", "NAME", "user", "VOLUME", "disk", "SCRIPT", "while :; do sleep 0.1; done",
			"single-node-multi-writer", "single-node-writer")
		old := e.alloc("csifake")
		file, err := os.Open(fuseFile(t, e.dir))
		e.must(err)
		defer file.Close()
		e.must(errOf(e.client.RollPlugin(e.ctx(), "csifake", agent.RollOptions{})))
		e.waitKept(old)
		if text := make([]byte, 5); errOf(file.ReadAt(text, 0)) != nil || string(text) != "alive" {
			t.Errorf("the open file reads %q", text)
		}
		e.must(file.Close())
		e.must(e.stopJob("user"))
		e.waitUntil("the old container is gone", func() bool { return !alive(old.Tasks[0].PID) })
		e.wantCalledAt(old.ID, "NodeUnstageVolume", "disk")
		e.must(e.delete("disk"))
		e.must(e.stopJob("csifake"))
	})
}
