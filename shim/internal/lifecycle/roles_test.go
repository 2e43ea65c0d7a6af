package lifecycle

import (
	"testing"
	"time"

	"holdfast/config"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// A controller of a plugin is expected while a task for it is known, in any phase, or while it has an instance.
func TestControllerIsExpectedWhileItsTaskIsKnown(t *testing.T) {
	task := func(role string, phase registry.TaskPhase) registry.Task {
		text := "task \"t\" {\n driver = \"raw_exec\"\n csi_plugin {\n id = \"disk\"\n type = \"" + role + "\"\n }\n}\n"
		job, diags := config.ParseJob(config.Source{Name: "t.hcl", Text: []byte(text)}, config.Options{})
		must(t, diags.Err())
		return registry.Task{TaskKey: registry.TaskKey{Alloc: "a", Task: "t"}, Attempt: 1, Phase: phase,
			Sealed: job.Groups[0].Tasks[0].Sealed}
	}
	instance := registry.Instance{InstanceKey: registry.InstanceKey{Role: registry.RoleController, Plugin: "disk",
		Alloc: "a", Task: "t"}}
	for what, c := range map[string]struct {
		record registry.Record
		want   bool
	}{
		"a controller that has exited": {task("controller", registry.TaskExited), true},
		"a monolith that starts":       {task("monolith", registry.TaskStarting), true},
		"a node":                       {task("node", registry.TaskRunning), false},
		"an instance":                  {instance, true},
		"a task that cannot be opened": {registry.Task{TaskKey: registry.TaskKey{Alloc: "a", Task: "t"},
			Sealed: []byte("{}")}, false},
	} {
		log := registrytest.NewLog(time.Now)
		registrytest.Put(t, log, c.record)
		must(t, log.View(t.Context(), func(v registry.View) error {
			if got := expectsPlugin(v, registry.RoleController, "disk"); got != c.want {
				t.Errorf("%s: %v", what, got)
			}
			if expectsPlugin(v, registry.RoleController, "other") {
				t.Errorf("%s: another plugin's", what)
			}
			return nil
		}))
	}
}
