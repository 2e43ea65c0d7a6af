package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/csifake"
	"holdfast/internal/proc"
)

// middle is a moment in the middle of a CSI call for the volume "disk".
type middle struct{ rpc, when string }

// holdCalls has the plugin stop at each of the moments until release is called for it.
func (a *agentEnv) holdCalls(moments []middle) {
	var rules []string
	for _, m := range moments {
		volume := csifake.VolumeID("disk")
		if m.rpc == "CreateVolume" {
			volume = "" // the call has no id yet
		}
		rules = append(rules, fmt.Sprintf(`{"rpc": %q, "volume": %q, "times": 1, "when": %q, "until": %q}`,
			m.rpc, volume, m.when, a.path("go-"+m.rpc)))
	}
	a.must(os.WriteFile(a.path("script"), []byte("["+strings.Join(rules, ",")+"]"), 0o600))
}

// waitInTheMiddle waits until the plugin is at the moment.
func (a *agentEnv) waitInTheMiddle(m middle, done <-chan error) {
	a.t.Helper()
	backend := csifake.NewBackend(a.path("backend"))
	a.waitUntil("the plugin is in the middle of "+m.rpc, func() bool {
		select {
		case err := <-done:
			a.t.Fatalf("%s was never called: %v", m.rpc, err)
		default:
		}
		calls, err := csifake.Calls(a.path("journal"), m.rpc)
		if err != nil || len(calls) == 0 || calls[len(calls)-1].End != nil {
			return false
		}
		return m.when == "before" || tookEffect(backend, m.rpc)
	})
}

// tookEffect reports whether the backend has the effect of a call for "disk".
func tookEffect(b *csifake.Backend, rpc string) bool {
	all, err := b.Volumes()
	v, exists := all[csifake.VolumeID("disk")]
	effect, known := map[string]bool{
		"CreateVolume": exists, "DeleteVolume": !exists,
		"ControllerPublishVolume": len(v.Attached) > 0, "ControllerUnpublishVolume": len(v.Attached) == 0,
		"NodeStageVolume": len(v.Staged) > 0, "NodeUnstageVolume": len(v.Staged) == 0,
		"NodePublishVolume": len(v.Published) > 0, "NodeUnpublishVolume": len(v.Published) == 0,
	}[rpc]
	return err == nil && (effect || !known)
}

// killInTheMiddle runs a scenario during which kill is called at each of the moments.
func killInTheMiddle(t *testing.T, moments []middle, kill func(*agentEnv)) {
	slow(t)
	a := newAgentEnv(t)
	a.startBystander()
	a.holdCalls(moments)
	done := background(a.scenario)
	for _, m := range moments {
		t.Log("in the middle of", m)
		a.waitInTheMiddle(m, done)
		kill(a)
		a.must(os.WriteFile(a.path("go-"+m.rpc), nil, 0o600))
	}
	a.must(<-done)
	a.stopBystander()
}

// The agent is killed in the middle of each call, before and after its effect. The next agent adopts the tasks, and the
// job continues.
func TestAgentKilledInTheMiddle(t *testing.T) {
	for _, when := range []string{"before", "after"} {
		t.Run(when, func(t *testing.T) {
			var moments []middle
			for _, rpc := range everyCall {
				moments = append(moments, middle{rpc, when})
			}
			killInTheMiddle(t, moments, func(a *agentEnv) {
				plugin, user := a.pid("fake"), a.pid("user")
				a.killAgent()
				a.must(a.startAgent())
				a.waitUntil("the tasks are adopted", func() bool { return a.pid("fake") != 0 && a.pid("user") != 0 })
				if a.pid("fake") != plugin || a.pid("user") != user || !alive(plugin) || !alive(user) {
					t.Errorf("plugin and user were processes %d and %d, and are %d and %d",
						plugin, user, a.pid("fake"), a.pid("user"))
				}
			})
		})
	}
}

// The plugin's task is killed in the middle of calls. It is restarted under its policy, and the calls continue there.
func TestPluginTaskKilledInTheMiddle(t *testing.T) {
	killInTheMiddle(t, []middle{
		{"NodeStageVolume", "after"}, {"NodePublishVolume", "after"}, {"NodeUnpublishVolume", "after"},
		{"NodeUnstageVolume", "after"},
	}, func(a *agentEnv) {
		plugin := a.pid("fake")
		a.must(unix.Kill(plugin, unix.SIGKILL))
		a.waitNewTask("fake", plugin)
	})
}

