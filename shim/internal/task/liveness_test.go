package task

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
)

// A plugin that hangs or is gone for restart_after gets one restart request, even if the shim is restarted meanwhile.
// Without restart_after, or if the plugin recovers in time, it gets none.
func TestSickPluginIsRestartedAfterItsTime(t *testing.T) {
	hang := func(p *plugin) { p.hangs = true }
	gone := func(p *plugin) { p.up = false }
	for name, c := range map[string]struct {
		after    time.Duration
		sick     func(*plugin)
		restarts bool // of the shim
		recovers bool
		cause    registry.Cause // of the request; empty: none
	}{
		"hangs":             {2 * time.Minute, hang, false, false, registry.CauseMissed},
		"gone":              {2 * time.Minute, gone, false, false, registry.CauseGone},
		"over a restart":    {2 * time.Minute, hang, true, false, registry.CauseMissed},
		"recovers":          {2 * time.Minute, hang, false, true, ""},
		"is left alone":     {0, hang, false, false, ""},
		"at the next probe": {time.Second, hang, false, false, registry.CauseMissed},
	} {
		runInBubble(t, name, func(t *testing.T) {
			w := newEnv(t)
			task, p := w.start("plugin")
			s := spec(hooks.TypeNode)
			s.Heartbeat.RestartAfter = c.after
			stop := w.run(task, s)
			after(0)
			w.commits()
			p.set(c.sick)
			after(time.Minute) // it is unhealthy after three missed heartbeats, or at once
			w.wantHealth(name, registry.Unhealthy, w.instances()[0].Health.Cause)
			if c.restarts {
				_ = stop()
				w.restart()
				w.run(task, s)
			}
			if c.recovers {
				p.set(func(p *plugin) { p.hangs = false })
			}
			since := w.instances()[0].Health.Since
			after(time.Until(since.Add(c.after - time.Second)))
			if c.after > time.Minute && w.task(task.TaskKey).Restart != nil {
				t.Error("a restart is requested too early")
			}
			after(20 * time.Second)
			at := w.task(task.TaskKey).Restart
			if c.cause == "" && at != nil || c.cause != "" &&
				(at == nil || at.Cause != c.cause || at.Attempt != 1 ||
					!strings.HasPrefix(at.Detail, "it has been unhealthy for "+c.after.String())) {
				t.Errorf("restart: %+v", at)
			}
			w.commits()
			after(time.Hour)
			if got := w.commits(); len(got) > 0 {
				t.Errorf("afterwards: %q", got)
			}
		})
	}
}

// A task that serves FUSE mounts is not restarted while it does, or while that is not known. One event names the users,
// even if the shim is restarted. Once no alloc uses the mounts, the restart is requested. If the plugin recovers and
// becomes unhealthy again, there is another event.
func TestSickPluginKeepsTheMountsThatItServes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		served := []registry.ServedVolume{{
			Volume: registry.VolumeName{Namespace: "default", ID: "v"}, Allocs: []registry.AllocID{"a1"},
		}}
		var mu sync.Mutex // guards unknown and client
		var unknown error
		client := false // a client of a CSI endpoint also has a mount
		set := func(err error, c bool) { mu.Lock(); defer mu.Unlock(); unknown, client = err, c }
		user := registry.Alloc{ID: "a1", State: registry.AllocReady}
		w.put(user)
		w.served = func(_ context.Context, tasks []registry.PluginTask) ([]registry.PluginTask, error) {
			tasks = slices.Clone(tasks)
			tasks[0].Volumes = slices.Clone(served)
			mu.Lock()
			defer mu.Unlock()
			if client {
				tasks[0].Volumes = append(tasks[0].Volumes, registry.ServedVolume{External: "foreign"})
			}
			return tasks, unknown
		}
		task, p := w.start("plugin")
		s := spec(hooks.TypeNode)
		s.Heartbeat.RestartAfter = time.Minute
		stop := w.run(task, s)
		after(0)
		for range 2 {
			w.commits()
			p.set(func(p *plugin) { p.hangs = true })
			after(10 * time.Minute)
			w.wantCommits("while it hangs", nodeUnhealthy(registry.CauseMissed), "restart withheld (heartbeats missed)")
			p.set(func(p *plugin) { p.hangs = false })
			after(time.Minute)
		}
		p.set(func(p *plugin) { p.hangs = true })
		after(10 * time.Minute)
		_ = w.log.View(t.Context(), func(v registry.View) error {
			events, _ := v.Events(0, 1000)
			if text := events[len(events)-1].Detail; !strings.Contains(text, "of volume v for alloc a1") {
				t.Errorf("the event says %q", text)
			}
			return nil
		})
		_ = stop()
		w.commits()
		w.restart()
		w.run(task, s)
		after(10 * time.Minute)
		w.wantCommits("in the next shim")
		set(errors.New("no mount table"), false)
		user.State = registry.AllocReleasing
		w.put(user)
		after(time.Minute)
		w.wantCommits("while the mounts are not known")
		set(nil, true)
		after(time.Minute)
		w.wantCommits("while a client of an endpoint uses a mount")
		set(nil, false)
		after(time.Minute)
		w.wantCommits("once its user is being released", "restart asked (heartbeats missed)")
	})
}
