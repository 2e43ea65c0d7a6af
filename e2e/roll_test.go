package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// pluginTaskOf returns a plugin task as the shim describes it.
func (e *env) pluginTaskOf(k host.TaskKey) host.PluginTask {
	e.t.Helper()
	list, _, err := e.host.Plugins(e.ctx(), host.PluginQuery{Plugin: "fake"})
	e.must(err)
	for _, t := range list.Tasks {
		if t.TaskKey == k {
			return t
		}
	}
	e.t.Fatalf("plugin task %s is not listed", k)
	return host.PluginTask{}
}

// roll replaces a plugin's instance as an orchestrator does: it starts another one beside it, and stops the old one
// once nothing needs it. It calls during before the old one is asked for.
func (e *env) roll(old *pluginTask, alloc string, during func()) *pluginTask {
	e.t.Helper()
	next := e.addPlugin(alloc, csifake.Monolith)
	during()
	e.waitUntil("nothing needs the old instance", func() bool { return e.pluginTaskOf(old.task.Key()).MayStop() })
	e.must(e.host.TaskStopping(e.ctx(), old.task.Key(), 1))
	e.stopPlugin(old)
	return next
}

// A plugin in both roles is rolled while a hundred allocs mount and unmount volumes, also with a swap and with a kill
// of the shim between the start of the new instance and the end of the old one. In a cluster, instances are also
// stopped before others start, so that the executor changes while calls are under way. No call fails.
func TestRollDuringMounts(t *testing.T) {
	slow(t)
	t.Parallel()
	t.Run("one node", func(t *testing.T) { rollDuringMounts(t, []*env{newEnv(t, allCaps...)}, 100) })
	t.Run("two nodes", func(t *testing.T) { rollDuringMounts(t, newCluster(t, 2, nil, allCaps...), 20) })
}

func rollDuringMounts(t *testing.T, nodes []*env, users int64) {
	e := nodes[0]
	var plugins []*pluginTask
	for _, e := range nodes {
		plugins = append(plugins, e.addPlugin("plugin-of-"+string(e.config.Node), csifake.Monolith))
	}
	var running sync.WaitGroup
	var rounds, failed atomic.Int64
	stop := make(chan struct{})
	for i := range users {
		e := nodes[int(i)%len(nodes)]
		volume, alloc := fmt.Sprint("vol-", i), fmt.Sprint("user-", i)
		g := e.group(alloc, request{source: volume})
		running.Go(func() {
			err := e.create(volume)
			for n := 0; err == nil && (n == 0 || !isClosed(stop)); n++ {
				next := g
				next.Alloc = host.AllocID(fmt.Sprint(alloc, "-", n))
				if _, err = e.prepare(next); err == nil {
					err = e.release(string(next.Alloc))
				}
				rounds.Add(1)
			}
			if err = errors.Join(err, e.delete(volume)); err != nil {
				failed.Add(1)
				t.Errorf("%s: %v", volume, err)
			}
		})
	}
	mounted := func() {
		before := rounds.Load()
		e.waitUntil("allocs mount with the new instance", func() bool {
			return failed.Load() > 0 || rounds.Load() > before+users
		})
	}
	for i, during := range []func(){func() {}, func() { e.swap() }, e.replaceShimByKill, func() {}} {
		plugins[0] = e.roll(plugins[0], fmt.Sprint("plugin-", i+1), during)
		mounted()
	}
	for i := range 2 * (len(nodes) - 1) {
		e := nodes[i%2]
		e.must(e.host.TaskStopping(e.ctx(), plugins[i%2].task.Key(), 1))
		e.stopPlugin(plugins[i%2])
		plugins[i%2] = e.addPlugin(fmt.Sprint("next-plugin-", i+1), csifake.Monolith)
		mounted()
	}
	close(stop)
	running.Wait()
	for i, e := range nodes {
		e.stopPlugin(plugins[i])
	}
	t.Logf("%d mounts", rounds.Load())
}

// waitKept waits until the old instance is kept for the volume "disk".
func (a *agentEnv) waitKept(old control.Alloc) {
	a.t.Helper()
	a.waitUntil("the old instance is kept for its mounts", func() bool {
		alloc, err := a.client.Alloc(a.ctx(), old.ID)
		return err == nil && strings.Contains(alloc.Reason, "serves the mounts of volume disk used by alloc")
	})
}

