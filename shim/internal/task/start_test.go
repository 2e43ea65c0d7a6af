package task

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
)

// All roles and the events of the task are one commit.
func TestHealthyStartRegistersAllRolesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, _ := w.start("plugin")
		stop := w.run(task, spec(hooks.TypeMonolith))
		after(0)
		w.wantCommits("start", monolithStarts)
		all := w.instances()
		if len(all) != 2 || all[0].CreateIndex != all[1].CreateIndex {
			t.Fatalf("instances are %+v", all)
		}
		for i, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
			in := all[i]
			if in.Role != role || in.Plugin != "disk" || in.TaskKey() != task.TaskKey || in.Attempt != 1 ||
				in.Endpoint != task.Endpoint ||
				in.Volumes != task.Volumes || in.Fingerprint.NodeID != registry.NodeID("node of "+role) ||
				in.Fingerprint.Version != "1" {
				t.Errorf("instance is %+v", in)
			}
		}
		w.wantHealth("start", registry.Healthy, registry.CauseProbed)
		if err := stop(); !errors.Is(err, errStopped) {
			t.Errorf("Run returned %v", err)
		}
		if len(w.instances()) != 2 || w.fleet.open != 0 {
			t.Errorf("after the end: %d instances, %d connections", len(w.instances()), w.fleet.open)
		}
	})
}

// A plugin that becomes ready in time, or while no shim runs, is registered. Fields that its spec lacks get their
// defaults.
func TestPluginThatIsNotReadyYetIsAwaited(t *testing.T) {
	for _, late := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newEnv(t)
			task, p := w.start("plugin")
			p.set(func(p *plugin) { p.ready = late })
			if late {
				after(time.Hour)
			}
			w.run(task, hooks.PluginSpec{ID: "disk", Type: hooks.TypeNode, NoListVolumes: true})
			if !late {
				after(20 * time.Second)
				w.wantCommits("while it starts", "problem: the plugin answers that it is not ready")
				p.set(func(p *plugin) { p.ready = true })
			}
			after(retryMost)
			w.wantCommits("once it is ready", nodeStarts)
			if got := w.task(task.TaskKey).Problem; got != "" {
				t.Errorf("once it is ready its problem is %q", got)
			}
			for _, in := range w.instances() {
				if in.Options[registry.OptionListVolumes] != registry.OptionOff {
					t.Errorf("instance is %+v", in)
				}
			}
			probes, _ := p.seen()
			after(time.Hour)
			now, _ := p.seen()
			if got, want := len(now)-len(probes), int(time.Hour/hooks.DefaultHeartbeatInterval); got != want {
				t.Errorf("%d probes in an hour, want %d", got, want)
			}
		})
	}
}

// The reason why a plugin does not start is recorded before the health timeout: each change once, and at most one per
// second.
func TestProblemOfAStartIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, p := w.start("plugin")
		p.set(func(p *plugin) { p.up = false })
		w.run(task, spec(hooks.TypeNode))
		after(problemEvery - 1)
		w.wantCommits("a start that may be usual")
		after(2 * startRetry)
		w.wantCommits("after a second", "problem: "+errRefused.Error())
		for i := range 4 {
			p.set(func(p *plugin) { p.up, p.unknown = true, fmt.Errorf("bad name %d", i) })
			after(startRetry)
		}
		after(problemEvery)
		w.wantCommits("in the next two seconds", "problem: bad name 3")
		after(hooks.DefaultHealthTimeout)
		w.wantCommits("at the timeout", "task unhealthy (wrong identity), restart asked (wrong identity)")
	})
}

// The health timeout counts from the start of the task, over restarts of the shim. After a reboot it begins again. When
// it ends, one restart is requested, and the plugin is not probed any more.
func TestHealthTimeoutOverRestart(t *testing.T) {
	gone := func(p *plugin) { p.up = false }
	for name, c := range map[string]struct {
		sick   func(*plugin)
		shown  string        // problem
		before time.Duration // from the start of the task to that of the last shim
		shims  int           // number of earlier shims, each running for 9 s
		boot   string
		left   time.Duration // of the timeout
		cause  registry.Cause
	}{
		"not ready": {func(p *plugin) { p.ready = false }, "the plugin answers that it is not ready", 12 * time.Second,
			0, "boot-1", 18 * time.Second, registry.CauseStartTimeout},
		"no identity": {func(p *plugin) { p.unknown = errors.New("node id is empty") }, "node id is empty", 0, 0,
			"boot-1", hooks.DefaultHealthTimeout, registry.CauseIdentity},
		"several shims": {gone, errRefused.Error(), 0, 3, "boot-1", 3 * time.Second, registry.CauseStartTimeout},
		"late shim": {gone, errRefused.Error(), time.Hour, 0, "boot-1", hooks.DefaultHeartbeatTimeout,
			registry.CauseStartTimeout},
		"reboot": {gone, errRefused.Error(), time.Hour, 0, "boot-2", hooks.DefaultHealthTimeout,
			registry.CauseStartTimeout},
	} {
		runInBubble(t, name, func(t *testing.T) {
			w := newEnv(t)
			task, p := w.start("plugin")
			p.set(c.sick)
			w.boot = c.boot
			for range c.shims {
				stop := w.run(task, spec(hooks.TypeNode))
				after(9 * time.Second)
				_ = stop()
				w.restart()
			}
			after(c.before)
			stop := w.run(task, spec(hooks.TypeNode))
			after(c.left - 1)
			w.wantCommits("before the timeout", "problem: "+c.shown)
			after(1)
			w.wantCommits("at the timeout",
				fmt.Sprintf("task unhealthy (%s), restart asked (%s)", c.cause, c.cause))
			if r := w.task(task.TaskKey).Restart; r == nil || r.Attempt != 1 || r.Cause != c.cause {
				t.Errorf("request is %+v", r)
			}
			p.set(func(p *plugin) { p.up, p.ready, p.unknown = true, true, nil })
			probes, _ := p.seen()
			after(24 * time.Hour)
			_ = stop()
			w.restart()
			w.run(task, spec(hooks.TypeNode))
			after(time.Hour)
			w.wantCommits("afterwards")
			if now, _ := p.seen(); len(now) != len(probes) {
				t.Errorf("a plugin that is to be restarted was probed %d times", len(now)-len(probes))
			}
		})
	}
}

