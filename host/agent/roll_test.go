package agent

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/registry"
)

// pluginJobOf is pluginJob with a command, so that tests can change the job.
func pluginJobOf(command string, mode hooks.RollMode) *hooks.Job {
	p := plugin("disk")
	p.Config, _ = json.Marshal(map[string]string{"command": command})
	p.Roll = mode
	return job("disk", "system", tasks("g", p))
}

// use lets set change what the shim reports about the plugin task of this alloc, and of no other; nil: of none.
func (e *env) use(r *AllocRecord, set func(*host.PluginTask)) {
	e.setShim(func(s *fakeShim) {
		s.use = func(t *host.PluginTask) {
			if r != nil && t.Alloc == r.ID {
				set(t)
			}
		}
	})
}

// calls and serves say what a plugin task is used for: a call, or a mount of volume data for the allocs.
func calls(t *host.PluginTask) { t.Calls = 1 }

func serves(users ...host.AllocID) func(*host.PluginTask) {
	return func(t *host.PluginTask) {
		t.Volumes = []registry.ServedVolume{{Volume: registry.VolumeName{ID: "data"}, Allocs: users}}
	}
}

// awaitNew waits for the new alloc of a roll of the job.
func (e *env) awaitNew(job string) *AllocRecord {
	e.Helper()
	return e.awaitAlloc(job, "new", func(r *AllocRecord) bool {
		return r.Version == 2 && r.State == AllocRunning && r.Tasks["plugin"].State == TaskRunning
	})
}

// runTwoJobs runs the plugin in the jobs "controller" and "node".
func (e *env) runTwoJobs() (controller, node *AllocRecord) {
	e.Helper()
	for _, id := range []string{"controller", "node"} {
		e.submit(job(id, "system", tasks("g", plugin("disk"))))
		e.awaitRunning(id)
	}
	return e.awaitRunning("controller"), e.awaitRunning("node")
}

// rollTwoJobs begins a roll of the plugin of runTwoJobs. The new allocs run, and are not healthy yet.
func (e *env) rollTwoJobs() (controller, node *AllocRecord) {
	e.Helper()
	time.Sleep(time.Second) // the new allocs are newer
	e.setShim(func(s *fakeShim) { s.sick = true })
	_, err := e.agent.RollPlugin(e.Context(), "disk", e.shim, RollOptions{})
	e.must(err)
	return e.awaitNew("controller"), e.awaitNew("node")
}

// setSick sets which plugin tasks are not healthy.
func (e *env) setSick(sick ...*AllocRecord) {
	e.setShim(func(s *fakeShim) {
		for i, p := range s.plugins {
			s.plugins[i].sick = slices.ContainsFunc(sick, func(r *AllocRecord) bool { return r.ID == p.key.Alloc })
		}
	})
}

// roll returns the state of the job's roll.
func (e *env) roll(job string) RollState {
	j := e.agent.job(job)
	if j == nil || j.Roll == nil {
		return ""
	}
	return j.RollState()
}

func (e *env) awaitRoll(state RollState) {
	e.Helper()
	e.await("roll "+string(state), func([]*AllocRecord) bool { return e.roll("disk") == state })
}

func (e *env) rollPlugin(o RollOptions) {
	e.Helper()
	ids, err := e.agent.RollPlugin(e.Context(), "disk", e.shim, o)
	e.must(err)
	if strings.Join(ids, " ") != "disk" {
		e.Errorf("jobs %q are rolled", ids)
	}
}