// A FUSE driver is rolled while a task has a file open on its mount: the old process serves it until the volume is
// released, also if agent and shim are killed meanwhile, and is stopped then. New volumes go to the new process.
func TestRollKeepsFUSEMountsAlive(t *testing.T) {
	slow(t)
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("this kernel has no FUSE: %v", err)
	}
	a := newAgentEnv(t)
	a.must(a.runSubmission(a.jobWith("fake.hcl", `args=["--mount=fuse"]`)))
	a.must(a.create("disk"))
	a.must(a.runSubmission(a.jobWith("user.hcl", "does=:")))
	old := a.alloc("fake")
	file, err := os.Open(fuseFile(t, a.dir))
	a.must(err)
	defer file.Close()
	wantServed := func() {
		t.Helper()
		if text := make([]byte, 5); errOf(file.ReadAt(text, 0)) != nil || string(text) != "alive" {
			t.Fatalf("the open file reads %q", text)
		}
	}
	wantServed()
	a.wantOutput(true, []string{"draining", "serves the mounts of volume disk", "of job user",
		"plugin roll --drain fake"},
		"plugin", "roll", "fake")
	wantServed()
	a.killAgent()
	a.must(a.startAgent())
	shim, err := a.client.Shim(a.ctx())
	a.must(err)
	a.must(unix.Kill(shim.PID, unix.SIGKILL))
	a.waitKept(old)
	wantServed()
	a.wantOutput(true, []string{"disk"}, "plugin", "status", "fake")
	a.must(a.create("other"))
	a.must(a.runSubmission(a.jobWith("user.hcl", "does=:", "id=other", "volume=other")))
	a.must(a.stopJob("other"))
	a.must(a.delete("other"))
	a.wantCalledAt(a.alloc("fake").ID, "NodeStageVolume", "other")
	wantServed()
	a.must(file.Close())
	a.must(a.stopJob("user"))
	a.waitUntil("the old process is gone", func() bool { return !alive(old.Tasks[0].PID) })
	a.wantCalledAt(old.ID, "NodeUnpublishVolume", "disk")
	a.wantCalledAt(old.ID, "NodeUnstageVolume", "disk")
	if now := a.alloc("fake"); now.ID == old.ID || now.State != "running" {
		t.Errorf("alloc %s of the plugin is %s", now.ID, now.State)
	}
	a.must(a.runSubmission(a.jobWith("user.hcl", "does=:")))
	before := a.alloc("user").ID
	a.wantOutput(true, []string{"done"}, "plugin", "roll", "--drain", "fake")
	a.waitUntil("the user was restarted", func() bool {
		u := a.alloc("user")
		return u.ID != before && u.State == "running"
	})
	a.must(a.stopJob("user"))
	a.must(a.delete("disk"))
	a.must(a.stopJob("fake"))
}

// wantCalledAt fails the test unless the last such call for the volume was made at the plugin's alloc.
func (a *agentEnv) wantCalledAt(alloc, rpc, volume string) {
	a.t.Helper()
	lines, err := journal.Read(a.path("journal"))
	a.must(err)
	at := ""
	for _, l := range lines {
		if l.Kind == journal.Begin && l.RPC == rpc && l.Volume == csifake.VolumeID(volume) {
			at = l.Instance
		}
	}
	if at != alloc {
		a.t.Errorf("%s of %s was made at %q, want %s", rpc, volume, at, alloc)
	}
}

// fuseFile returns the path of the file of the only published FUSE mount below dir.
func fuseFile(t *testing.T, dir string) string {
	t.Helper()
	for line := range strings.Lines(mountLines(t, "self", dir)) {
		if f := strings.Fields(line); strings.Contains(line, " - fuse.csifake ") &&
			strings.Contains(f[4], "/publish/") {
			return filepath.Join(f[4], csifake.FuseFile)
		}
	}
	t.Fatal("no FUSE mount is published")
	return ""
}

// A new version of a plugin that does not become healthy leaves everything as it was, and the command says why.
func TestFailedRollKeepsThePlugin(t *testing.T) {
	slow(t)
	a := newAgentEnv(t)
	a.startBystander()
	was, before := a.alloc("fake"), a.snapshot("user")
	for name, script := range map[string]string{"exits": "exit 3", "never answers": "sleep 1000000"} {
		t.Run(name, func(t *testing.T) {
			a.wantFailedRoll(wrapped(script)...)
			if p := a.waitOneInstance(); string(p.Alloc) != was.ID {
				t.Errorf("alloc %s runs, want %s", p.Alloc, was.ID)
			}
		})
	}
	job, err := a.client.Job(a.ctx(), "fake")
	a.must(err)
	if job.Version != 1 {
		t.Errorf("the job has version %d", job.Version)
	}
	pid := was.Tasks[0].PID
	if !alive(pid) {
		t.Errorf("the old process %d is gone", pid)
	}
	if after := a.snapshot("user"); after != before {
		t.Errorf("before:\n%+v\nafter:\n%+v", before, after)
	}
	a.stopBystander()
}