// The host has reported a newer attempt while the plugin started.
func TestOldAttemptNeitherRegistersNorAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, p := w.start("plugin")
		newer := task
		newer.Attempt = 2
		w.put(newer)
		p.set(func(p *plugin) { p.up = false })
		stop := w.run(task, spec(hooks.TypeNode))
		after(time.Hour)
		w.wantCommits("an old attempt")
		_ = stop()
		p.set(func(p *plugin) { p.up = true })
		task.Started = w.bootTime()
		stop = w.run(task, spec(hooks.TypeNode))
		after(time.Hour)
		w.wantCommits("an old attempt that is healthy")
		if err := stop(); !errors.Is(err, registry.ErrConflict) {
			t.Errorf("Run returned %v", err)
		}
	})
}

// A plugin that hangs has one probe at a time, each with its deadline.
func TestHangingProbeDelaysNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		stuck, p := w.start("stuck")
		p.set(func(p *plugin) { p.hangs = true })
		w.run(stuck, spec(hooks.TypeNode))
		after(0)
		task, _ := w.start("plugin")
		w.run(task, spec(hooks.TypeController))
		after(0)
		w.wantCommits("the other", nodeStarts)
		after(hooks.DefaultHealthTimeout)
		w.wantCommits("the one that hangs", "problem: context deadline exceeded", asksRestart)
		probes, _ := p.seen()
		if p.atOnce != 1 || len(probes) < 5 {
			t.Errorf("%d probes, %d at a time", len(probes), p.atOnce)
		}
		if r := w.task(stuck.TaskKey).Restart; r == nil || !strings.Contains(r.Detail, "deadline") {
			t.Errorf("request is %+v", r)
		}
	})
}

// A full disk delays a registration, a problem or a restart request. It has no other effect.
func TestFullDiskDelaysRegistration(t *testing.T) {
	full := registry.Errorf(registry.ErrExhausted, "disk full")
	for _, c := range []struct {
		name string
		up   bool
		want string
	}{{"registration", true, nodeStarts}, {"request", false, asksRestart}} {
		runInBubble(t, c.name, func(t *testing.T) {
			w := newEnv(t)
			task, p := w.start("plugin")
			p.set(func(p *plugin) { p.up = c.up })
			w.log.Fail(full)
			w.run(task, spec(hooks.TypeNode))
			if !c.up {
				after(3 * problemEvery)
				w.wantCommits("the problem", "problem: "+errRefused.Error())
				w.log.Fail(full)
			}
			after(hooks.DefaultHealthTimeout + 2*retryMost)
			w.wantCommits(c.name, c.want)
			w.log.Fail(full)
			p.set(func(p *plugin) { p.up = false })
			after(2 * retryMost)
			if c.up {
				w.wantCommits("its end", nodeUnhealthy(registry.CauseGone))
			}
		})
	}
}

// Run returns at once when its context ends. All that it has started has ended then, and the table is unchanged.
func TestSupervisionEndsWithItsContext(t *testing.T) {
	for name, prepare := range map[string]func(*plugin){
		"waiting for the socket": func(p *plugin) { p.up = false },
		"in a probe":             func(p *plugin) { p.hangs = true },
		"beating":                func(*plugin) {},
	} {
		runInBubble(t, name, func(t *testing.T) {
			w := newEnv(t)
			task, p := w.start("plugin")
			p.set(prepare)
			stop := w.run(task, spec(hooks.TypeNode))
			after(time.Second)
			before := len(w.instances())
			w.commits()
			began := time.Now()
			if err := stop(); !errors.Is(err, errStopped) || time.Since(began) != 0 {
				t.Errorf("Run returned %v after %v", err, time.Since(began))
			}
			w.wantCommits("the end")
			if len(w.instances()) != before || w.fleet.open != 0 {
				t.Errorf("%d instances, were %d; %d connections", len(w.instances()), before, w.fleet.open)
			}
		})
	}
}