// The new instance starts beside the old one. The old one is stopped once nothing needs it. If the agent dies
// meanwhile, the next one continues.
func TestRollStartsBesideTheOldInstance(t *testing.T) {
	for name, begin := range map[string]func(*env){
		"rolled":  func(e *env) { e.rollPlugin(RollOptions{}) },
		"changed": func(e *env) { e.submit(pluginJobOf("/bin/false", "")) },
	} {
		t.Run(name, func(t *testing.T) {
			withAgent(t, func(e *env) {
				old, user := e.runPluginAndUser()
				e.setShim(func(s *fakeShim) { s.sick = true })
				begin(e)
				e.awaitCount("start disk/plugin", 2)
				time.Sleep(time.Minute)
				if got := e.roll("disk"); got != RollStarting || e.agent.job("disk").Version != 1 {
					t.Errorf("before the new instance is healthy: roll %q, version %d", got,
						e.agent.job("disk").Version)
				}
				_, err := e.agent.RollPlugin(e.Context(), "disk", e.shim, RollOptions{})
				e.hasError(err, registry.ErrConflict, "being rolled already")
				e.restart(nil)
				e.use(old, calls)
				e.setSick()
				e.awaitRoll(RollDraining)
				e.awaitAlloc("disk", "waits", func(r *AllocRecord) bool {
					return r.ID == old.ID && strings.Contains(r.Reason, "until its calls have ended")
				})
				e.restart(nil)
				time.Sleep(time.Minute)
				e.hasCount("stop ", 0)
				e.use(nil, nil)
				e.awaitRoll(RollDone)
				e.awaitCount("stop disk/plugin", 1)
				if r := e.awaitRunning("disk"); r.ID == old.ID || r.Version != 2 || e.agent.job("disk").Version != 2 {
					t.Errorf("alloc %s of version %d runs", r.ID, r.Version)
				}
				if r := e.agent.record(user.ID); r.State != AllocRunning {
					t.Errorf("the user is %s", r.State)
				}
			})
		})
	}
}

// If a new instance does not become healthy, it is stopped, and the job keeps its version. That also holds if the agent
// dies meanwhile.
func TestFailedRollChangesNothing(t *testing.T) {
	for _, mode := range []hooks.RollMode{"", hooks.RollStopFirst} {
		for name, fail := range map[string]func(*env, *AllocRecord){
			"exits": func(e *env, r *AllocRecord) { e.exit(r, "plugin", 3) },
			"never healthy": func(e *env, r *AllocRecord) {
				e.shim.restarts <- host.PluginTask{TaskKey: host.TaskKey{Alloc: r.ID, Task: "plugin"},
					Restart: &registry.RestartRequest{Attempt: 1, Cause: registry.CauseStartTimeout}}
			},
			"agent dies": func(e *env, r *AllocRecord) { e.restart(func() { e.exit(r, "plugin", 3) }) },
		} {
			t.Run(name+string(mode), func(t *testing.T) {
				withAgent(t, func(e *env) {
					e.submit(pluginJobOf("/bin/true", mode))
					old := e.awaitRunning("disk")
					e.setShim(func(s *fakeShim) { s.sick = true })
					e.submit(pluginJobOf("/bin/false", mode))
					e.awaitCount("start disk/plugin", 2)
					begun := e.awaitNew("disk")
					e.setShim(func(s *fakeShim) { s.sick = false })
					fail(e, begun)
					e.await("the roll has failed", func([]*AllocRecord) bool {
						return e.roll("disk") == RollFailed && !e.agent.job("disk").Roll.Ended.IsZero()
					})
					j := e.agent.job("disk")
					if j.Version != 1 || j.Next != nil || !strings.Contains(j.Roll.Failed, short(begun.ID)) {
						t.Errorf("version %d, next %v, roll %+v", j.Version, j.Next, j.Roll)
					}
					now := e.awaitAlloc("disk", "old runs", func(r *AllocRecord) bool {
						return r.Version == 1 && r.State == AllocRunning
					})
					if (now.ID == old.ID) != (mode == "") {
						t.Errorf("alloc %s runs, it was %s", now.ID, old.ID)
					}
					time.Sleep(time.Hour)
					if r := e.agent.record(begun.ID); !r.State.Ended() {
						t.Errorf("the new alloc is %s", r.State)
					}
				})
			})
		}
	}
}

