package host_test

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/registry"
)

// restart waits until a restart of the attempt is requested.
func (w *env) restart(attempt uint64) (requested host.PendingRestart) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.ctx())
	defer cancel()
	_ = w.host.Restarts(ctx, func(list []host.PendingRestart) error {
		for _, r := range list {
			if r.Attempt == attempt {
				requested = r
				cancel()
			}
		}
		return nil
	})
	if requested.Attempt != attempt {
		w.t.Fatalf("no restart of attempt %d is requested", attempt)
	}
	return requested
}

// health waits until an instance of the plugin has that health.
func (w *env) health(want registry.HealthState) registry.Health {
	w.t.Helper()
	for ; ; time.Sleep(time.Millisecond) {
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
			w := openLongBake(t)
			task := w.task("a")
			p := w.attempt(task, 1)
			w.health(registry.Healthy)
			if reopened {
				w.config.Workload = host.Workload{Tasks: []host.WorkloadTask{{AllocTask: task, Running: true}}}
				must(t, w.host.Close())
			}
			out, err := exec.Command("rm", "-rf", "--one-file-system", w.config.RunDir).CombinedOutput()
			if left, _ := filepath.Glob(filepath.Join(w.config.RunDir, "*")); len(left) > 0 { // it is a mount point
				t.Fatalf("%v, %s: %q are left", err, out, left)
			}
			if reopened {
				w.open()
			}
			if r := w.restart(1); !strings.Contains(r.Detail, "was removed") {
				t.Errorf("requested: %+v", r)
			}
			if h := w.health(registry.Unhealthy); h.Cause != registry.CauseGone &&
				!strings.Contains(h.Detail, "csi.sock was removed") {
				t.Errorf("%+v", h)
			}
			p.Stop()
			must(t, w.host.TaskExited(w.ctx(), task.Key(), 1, 0, 15, false))
			w.attempt(task, 2)
			w.health(registry.Healthy)
			must(t, w.create("one", ""))
			if report, err := w.host.Swap(w.ctx(), host.Binary{Path: another(t, w.dir, "next")}); err != nil {
				t.Errorf("swap: %v, %+v", err, report)
			}
			w.kill()
			w.health(registry.Healthy)
		})
	}
}