// Agent, shim and plugin are killed together. The next ones continue with the mounts, and remove them in order.
func TestAllKilledInTheMiddle(t *testing.T) {
	killInTheMiddle(t, []middle{
		{"NodeStageVolume", "after"}, {"NodePublishVolume", "after"}, {"NodeUnpublishVolume", "before"},
		{"NodeUnstageVolume", "after"},
	}, func(a *agentEnv) {
		shim, err := a.client.Shim(a.ctx())
		a.must(err)
		plugin, user := a.pid("fake"), a.pid("user")
		a.must(unix.Kill(shim.PID, unix.SIGKILL))
		a.must(unix.Kill(plugin, unix.SIGKILL))
		a.killAgent()
		a.must(a.startAgent())
		if a.pid("user") != user || !alive(user) {
			t.Errorf("the user was process %d, and is %d", user, a.pid("user"))
		}
		a.waitNewTask("fake", plugin)
	})
}

// Tasks end while no agent runs. The next agent learns how, releases their volumes, and restarts a plugin that died.
func TestTasksEndWhileNoAgentRuns(t *testing.T) {
	a := newAgentEnv(t)
	a.startBystander()
	a.must(a.create("disk"))
	a.must(a.runJob("batch.hcl", "FINISH", a.path("finish")))
	batch, plugin, user := a.pid("batch"), a.pid("fake"), a.pid("user")
	task, err := proc.ReadStat(batch)
	a.must(err)
	program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", task.Parent))
	if err != nil || filepath.Base(program) != "holdfast-task" {
		t.Errorf("the parent process of the task runs %s (%v)", program, err)
	}
	shim, err := a.client.Shim(a.ctx())
	a.must(err)
	a.killAgent()
	a.waitUntil("the shim exits with its host", func() bool { return !alive(shim.PID) })
	a.must(os.WriteFile(a.path("finish"), nil, 0o600))
	a.must(unix.Kill(plugin, unix.SIGKILL))
	a.waitUntil("the tasks have ended", func() bool { return !alive(batch) && !alive(plugin) })
	a.must(a.startAgent())
	a.waitUntil("the job batch is complete", func() bool { return a.alloc("batch").State == "complete" })
	if code := a.alloc("batch").Tasks[0].ExitCode; code == nil || *code != 0 {
		t.Errorf("the task's exit code is %v", code)
	}
	if alloc := a.alloc("fake"); alloc.Tasks[0].Attempt != 2 {
		t.Errorf("the plugin's task is at attempt %d", alloc.Tasks[0].Attempt)
	}
	if a.pid("user") != user || !alive(user) {
		t.Errorf("the user was process %d, and is %d", user, a.pid("user"))
	}
	a.must(a.stopJob("batch"))
	a.must(a.delete("disk"))
	a.stopBystander()
}

func (a *agentEnv) killAgent() {
	a.t.Helper()
	if err := a.endAgent(unix.SIGKILL); err == nil {
		a.t.Fatal("the agent ended well before it was killed")
	}
}

// swap has the agent replace its shim, and repeats a swap that took too long.
func (a *agentEnv) swap(path string) (report host.SwapReport) {
	a.t.Helper()
	a.must(a.retry("swap to "+path, func() (err error) {
		report, err = a.client.Swap(a.ctx(), control.SwapRequest{Path: path})
		return err
	}))
	return report
}

// While shims are replaced, tasks stay the same processes, all mounts stay, no plugin gets a call, and each synced
// write through a volume succeeds.
func TestDataPathUntouched(t *testing.T) {
	a := newAgentEnv(t)
	a.must(a.runJob("fake.hcl"))
	a.must(a.create("disk"))
	writer := "while true; do if dd if=/dev/zero of=/disk/block bs=512 count=8 conv=fsync 2>/disk/output; " +
		"then echo good >>/disk/written; else cat /disk/output >>/disk/failed; fi; sleep 0.02; done"
	a.must(a.runSubmission(a.jobWith("user.hcl", "does="+writer)))
	written := func() int { return strings.Count(a.volumeFile("written", ""), "good") }
	a.waitUntil("the user writes", func() bool { return written() > 0 })
	before := a.snapshot("fake", "user")
	if before.mounts == "" || !strings.Contains(before.calls, publishOK) {
		t.Fatalf("nothing is mounted: %+v", before)
	}
	shims, err := alternateShims()
	a.must(err)
	for n := range 5 {
		was := written()
		report := a.swap(shims[n%2].Path)
		a.waitUntil("the user still writes", func() bool { return written() > was })
		if now := a.snapshot("fake", "user"); now != before {
			t.Errorf("the swap %+v changed what runs:\n%+v\nand now\n%+v", report, before, now)
		}
	}
	if failed := a.volumeFile("failed", ""); failed != "" {
		t.Errorf("writes failed: %s", failed)
	}
	a.must(a.client.Events(a.ctx(), 0, false, func(event host.Event) error {
		switch event.Kind {
		case "unhealthy", "deregistered", "restart asked", "mount lost", "unpublished", "unstaged", "step failed",
			"task deregistered":
			t.Errorf("over swaps: %s", event)
		}
		return nil
	}))
	plugin := a.pid("fake")
	a.must(unix.Kill(plugin, unix.SIGKILL))
	a.waitNewTask("fake", plugin)
	if a.snapshot("fake", "user") == before {
		t.Error("a restarted plugin does not show in the snapshot")
	}
	a.must(a.stopJob("user"))
	a.must(a.delete("disk"))
	a.must(a.stopJob("fake"))
}