// An instance of a failed roll that serves mounts lives as long as these. It gets no new work, because the instance
// that it should have replaced is active again.
func TestFailedRollKeepsOnlyTheServerOfMounts(t *testing.T) {
	withAgent(t, func(e *env) {
		_, old := e.runTwoJobs()
		first, second := e.rollTwoJobs()
		e.use(second, serves())
		e.setSick(first)
		e.exit(first, "plugin", 3)
		e.await("the roll has failed", func([]*AllocRecord) bool { return e.roll("node") == RollFailed })
		time.Sleep(time.Minute)
		e.hasCount("prefer node/plugin", 1)
		list, _, _ := e.shim.Plugins(e.Context(), host.PluginQuery{})
		for _, p := range list.Tasks {
			if p.Active && p.Alloc != old.ID {
				t.Errorf("alloc %s is active, want the old one %s", p.Alloc, old.ID)
			}
		}
		if why := e.agent.record(second.ID).Reason; !strings.Contains(why, "serves the mounts of volume data") {
			t.Errorf("the new alloc is kept for %q", why)
		}
		e.use(nil, nil)
		e.await("the new alloc ends", func([]*AllocRecord) bool {
			return e.agent.record(second.ID).State.Ended() && e.alive("node") == 1
		})
	})
}

// If the shim has lost its records, it may register the old instance after the new one. The roll ends nevertheless.
func TestRollEndsAfterALossOfTheShimsRecords(t *testing.T) {
	withAgent(t, func(e *env) {
		old, _ := e.runPluginAndUser()
		e.use(old, calls)
		e.rollPlugin(RollOptions{})
		e.awaitRoll(RollDraining)
		e.setShim(func(s *fakeShim) { slices.Reverse(s.plugins) })
		e.awaitCount("prefer disk/plugin", 1)
		e.use(nil, nil)
		e.awaitRoll(RollDone)
		if r := e.awaitRunning("disk"); r.ID == old.ID {
			t.Error("the old instance runs")
		}
	})
}

// A call that never ends keeps the old instance. After a while the reason names a command that stops it, and that
// command works.
func TestRollThatNeverEndsIsForced(t *testing.T) {
	withAgent(t, func(e *env) {
		old, _ := e.runPluginAndUser()
		e.use(old, func(t *host.PluginTask) {
			t.Open = []registry.OpenCall{{RPC: registry.NodeStageRPC, Volume: registry.VolumeName{ID: "data"}}}
		})
		e.rollPlugin(RollOptions{})
		e.awaitRoll(RollDraining)
		time.Sleep(time.Minute)
		if why := e.agent.record(old.ID).Reason; !strings.Contains(why, "of volume data") ||
			strings.Contains(why, "--") {
			t.Errorf("after a minute: %q", why)
		}
		time.Sleep(time.Hour)
		if why := e.agent.record(old.ID).Reason; !strings.HasSuffix(why, "holdfast plugin roll --force disk") {
			t.Errorf("after an hour: %q", why)
		}
		e.rollPlugin(RollOptions{Force: true})
		e.awaitRoll(RollDone)
		e.awaitCount("stop disk/plugin", 1)
		if n := e.alive("disk"); n != 1 {
			t.Errorf("%d allocs of the plugin run", n)
		}
	})
}

// While one job of a plugin is being rolled, roll options start no roll of the plugin's other jobs.
func TestRollOptionsBeginNoRollOfOtherJobs(t *testing.T) {
	withAgent(t, func(e *env) {
		old, _ := e.runTwoJobs()
		e.use(old, calls)
		_, err := e.agent.RollPlugin(e.Context(), "disk", e.shim, RollOptions{})
		e.must(err)
		e.await("one old instance is kept", func([]*AllocRecord) bool {
			return e.roll("controller") == RollDraining && e.roll("node") == RollDone
		})
		for _, o := range []RollOptions{{Drain: true}, {Force: true}} {
			ids, err := e.agent.RollPlugin(e.Context(), "disk", e.shim, o)
			if err != nil || strings.Join(ids, " ") != "controller" {
				t.Errorf("%+v: %q, %v", o, ids, err)
			}
		}
		e.await("the old instance is stopped", func([]*AllocRecord) bool { return e.roll("controller") == RollDone })
		if v := e.agent.job("node").Version; v != 2 {
			t.Errorf("the other job has version %d", v)
		}
	})
}

