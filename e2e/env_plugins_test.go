package e2e

import (
	"fmt"
	"path/filepath"
	"slices"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// Capabilities of plugins.
var (
	allCaps    = []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE_VOLUME"}
	expandCaps = append([]string{"EXPAND_VOLUME", "expansion/ONLINE"}, allCaps...)
)

// pluginTask is a plugin that runs as a task.
type pluginTask struct {
	*csifake.Plugin
	task host.AllocTask
}

// addPlugin starts a plugin's task as an orchestrator does, and waits until it is registered.
func (e *env) addPlugin(alloc string, role csifake.Role) *pluginTask {
	e.t.Helper()
	p := e.startPlugin(alloc, role, 1)
	e.waitRegistered(alloc)
	return p
}

func (e *env) startPlugin(alloc string, role csifake.Role, attempt uint64) *pluginTask {
	e.t.Helper()
	task, endpoint := e.preparePlugin(alloc, role, attempt, e.pluginBlocks)
	p := e.servePlugin(task, role, endpoint)
	if e.onStart != nil {
		e.onStart(p.Plugin)
	}
	e.must(e.host.TaskStarted(e.ctx(), task.Key(), attempt))
	return p
}

// pluginText is a task with a csi_plugin block. more is further lines of the block.
func pluginText(id string, role csifake.Role, more string) string {
	return fmt.Sprintf("task \"plugin\" {\n driver = \"raw_exec\"\n csi_plugin {\n id = %q\n type = %q\n%s }\n}\n", id,
		role, more)
}

// preparePlugin announces the start of a plugin's task to the host.
func (e *env) preparePlugin(alloc string, role csifake.Role, attempt uint64, more string) (host.AllocTask, string) {
	e.t.Helper()
	text := pluginText("fake", role, "heartbeat {\n "+e.heartbeat+"\n }\n"+more)
	job, _, err := e.host.Parse(e.ctx(), host.Source{Name: "plugin.hcl", Text: []byte(text)}, host.ParseOptions{})
	e.must(err)
	task := host.AllocTask{Alloc: host.AllocID(alloc), Task: "plugin", Attempt: attempt,
		Sealed: job.Groups[0].Tasks[0].Sealed}
	plan, err := e.host.TaskStarting(e.ctx(), task)
	e.must(err)
	return task, planEnv(plan, "CSI_ENDPOINT")
}

// planEnv returns a variable of a plan.
func planEnv(plan host.Plan, name string) string {
	for _, v := range plan.Env {
		if v.Name == name {
			return v.Value
		}
	}
	return ""
}

// servePlugin runs the plugin of a task.
func (e *env) servePlugin(task host.AllocTask, role csifake.Role, endpoint string) *pluginTask {
	e.t.Helper()
	return &pluginTask{csifake.Start(e.t, csifake.Config{
		Role: role, Caps: e.caps, Spec: e.spec, Socket: csifake.SocketPath(endpoint), Journal: e.journal,
		Backend: e.backend,
		NodeID:  e.nodeID,
		Mounts:  true,
		DataDir: filepath.Join(e.dir, "data"), Instance: string(task.Alloc),
		VolumeContext: map[string]string{"pool": "p"}, PublishContext: map[string]string{"lun": "7"},
	}), task}
}

// waitRegistered waits until the alloc's instances are healthy.
func (e *env) waitRegistered(alloc string) {
	e.t.Helper()
	e.waitEvent(func(event host.Event) bool { return event.Kind == "task registered" && string(event.Alloc) == alloc })
}

// stopPlugin ends a plugin's task in order.
func (e *env) stopPlugin(p *pluginTask) {
	e.t.Helper()
	p.Stop()
	e.must(e.host.TaskExited(e.ctx(), p.task.Key(), p.task.Attempt, 0, 0, true))
}

// killPlugin kills the plugin and reports its exit.
func (e *env) killPlugin(p *pluginTask) {
	e.t.Helper()
	p.Kill()
	e.must(e.host.TaskExited(e.ctx(), p.task.Key(), p.task.Attempt, 0, 9, false))
}

// restartPlugin kills the plugin and starts its task again.
func (e *env) restartPlugin(p *pluginTask, role csifake.Role) *pluginTask {
	e.t.Helper()
	e.killPlugin(p)
	next := e.startPlugin(string(p.task.Alloc), role, p.task.Attempt+1)
	e.waitUntil("the plugin is healthy again", func() bool {
		list, _, err := e.host.Plugins(e.ctx(), host.PluginQuery{})
		return err == nil && len(list.Instances) > 0 &&
			!slices.ContainsFunc(list.Instances, func(i host.Instance) bool {
				return i.Alloc == p.task.Alloc && (i.Attempt != next.task.Attempt || i.Health.State != host.Healthy)
			})
	})
	return next
}

// addUnservedPlugin starts a plugin's task in which nothing serves.
func (e *env) addUnservedPlugin(alloc string) host.AllocTask {
	e.t.Helper()
	task, _ := e.preparePlugin(alloc, csifake.Monolith, 1, "health_timeout = \"1s\"\n")
	e.must(e.host.TaskStarted(e.ctx(), task.Key(), 1))
	return task
}

// waitRestartRequest waits until the shim asks for a restart of the task.
func (e *env) waitRestartRequest(task host.AllocTask) {
	e.t.Helper()
	var q host.PluginQuery
	for {
		list, at, err := e.host.Plugins(e.ctx(), q)
		if err != nil {
			e.t.Errorf("no restart of %s is requested: %v", task.Key(), err)
			return
		}
		if slices.ContainsFunc(list.Tasks, func(t host.PluginTask) bool {
			return t.TaskKey == task.Key() && t.Restart != nil && t.Restart.Attempt == task.Attempt
		}) {
			return
		}
		q.MinIndex = at
	}
}