// wrapped are the replacements by which a shell script runs instead of the plugin, whose command line it gets.
func wrapped(script string) []string {
	return []string{`command = var.csifake`, `command = "/bin/sh"`,
		"concat([\n", `concat(["-c", "` + script + `", var.csifake, ` + "\n"}
}

// wantFailedRoll runs a new version of the plugin and fails the test unless the command says that it failed.
func (a *agentEnv) wantFailedRoll(replace ...string) {
	a.t.Helper()
	src, err := a.hclFile("fake.hcl", replace...)
	a.must(err)
	a.must(os.WriteFile(a.path("new.hcl"), src.Text, 0o600))
	src.Variables["health"] = "2s"
	args := []string{"job", "run", "--wait", a.path("new.hcl")}
	for name, value := range src.Variables {
		args = append(args, "--var", name+"="+value)
	}
	a.wantOutput(false, []string{"failed, nothing has changed"}, args...)
}

// waitOneInstance waits until one task of the plugin is left, which is active, and returns it.
func (a *agentEnv) waitOneInstance() (task host.PluginTask) {
	a.t.Helper()
	a.waitUntil("one instance is left", func() bool {
		p, err := a.client.Plugin(a.ctx(), "fake")
		if err != nil || p.Rolling() || len(p.Tasks) != 1 {
			return false
		}
		task = p.Tasks[0]
		return task.Active
	})
	return task
}

// A plugin that cannot run twice is stopped before its new version starts. Calls wait meanwhile, and mounts stay. A new
// version that fails is followed by the old one. Two instances never run at once.
func TestStopFirstRollRunsOneInstance(t *testing.T) {
	slow(t)
	a := newAgentEnv(t)
	stopFirst := []string{`type           = "monolith"`, "type = \"monolith\"\nroll = \"stop_first\""}
	a.must(a.runJob("fake.hcl", stopFirst...))
	a.must(a.create("disk"))
	a.must(a.create("other"))
	a.must(a.runJob("user.hcl"))
	was, before := a.alloc("fake"), a.snapshot("user")
	gated := wrapped("while ! [ -e ${var.d}/go ]; do sleep 0.1; done; exec $0 $@")
	next, err := a.hclFile("fake.hcl", append(gated, stopFirst...)...)
	a.must(err)
	a.must(a.submit(next))
	a.waitUntil("the old instance has ended", func() bool { return !alive(was.Tasks[0].PID) })
	late := background(func() error { return a.create("late") })
	a.must(a.submit(a.jobWith("user.hcl", "id=other", "volume=other")))
	a.waitUntil("an alloc waits for the plugin", func() bool {
		return strings.Contains(a.alloc("other").Reason, "plugin fake")
	})
	a.must(os.WriteFile(a.path("go"), nil, 0o600))
	a.must(a.result("create late", late))
	a.waitUntil("the alloc runs", func() bool { return a.pid("other") != 0 })
	now := a.waitOneInstance()
	if string(now.Alloc) == was.ID {
		t.Error("the old instance runs")
	}
	a.wantCalledAt(string(now.Alloc), "NodeStageVolume", "other")
	a.wantFailedRoll(append(wrapped("exit 3"), stopFirst...)...)
	if again := a.waitOneInstance(); again.Alloc == now.Alloc {
		t.Error("the second version was not stopped first")
	}
	a.must(a.stopJob("other"))
	a.must(errors.Join(a.delete("other"), a.delete("late")))
	if after := a.snapshot("user"); after.mounts != before.mounts || after.tasks != before.tasks {
		t.Errorf("before:\n%+v\nafter:\n%+v", before, after)
	}
	a.must(a.stopJob("user"))
	a.must(a.delete("disk"))
	a.must(a.stopJob("fake"))
	a.wantOneRunAtATime(3)
}

// wantOneRunAtATime fails the test unless the plugin's journal has so many runs, each after the end of the one before.
func (a *agentEnv) wantOneRunAtATime(want int) {
	a.t.Helper()
	lines, err := journal.Read(a.path("journal"))
	a.must(err)
	runs, running := 0, ""
	for _, l := range lines {
		switch {
		case l.Kind == journal.Start:
			if running != "" {
				a.t.Errorf("run %s started while %s ran", l.Run, running)
			}
			runs, running = runs+1, l.Run
		case l.Kind == journal.Stop && l.Run == running:
			running = ""
		}
	}
	if runs != want || running != "" {
		a.t.Errorf("the plugin ran %d times, want %d; %q has no end", runs, want, running)
	}
}