// Jobs that run one plugin are rolled together. While one of their new instances is not healthy, no job takes its next
// version. If one of them fails, all jobs keep their version.
func TestJobsOfOnePluginAreRolledTogether(t *testing.T) {
	for _, fails := range []bool{false, true} {
		t.Run(map[bool]string{false: "healthy", true: "fails"}[fails], func(t *testing.T) {
			withAgent(t, func(e *env) {
				e.runTwoJobs()
				_, second := e.rollTwoJobs()
				e.setSick(second)
				e.restart(nil)
				time.Sleep(time.Minute)
				if got := e.roll("controller"); got != RollStarting {
					t.Errorf("the roll of the first job is %s", got)
				}
				want, version := RollDone, uint64(2)
				if fails {
					want, version = RollFailed, 1
					e.exit(second, "plugin", 3)
				} else {
					e.setSick()
				}
				for _, id := range []string{"controller", "node"} {
					e.await(id+" is decided", func([]*AllocRecord) bool {
						return e.roll(id) == want && e.alive(id) == 1 && e.agent.job(id).Version == version
					})
				}
			})
		})
	}
}

// Users of mounts that the old process serves are named. With Drain they are restarted, and their mounts are made by
// the new process, even if the clock was set back before the roll.
func TestRollKeepsTheServerOfMounts(t *testing.T) {
	withAgent(t, func(e *env) {
		old, user := e.runPluginAndUser()
		serving := func(t *host.PluginTask) {
			if r := e.agent.record(user.ID); r != nil && !r.State.Ended() {
				serves(user.ID)(t)
			}
		}
		e.restart(func() { e.edit(old.ID, func(r *AllocRecord) { r.Created = r.Created.Add(24 * time.Hour) }) })
		e.use(old, serving)
		e.rollPlugin(RollOptions{})
		e.awaitRoll(RollDraining)
		e.awaitAlloc("disk", "kept", func(r *AllocRecord) bool {
			return r.ID == old.ID && strings.Contains(r.Reason, "of job user")
		})
		time.Sleep(time.Hour)
		e.hasCount("stop ", 0)
		e.rollPlugin(RollOptions{Drain: true})
		e.awaitRoll(RollDone)
		e.awaitCount("stop disk/plugin", 1)
		e.awaitCount("prepared user", 2)
		e.has("stop user/main", "kept volumes of user", "released user", "stop disk/plugin")
		if r := e.awaitRunning("user"); r.ID == user.ID {
			t.Error("the user was not restarted")
		}
	})
}

// A plugin that cannot run twice is stopped before its successor starts, but not while its process serves mounts.
func TestRollStopsFirst(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(pluginJobOf("/bin/true", hooks.RollStopFirst))
		old := e.awaitRunning("disk")
		e.use(old, serves())
		_, err := e.agent.RollPlugin(e.Context(), "disk", e.shim, RollOptions{})
		e.hasError(err, registry.ErrConflict, "data", "--force")
		e.hasError(e.trySubmit(pluginJobOf("/bin/false", hooks.RollStopFirst), SubmitOptions{}), registry.ErrConflict,
			"data", "--force")
		e.rollPlugin(RollOptions{Force: true})
		e.awaitRoll(RollDone)
		e.has("start disk/plugin", "stop disk/plugin", "exited disk/plugin", "start disk/plugin")
	})
}

// alive counts the allocs of a job that have not ended.
func (e *env) alive(job string) (n int) {
	for _, r := range unended(e.agent.Allocs(), lastRank) {
		if r.Job == job {
			n++
		}
	}
	return n
}

// While an old instance is kept for its mounts, the job can be submitted again, both unchanged and in its earlier
// version.
func TestJobIsSubmittedWhileAnOldInstanceIsKept(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(pluginJobOf("/bin/true", ""))
		old := e.awaitRunning("disk")
		e.submit(userJob("user", ""))
		user := e.awaitRunning("user")
		e.setHolder(user.ID, registry.MarkDone)
		e.use(old, serves())
		e.submit(pluginJobOf("/bin/false", ""))
		e.awaitRoll(RollDraining)
		e.submit(pluginJobOf("/bin/false", ""))
		time.Sleep(time.Minute)
		if _, kept := e.agent.RollAllocs(e.agent.job("disk")); len(kept) != 1 || kept[0].ID != old.ID {
			t.Errorf("kept: %d allocs, want the old one", len(kept))
		}
		e.submit(pluginJobOf("/bin/true", ""))
		e.awaitRoll(RollDraining)
		time.Sleep(time.Minute)
		if n := e.alive("disk"); n != 2 {
			t.Errorf("%d allocs of the plugin, want the old one and the new one", n)
		}
		e.use(nil, nil)
		e.awaitRoll(RollDone)
		time.Sleep(time.Minute)
		if r := e.awaitRunning("disk"); r.ID == old.ID || e.alive("disk") != 1 {
			t.Errorf("alloc %s runs, of %d", r.ID, e.alive("disk"))
		}
	})
}

