package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host/agent"
	"holdfast/internal/enginetest"
)

// engineEnv is an agent whose plugins and users of volumes are containers of an engine.
type engineEnv struct {
	*agentEnv
	engine *enginetest.Engine
	flags  []string // of the agent
	driver string   // the name of the volume plugin at the engine
}

// CSI drivers from images serve volumes to containers, and neither the roll of a driver nor the death of the agent or
// of the engine's daemon disturbs a mount. The oracles are the journal of csifake, the kernel's mount table, the files
// of the users, and the engine's own list of containers.
func TestContainersOfEngines(t *testing.T) {
	slow(t)
	t.Parallel()
	enginetest.Each(t, func(t *testing.T, engine *enginetest.Engine) {
		tools := []string{"mkfs.ext4", "e2fsck", "resize2fs", "tune2fs", "dumpe2fs"}
		engine.Import("loopfs", engine.Programs(append(tools, filepath.Join(bin, "loopfs"))...))
		engine.Import("csifake", engine.Programs(filepath.Join(bin, "csifake")))
		e := newEngineEnv(t, engine, "plugins")
		t.Cleanup(e.logTasks)
		e.must(os.Symlink("data/journal", e.path("journal")))
		e.runPlugins()
		e.runUsers()
		t.Run("exec", func(t *testing.T) { e.within(t, e.exec) })
		t.Run("roll", func(t *testing.T) { e.within(t, e.roll) })
		t.Run("agent killed", func(t *testing.T) { e.within(t, e.killAgent) })
		t.Run("pull", func(t *testing.T) { e.within(t, e.pull) })
		t.Run("engine killed", func(t *testing.T) { e.within(t, e.killEngine) })
		if engine.Name == "docker" {
			t.Run("engine stopped", func(t *testing.T) { e.within(t, e.stopEngine) })
		}
		e.wantOutput(true, nil, "doctor")
		e.takeDown()
	})
}

// newEngineEnv starts an agent whose volume plugin at the engine has a name of its own.
func newEngineEnv(t *testing.T, engine *enginetest.Engine, name string) *engineEnv {
	e := &engineEnv{engine: engine, driver: fmt.Sprintf("holdfast-%s-%s-%d", engine.Name, name, os.Getpid())}
	socket := filepath.Join("/run/docker/plugins", e.driver+".sock")
	t.Cleanup(func() { _ = os.Remove(socket) })
	e.flags = []string{"--" + engine.Name + "-engine=" + engine.Host, "--volume-plugin=" + socket}
	e.agentEnv = newAgentEnv(t, e.flags...)
	return e
}

// logTasks prints what the tasks of a failed test have written.
func (e *engineEnv) logTasks() {
	files, _ := filepath.Glob(filepath.Join(e.state(), "agent/allocs/*/tasks/*/logs/*"))
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && e.t.Failed() {
			e.t.Logf("%s:\n%s", file, text[max(0, len(text)-1000):])
		}
	}
}

// within runs a check in a test of its own.
func (e *engineEnv) within(t *testing.T, check func()) {
	was := e.t
	e.t = t
	defer func() { e.t = was }()
	check()
}

// job submits a job of testdata/hcl with replacements, and waits until its container runs.
func (e *engineEnv) job(file string, replace ...string) {
	e.t.Helper()
	src, err := e.hclFile(file, append(replace, "DRIVER", e.engine.Name)...)
	e.must(err)
	if file == "engine_plugin.hcl" {
		src.Variables = map[string]string{"d": e.dir}
	}
	e.must(e.runSubmission(src))
}

// rights are what the config of a plugin's container needs.
func (e *engineEnv) rights() string {
	// dockerd makes no privileged container in a sandbox; Podman before 4.4 ignores the rules for devices of others.
	if e.engine.Name == "docker" {
		return `cap_add = ["SYS_ADMIN"]
			security_opt = ["seccomp=unconfined", "apparmor=unconfined"]
			devices = ["/dev/fuse"]`
	}
	return "privileged = true"
}

