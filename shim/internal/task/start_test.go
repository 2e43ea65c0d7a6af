package task

import (
	"errors"
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

func TestListVolumesOptionIsRegistered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, _ := w.start("plugin")
		off := spec(hooks.TypeMonolith)
		off.NoListVolumes = true
		stop := w.run(task, off)
		after(time.Minute)
		for _, in := range w.instances() {
			if in.Options[registry.OptionListVolumes] != registry.OptionOff {
				t.Errorf("instance is %+v", in)
			}
		}
		if len(w.instances()) != 2 {
			t.Errorf("%d instances", len(w.instances()))
		}
		_ = stop()
	})
}

func TestPluginThatIsNotReadyYetIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, p := w.start("plugin")
		p.set(func(p *plugin) { p.ready = false })
		stop := w.run(task, spec(hooks.TypeNode))
		after(20 * time.Second)
		w.wantCommits("while it starts")
		p.set(func(p *plugin) { p.ready = true })
		after(retryMost)
		w.wantCommits("once it is ready", nodeStarts)
		_ = stop()
	})
}

// The health timeout counts from the start of the task, not of its supervision. One restart is asked for.
func TestHealthTimeoutFromTaskStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, p := w.start("plugin")
		p.set(func(p *plugin) { p.ready = false })
		after(12 * time.Second)
		stop := w.run(task, spec(hooks.TypeNode))
		after(18*time.Second - 1)
		w.wantCommits("a moment before the timeout")
		after(1)
		w.wantCommits("at the timeout", asksRestart)
		r := w.task(task.TaskKey).Restart
		if r == nil || r.Attempt != 1 || r.Cause != registry.CauseStartTimeout ||
			!strings.Contains(r.Detail, "not ready") {
			t.Fatalf("request is %+v", r)
		}
		p.set(func(p *plugin) { p.ready = true })
		after(24 * time.Hour)
		w.wantCommits("afterwards")
		if again := w.task(task.TaskKey).Restart; again == nil || *again != *r || len(w.instances()) != 0 {
			t.Errorf("request is %+v, was %+v", again, r)
		}
		_ = stop()
	})
}

// A new shim continues the health timeout of the old one, and does not ask twice.
func TestHealthTimeoutOverRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, p := w.start("plugin")
		p.set(func(p *plugin) { p.up = false })
		for range 3 {
			stop := w.run(task, spec(hooks.TypeNode))
			after(9 * time.Second)
			_ = stop()
			w.restart()
			after(time.Second / 2)
		}
		w.wantCommits("28.5 s after the start")
		stop := w.run(task, spec(hooks.TypeNode))
		after(1500*time.Millisecond - 1)
		w.wantCommits("a moment before the timeout")
		after(1)
		w.wantCommits("at the timeout", asksRestart)
		_ = stop()
		w.restart()
		p.set(func(p *plugin) { p.up = true })
		probes, _ := p.seen()
		stop = w.run(task, spec(hooks.TypeNode))
		after(time.Hour)
		w.wantCommits("the shim after that")
		if now, _ := p.seen(); len(now) != len(probes) {
			t.Errorf("a plugin that is to be restarted was probed %d times", len(now)-len(probes))
		}
		_ = stop()
	})
}

// No shim may have run while the plugin became healthy.
func TestLateShimProbesBeforeItAsksForARestart(t *testing.T) {
	for _, c := range []struct {
		name string
		up   bool
		want string
	}{{"healthy", true, nodeStarts}, {"gone", false, asksRestart}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newEnv(t)
				task, p := w.start("plugin")
				p.set(func(p *plugin) { p.up = c.up })
				after(time.Hour)
				stop := w.run(task, spec(hooks.TypeNode))
				after(hooks.DefaultHeartbeatTimeout)
				w.wantCommits(c.name, c.want)
				_ = stop()
			})
		})
	}
}

// The start was recorded by the clock of another boot.
func TestHealthTimeoutBeginsAnewAfterABoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, p := w.start("plugin")
		p.set(func(p *plugin) { p.up = false })
		w.boot = "boot-2"
		after(time.Hour)
		stop := w.run(task, spec(hooks.TypeNode))
		after(hooks.DefaultHealthTimeout - 1)
		w.wantCommits("before the timeout")
		after(1)
		w.wantCommits("at the timeout", asksRestart)
		_ = stop()
	})
}

// The host has reported a newer attempt meanwhile.
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