// If a job is submitted while its roll is starting, it replaces the next version, even if it is unchanged. A repeated
// submission of the next version changes nothing.
func TestSubmissionEndsAStartingRoll(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(pluginJobOf("/bin/true", ""))
		old := e.awaitRunning("disk")
		e.setShim(func(s *fakeShim) { s.sick = true })
		e.submit(pluginJobOf("/bin/false", ""))
		e.awaitCount("start disk/plugin", 2)
		e.submit(pluginJobOf("/bin/false", ""))
		time.Sleep(time.Minute)
		if e.hasCount("start disk/plugin", 2); e.roll("disk") != RollStarting {
			t.Errorf("the same version again: the roll is %s", e.roll("disk"))
		}
		e.submit(pluginJobOf("/bin/true", ""))
		e.await("the new instance is stopped", func([]*AllocRecord) bool { return e.alive("disk") == 1 })
		j := e.agent.job("disk")
		if r := e.awaitRunning("disk"); r.ID != old.ID || e.roll("disk") != RollFailed || j.Version != 3 {
			t.Errorf("alloc %s runs, roll %+v, version %d", r.ID, j.Roll, j.Version)
		}
	})
}

// Allocs that --drain has stopped are started again if the job of the plugin is then stopped.
func TestStoppedRollResumesDrainedAllocs(t *testing.T) {
	withAgent(t, func(e *env) {
		old, user := e.runPluginAndUser()
		e.use(old, serves(user.ID))
		e.rollPlugin(RollOptions{Drain: true})
		e.awaitState("user", AllocStopped)
		time.Sleep(time.Minute)
		e.hasCount("prepared user", 1)
		if why := e.agent.DescribePaused("user"); !strings.Contains(why, "of job disk still serves volume data") {
			t.Errorf("the user waits: %q", why)
		}
		e.stopJob("disk", StopOptions{Force: true})
		e.awaitRoll(RollDone)
		e.awaitCount("prepared user", 2)
	})
}

// A job may be stopped and submitted again between the look for rolls and the next step of its roll.
func TestStepOfARollThatIsGoneDoesNothing(t *testing.T) {
	withAgent(t, func(e *env) {
		e.runPluginAndUser()
		before := *e.agent.job("disk")
		before.Roll = &Roll{Version: 1}
		e.must(e.agent.stepRoll(e.Context(), e.shim, &before))
	})
}

// If a stopped job is submitted with a change before its plugin has ended, the new version runs.
func TestChangedJobAfterAStopReplacesThePlugin(t *testing.T) {
	withAgent(t, func(e *env) {
		jobOf := func(command string) *hooks.Job {
			j := pluginJobOf(command, "")
			j.Type, j.Groups = "service", append(j.Groups, withVolumes(tasks("users", task("main", ""))))
			return j
		}
		e.submit(jobOf("/bin/true"))
		e.awaitCount("start disk/", 2)
		e.releaseSlowly("disk/plugin")
		e.stopJob("disk", StopOptions{})
		e.awaitState("disk", AllocReleasing)
		e.submit(jobOf("/bin/false"))
		e.awaitCount("start disk/plugin", 2)
		e.has("released disk", "stop disk/plugin", "start disk/plugin")
	})
}

// One of the jobs of a plugin is stopped while both are rolled. Nobody waits for its roll any more.
func TestRollOfAStoppedJobEnds(t *testing.T) {
	withAgent(t, func(e *env) {
		e.runTwoJobs()
		e.rollTwoJobs()
		e.stopJob("node", StopOptions{})
		if state := e.roll("node"); state != RollFailed {
			e.Errorf("the roll is %s", state)
		}
	})
}