// runFake runs csifake with a further argument.
func (e *engineEnv) runFake(arg string) {
	e.t.Helper()
	e.job("engine_plugin.hcl", "NAME", "csifake", "RIGHTS", e.rights(), "ARGS",
		`"--journal=${var.d}/data/journal", "--script=${var.d}/data/script", "--state=${var.d}/data/backend",
		"--data=${var.d}/data", "--mounts", "--instance=${NOMAD_ALLOC_ID}",
		"--caps=CREATE_DELETE_VOLUME,PUBLISH_UNPUBLISH_VOLUME,STAGE_UNSTAGE_VOLUME", `+arg)
}

// createVolume creates the volume of disk.volume.hcl with replacements.
func (e *engineEnv) createVolume(replace ...string) {
	e.t.Helper()
	src, err := e.hclFile("disk.volume.hcl", replace...)
	e.must(err)
	e.must(e.retry("create a volume", func() error { return errOf(e.client.CreateVolume(e.ctx(), src)) }))
}

func (e *engineEnv) runPlugins() {
	e.t.Helper()
	e.job("engine_plugin.hcl", "NAME", "loopfs", "RIGHTS", e.rights(), "ARGS",
		`"--data=${var.d}/data/loopfs", "--backend=loop", "--node-id=n1"`)
	e.runFake(`"--mount=bind"`)
	e.createVolume(`"disk"`, `"notes"`, "fake", "loopfs", "1MiB", "32MiB", "single-node-writer",
		"single-node-multi-writer")
	e.createVolume("fake", "csifake")
}

// engineUsers are the jobs that use volumes. An attempt of them ends if the volume fails.
var engineUsers = []string{"writer", "reader", "other"}

func (e *engineEnv) runUsers() {
	e.t.Helper()
	const write, read = "while echo line >>/data/lines; do sleep 0.05; done",
		"until [ -e /data/lines ]; do sleep 0.05; done; while cat /data/lines >/dev/null; do sleep 0.05; done"
	e.job("engine_user.hcl", "NAME", "writer", "VOLUME", "notes", "SCRIPT", write)
	e.job("engine_user.hcl", "NAME", "reader", "VOLUME", "notes", "SCRIPT", read)
	e.job("engine_user.hcl", "NAME", "other", "VOLUME", "disk", "SCRIPT", write,
		"single-node-multi-writer", "single-node-writer")
	e.used()
}

// used waits until each user has written or seen more.
func (e *engineEnv) used() {
	e.t.Helper()
	size := func(job string) int64 {
		info, err := os.Stat(fmt.Sprintf("/proc/%d/root/data/lines", e.pid(job)))
		if err != nil {
			return 0
		}
		return info.Size()
	}
	for _, job := range engineUsers {
		began := size(job)
		e.waitUntil("the file of "+job+" grows", func() bool { return size(job) > began })
	}
}

// mounts are the mounts of volumes on the host with their IDs, which the kernel does not reuse soon.
func (e *engineEnv) mounts() string {
	e.t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo")
	e.must(err)
	var found []string
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], filepath.Join(e.state(), "mnt")+"/") {
			found = append(found, f[0]+" "+f[4])
		}
	}
	if len(found) < 5 { // two staged volumes, three published
		e.t.Fatalf("mounts: %q", found)
	}
	return strings.Join(found, "\n")
}

// containers are the containers of the users with their start times.
func (e *engineEnv) containers() string {
	e.t.Helper()
	args := []string{"inspect", "--format", "{{.Id}} {{.State.StartedAt}} {{.State.Running}}"}
	for _, job := range engineUsers {
		args = append(args, "holdfast-"+e.alloc(job).ID+"-use-1")
	}
	return e.engine.CLI(args...)
}

// roll replaces both plugins.
func (e *engineEnv) roll() {
	mounts, containers := e.mounts(), e.containers()
	for _, plugin := range []string{"loopfs", "csifake"} {
		old := e.alloc(plugin).ID
		e.must(errOf(e.client.RollPlugin(e.ctx(), plugin, agent.RollOptions{})))
		e.waitUntil(plugin+" is replaced", func() bool {
			was, err := e.client.Alloc(e.ctx(), old)
			return err == nil && was.State == "stopped" && e.alloc(plugin).ID != old && e.pid(plugin) != 0
		})
	}
	e.used()
	if now := e.mounts(); now != mounts {
		e.t.Errorf("mounts\n%s\nbefore the roll\n%s", now, mounts)
	}
	if now := e.containers(); now != containers {
		e.t.Errorf("containers\n%s\nbefore the roll\n%s", now, containers)
	}
}

