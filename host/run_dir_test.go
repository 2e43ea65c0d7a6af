package host_test

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

// quickTask returns a plugin's task with a heartbeat of 100 ms.
func (w *env) quickTask(alloc string) host.AllocTask {
	w.t.Helper()
	text := `task "plugin" {
		driver = "raw_exec"
		csi_plugin {
			id   = "fake"
			type = "monolith"
			heartbeat {
				interval = "100ms"
			}
		}
	}`
	job, _, err := w.host.Parse(w.ctx(), host.Source{Name: "plugin.hcl", Text: []byte(text)}, host.ParseOptions{})
	must(w.t, err)
	return host.AllocTask{Alloc: host.AllocID(alloc), Task: "plugin", Attempt: 1, Sealed: job.Groups[0].Tasks[0].Sealed}
}

// attempt runs a plugin in this process as an attempt of the task, until it is stopped.
func (w *env) attempt(task host.AllocTask, n uint64) *csifake.Plugin {
	w.t.Helper()
	task.Attempt = n
	plan, err := w.host.TaskStarting(w.ctx(), task)
	must(w.t, err)
	p := csifake.Start(w.t, csifake.Config{
		Caps: []string{"CREATE_DELETE_VOLUME"}, Socket: csifake.SocketPath(endpoint(plan)), Blind: true,
		Journal: csifake.NewJournal(w.t, journal.Options{}),
	})
	must(w.t, w.host.TaskStarted(w.ctx(), task.Key(), n))
	return p
}

// restartAsked waits until a restart of the attempt is requested.
func (w *env) restartAsked(attempt uint64) (asked host.PendingRestart) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.ctx())
	defer cancel()
	_ = w.host.Restarts(ctx, func(list []host.PendingRestart) error {
		for _, r := range list {
			if r.Attempt == attempt {
				asked = r
				cancel()
			}
		}
		return nil
	})
	if asked.Attempt != attempt {
		w.t.Fatalf("no restart of attempt %d is asked for", attempt)
	}
	return asked
}

// health waits until an instance of the plugin has that health.
func (w *env) health(want registry.HealthState) registry.Health {
	w.t.Helper()
	for {
		list, _, err := w.host.Plugins(w.ctx(), host.PluginQuery{})
		must(w.t, err)
		for _, i := range list.Instances {
			if i.Health.State == want {
				return i.Health
			}
		}
	}
}

// The run directory is removed while a plugin and the shim run, or while no host does. The plugin is unhealthy, with
// the reason, and a restart of its task is requested. The next attempt is healthy, and the shim can be swapped and
// restarted.
func TestSweptRunDirectoryIsRecreated(t *testing.T) {
	t.Parallel()
	for _, reopened := range []bool{false, true} {
		t.Run(fmt.Sprintf("reopened %t", reopened), func(t *testing.T) {
			t.Parallel()
			w := newEnv(t)
			w.config.Bake = patience
			w.open()
			task := w.quickTask("a")
			p := w.attempt(task, 1)
			w.health(registry.Healthy)
			if reopened {
				w.config.Workload = host.Workload{Tasks: []host.WorkloadTask{{AllocTask: task, Running: true}}}
				must(t, w.host.Close())
			}
			out, err := exec.Command("rm", "-rf", "--one-file-system", w.config.RunDir).CombinedOutput()
			if left, _ := filepath.Glob(filepath.Join(w.config.RunDir, "*")); len(
				left,
			) > 0 { // the directory itself is a mount point
				t.Fatalf("%v, %s: %q are left", err, out, left)
			}
			if reopened {
				w.open()
			}
			if asked := w.restartAsked(1); !strings.Contains(asked.Detail, "was removed") {
				t.Errorf("asked for %+v", asked)
			}
			if h := w.health(registry.Unhealthy); h.Cause != registry.CauseGone &&
				!strings.Contains(h.Detail, "csi.sock was removed") {
				t.Errorf("%+v", h)
			}
			p.Stop()
			must(t, w.host.TaskExited(w.ctx(), task.Key(), 1, 0, 15, false))
			second := w.attempt(task, 2)
			w.health(registry.Healthy)
			if err := w.create("one", ""); err != nil {
				t.Error(err)
			}
			if report, err := w.host.Swap(w.ctx(), host.Binary{Path: another(t, w.dir, "next")}); err != nil {
				t.Errorf("swap: %v, %+v", err, report)
			}
			w.kill()
			w.health(registry.Healthy)
			second.Stop()
			must(t, w.host.TaskExited(w.ctx(), task.Key(), 2, 0, 15, true))
			must(t, w.host.Close())
		})
	}
}