// startWriter starts the plugin and a writer on a volume of it.
func (a *agentEnv) startWriter() snapshot {
	a.t.Helper()
	a.must(a.runJob("fake.hcl"))
	a.must(a.create("kept"))
	a.must(a.runJob("writer.hcl", "FAILED", a.path("failed")))
	a.waitUntil("the writer writes", func() bool { return a.volumeFile("line", "1\n") != "" })
	return a.snapshot("fake", "writer")
}

// loseRecords kills the agent, damages agent.db, and checks that the next agent refuses to start.
func (a *agentEnv) loseRecords(damage func(path string) error) {
	a.t.Helper()
	a.killAgent()
	a.must(damage(a.path("s/agent/agent.db")))
	err := a.startAgent()
	if err == nil {
		a.t.Fatal("the agent starts and does not know the writer")
	}
	for _, want := range []string{"agent.db", "--recover=adopt", "--recover=stop"} {
		if !strings.Contains(err.Error(), want) {
			a.t.Errorf("the refusal does not mention %s: %v", want, err)
		}
	}
}

// checkLines fails the test unless the writer's lines are 1, 2, 3 and so on, and returns their number. The last may be
// cut.
func (a *agentEnv) checkLines() int {
	a.t.Helper()
	lines := strings.Split(a.volumeFile("line", "1\n"), "\n")
	for i, l := range lines[:len(lines)-1] {
		if l != strconv.Itoa(i+1) {
			a.t.Fatalf("line %d is %q", i+1, l)
		}
	}
	if failed, err := os.ReadFile(a.path("failed")); err == nil {
		a.t.Fatalf("writes failed: %s", failed)
	}
	return len(lines) - 1
}

// waitLines waits until the writer has written more lines.
func (a *agentEnv) waitLines() {
	a.t.Helper()
	was := a.checkLines()
	a.waitUntil("the writer still writes", func() bool { return a.checkLines() > was })
}

// An agent that has lost its records refuses to start while a writer runs. With --recover=adopt it touches neither
// writer, plugin nor volume. With --recover=stop the writer is stopped and its volume released before its plugin ends,
// as the journal shows.
func TestWriterSurvivesLossOfAgentRecords(t *testing.T) {
	a := newAgentEnv(t)
	before := a.startWriter()
	a.loseRecords(os.Remove)
	a.must(a.startAgent("--recover=adopt"))
	if before.mounts == "" || strings.Contains(before.calls, "Unpublish") || strings.Contains(before.calls, "Unstage") {
		t.Fatalf("the volume was taken away: %+v", before)
	}
	a.waitLines()
	found, err := a.client.Doctor(a.ctx(), control.DoctorRequest{})
	a.must(err)
	if len(found.Findings) > 0 {
		t.Errorf("doctor finds %+v", found.Findings)
	}
	a.killAgent()
	a.must(a.startAgent()) // without --recover
	if now := a.snapshot("fake", "writer"); now != before {
		t.Errorf("what runs was touched:\n%+v\nand now\n%+v", before, now)
	}
	a.loseRecords(func(path string) error { return os.Truncate(path, 0) })
	a.must(a.startAgent("--recover=stop"))
	a.waitUntil("all is stopped", func() bool {
		all, err := a.client.Allocs(a.ctx())
		jobs, err2 := a.client.Jobs(a.ctx())
		return err == nil && err2 == nil && len(all)+len(jobs) == 0
	})
	a.checkLines()
	a.must(a.runJob("fake.hcl"))
	a.must(a.delete("kept"))
	a.must(a.stopJob("fake"))
}