func (e *engineEnv) killAgent() {
	mounts, containers, all := e.mounts(), e.containers(), e.engine.CLI("ps", "-q", "--no-trunc")
	_ = e.endAgent(unix.SIGKILL)
	e.must(e.startAgent(e.flags...))
	e.waitUntil("the plugins are healthy", e.healthy)
	e.used()
	if now := e.mounts(); now != mounts {
		e.t.Errorf("mounts\n%s\nbefore the kill\n%s", now, mounts)
	}
	if now := e.containers(); now != containers || e.engine.CLI("ps", "-q", "--no-trunc") != all {
		e.t.Errorf("containers\n%s\nbefore the kill\n%s", now, containers)
	}
}

func (e *engineEnv) healthy() bool {
	for _, id := range []string{"loopfs", "csifake"} {
		p, err := e.client.Plugin(e.ctx(), id)
		if err != nil || len(p.Roles) == 0 {
			return false
		}
		for _, role := range p.Roles {
			if role.Healthy == 0 {
				return false
			}
		}
	}
	return true
}

// killEngine kills the daemon and starts it again. Containers of Podman continue. The new dockerd ends the containers
// of the old one, and the agent starts their tasks again on the same mounts.
func (e *engineEnv) killEngine() {
	mounts := e.mounts()
	containers := e.containers()
	e.engine.Kill()
	e.used()
	e.engine.Start()
	if e.engine.Name == "docker" {
		e.waitUntil("the users have been started again", func() bool {
			for _, job := range engineUsers {
				if a := e.alloc(job); len(a.Tasks) != 1 || a.Tasks[0].Attempt != 2 || a.Tasks[0].PID == 0 {
					return false
				}
			}
			return true
		})
	} else if now := e.containers(); now != containers {
		e.t.Errorf("containers\n%s\nbefore the kill\n%s", now, containers)
	}
	e.waitUntil("the plugins are healthy", e.healthy)
	e.used()
	if now := e.mounts(); now != mounts {
		e.t.Errorf("mounts\n%s\nbefore the kill\n%s", now, mounts)
	}
}

// stopEngine stops dockerd and starts it again. A container that dockerd starts by itself has a volume whose plugin
// runs in a container, which can start only after dockerd has.
func (e *engineEnv) stopEngine() {
	e.engine.CLI("volume", "create", "--driver", e.driver, "-o", "plugin=csifake", "own")
	e.engine.CLI("run", "-d", "--name", "own", "--restart", "always", "--stop-signal", "KILL", "--network", "none",
		"-v", "own:/data", "loopfs", "sleep", "1000")
	e.engine.Stop()
	began := time.Now()
	e.engine.Start()
	took := time.Since(began)
	e.t.Logf("dockerd started in %v: %s", took, e.engine.CLI("inspect", "--format", "{{.State.Error}}", "own"))
	if took > time.Minute {
		e.t.Error("dockerd has waited for a plugin in its own container")
	}
	e.waitUntil("the plugins are healthy", e.healthy)
	e.must(e.retry("start the container", func() error { return errOf(e.engine.Try("start", "own")) }))
	e.used()
	e.must(e.engine.Remove("own"))
	e.must(e.retry("remove the volume", func() error { return errOf(e.engine.Try("volume", "rm", "own")) }))
}

// takeDown stops everything and deletes the volumes. Nothing may be left at the engine. agentEnv.close checks the rest.
func (e *engineEnv) takeDown() {
	e.t.Helper()
	for _, job := range engineUsers {
		e.must(e.stopJob(job))
	}
	for _, id := range []string{"notes", "disk"} {
		e.must(e.delete(id))
	}
	for _, job := range []string{"loopfs", "csifake"} {
		e.must(e.stopJob(job))
	}
	if left := e.engine.CLI("ps", "-aq"); left != "" {
		e.t.Errorf("containers are left: %s", left)
	}
}