func TestPluginThatDoesNotDescribeItselfIsRestarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, p := w.start("plugin")
		p.set(func(p *plugin) { p.unknown = errors.New("NodeGetInfo: node id is empty") })
		stop := w.run(task, spec(hooks.TypeNode))
		after(hooks.DefaultHealthTimeout)
		w.wantCommits("at the timeout", "task unhealthy (wrong identity), restart asked (wrong identity)")
		if r := w.task(task.TaskKey).Restart; r == nil || r.Cause != registry.CauseIdentity ||
			!strings.Contains(r.Detail, "node id is empty") {
			t.Errorf("request is %+v", r)
		}
		_ = stop()
	})
}

// A plugin that hangs has one probe at a time, each with its deadline.
func TestHangingProbeDelaysNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		stuck, p := w.start("stuck")
		p.set(func(p *plugin) { p.hangs = true })
		stopStuck := w.run(stuck, spec(hooks.TypeNode))
		after(0)
		task, _ := w.start("plugin")
		stop := w.run(task, spec(hooks.TypeController))
		after(0)
		w.wantCommits("the other", nodeStarts)
		after(hooks.DefaultHealthTimeout)
		w.wantCommits("the one that hangs", asksRestart)
		probes, _ := p.seen()
		for i := range len(probes) - 1 {
			if gap := probes[i+1].Sub(probes[i]); gap < hooks.DefaultHeartbeatTimeout ||
				gap > hooks.DefaultHeartbeatTimeout+retryMost {
				t.Errorf("probe %d comes %v after the one before it", i+1, gap)
			}
		}
		if p.atOnce != 1 || len(probes) < 5 {
			t.Errorf("%d probes, %d at a time", len(probes), p.atOnce)
		}
		if r := w.task(stuck.TaskKey).Restart; r == nil || !strings.Contains(r.Detail, "deadline") {
			t.Errorf("request is %+v", r)
		}
		_, _ = stop(), stopStuck()
	})
}

// A full disk delays a registration or a restart request, and does nothing else.
func TestFullDiskDelaysRegistration(t *testing.T) {
	full := registry.Errorf(registry.ErrExhausted, "disk full")
	for _, c := range []struct {
		name string
		up   bool
		want string
	}{{"registration", true, nodeStarts}, {"request", false, asksRestart}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newEnv(t)
				task, p := w.start("plugin")
				p.set(func(p *plugin) { p.up = c.up })
				w.log.Fail(full)
				stop := w.run(task, spec(hooks.TypeNode))
				after(hooks.DefaultHealthTimeout + 2*retryMost)
				w.wantCommits(c.name, c.want)
				w.log.Fail(full)
				p.set(func(p *plugin) { p.up = false })
				after(2 * retryMost)
				if c.up {
					w.wantCommits("its end", nodeUnhealthy(registry.CauseGone))
				}
				_ = stop()
			})
		})
	}
}

// The shim ends then, and starts from what is on disk.
func TestUncertainCommitEndsSupervision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, _ := w.start("plugin")
		w.log.Lose(true)
		stop := w.run(task, spec(hooks.TypeNode))
		after(0)
		if err := stop(); !errors.Is(err, registry.ErrUncertain) {
			t.Errorf("Run returned %v", err)
		}
	})
}

// Run returns at once, with everything that it started, and does not change the table.
func TestSupervisionEndsWithItsContext(t *testing.T) {
	for name, prepare := range map[string]func(p *plugin) time.Duration{
		"waiting for the socket": func(p *plugin) time.Duration { p.up = false; return 3 * time.Second },
		"in a probe":             func(p *plugin) time.Duration { p.hangs = true; return time.Second },
		"beating":                func(*plugin) time.Duration { return 25 * time.Second },
		"restart asked":          func(p *plugin) time.Duration { p.ready = false; return time.Minute },
		"in a full disk's way":   func(p *plugin) time.Duration { return -1 },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newEnv(t)
				task, p := w.start("plugin")
				var d time.Duration
				p.set(func(p *plugin) { d = prepare(p) })
				if d < 0 {
					w.log.Fail(registry.Errorf(registry.ErrExhausted, "disk full"))
				}
				stop := w.run(task, spec(hooks.TypeNode))
				after(max(d, 0))
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
		})
	}
}

func TestSpecWithoutTimesGetsDefaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newEnv(t)
		task, p := w.start("plugin")
		stop := w.run(task, hooks.PluginSpec{ID: "disk", Type: hooks.TypeNode})
		after(time.Hour)
		w.wantCommits("an hour", nodeStarts)
		probes, _ := p.seen()
		if want := int(time.Hour/hooks.DefaultHeartbeatInterval) + 1; len(probes) != want {
			t.Errorf("%d probes, want %d", len(probes), want)
		}
		_ = stop()
	})
}
