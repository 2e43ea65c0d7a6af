package agent

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/host"
	"holdfast/registry"
)

func TestNoTaskStartsBeforeItsVolumes(t *testing.T) {
	withAgent(t, func(e *env) {
		var ready atomic.Bool
		e.shim.prepare = func(host.AllocGroup) error {
			if !ready.Load() {
				return registry.Errorf(registry.ErrUnavailable, "plugin loopfs has no healthy instance")
			}
			return nil
		}
		e.submit(userJob("user", ""))
		e.awaitReason("user", "no healthy instance")
		e.hasCount("start", 0)
		ready.Store(true)
		e.shim.hint <- struct{}{}
		r := e.awaitRunning("user")
		e.has("refused user", "prepared user", "start user/main")
		binds := e.driver.get(attemptID(r.ID, "main", 1)).task.Plan.Binds
		if len(binds) != 1 || binds[0].Target != "/data" {
			e.Errorf("the plan was not applied: %+v", binds)
		}
		if r.Reason != "" {
			e.Errorf("a running alloc waits for %q", r.Reason)
		}
	})
}

func TestVolumesAreReleasedAfterTheTasks(t *testing.T) {
	withAgent(t, func(e *env) {
		tries := 0
		e.shim.release = func(host.AllocID) error {
			if tries++; tries < 3 {
				return registry.Errorf(registry.ErrUnavailable, "the plugin does not answer")
			}
			return nil
		}
		e.submit(job("user", "service", withVolumes(tasks("g", task("main", ""), task("side", "")))))
		e.awaitRunning("user")
		e.stopJob("user", StopOptions{})
		e.awaitState("user", AllocStopped)
		e.has("stop user/", "stop user/", "released user")
		if tries != 3 {
			e.Errorf("released after %d attempts", tries)
		}
	})
}

func TestUsersStopBeforePlugins(t *testing.T) {
	withAgent(t, func(e *env) {
		e.releaseSlowly("disk/plugin")
		e.runPluginAndUser()
		e.stopAll()
		e.has("starting disk/plugin 1", "started disk/plugin 1", "stop user/main", "released user", "stop disk/plugin",
			"exited disk/plugin 1 code=0 final=true")
	})
	withAgent(t, func(e *env) { // of one job
		e.releaseSlowly("all/plugin")
		e.submit(job("all", "service", tasks("plugins", plugin("disk")), withVolumes(tasks("users", task("main", "")))))
		e.awaitCount("start all/", 2)
		e.stopJob("all", StopOptions{})
		e.awaitAllEnded()
		e.has("stop all/main", "released all", "stop all/plugin")
	})
}

var stageWait = registry.Wait{
	Volume: registry.VolumeName{Namespace: "default", ID: "disk"}, Step: registry.StepStage, For: "plugin p",
	RPC: registry.NodeStageRPC, Code: "UNAVAILABLE", Detail: "backend is down", Advice: "look at the backend",
}

func TestWaitIsNotedOnceWhileTheCallRuns(t *testing.T) {
	withAgent(t, func(e *env) {
		e.shim.hang, e.shim.waiting = true, []registry.Wait{stageWait}
		e.submit(userJob("user", ""))
		e.awaitReason("user", stageWait.String())
		time.Sleep(time.Hour)
		synctest.Wait()
		rec, noted := e.agent.Allocs()[0], 0
		for _, n := range rec.Notes {
			if strings.Contains(n.Text, stageWait.String()) {
				noted++
			}
		}
		if noted != 1 || !rec.Next.IsZero() {
			t.Errorf("noted %d times, next %v", noted, rec.Next)
		}
		e.stopAll()
	})
}

// Between attempts, an alloc shows the shim's reason and the time of the next attempt. A permanent error fails the
// alloc, and its reason has advice.
func TestPrepareErrorsAreShown(t *testing.T) {
	withAgent(t, func(e *env) {
		e.shim.waiting = []registry.Wait{stageWait}
		var kind atomic.Value
		kind.Store(registry.ErrConflict)
		e.shim.prepare = func(host.AllocGroup) error {
			return fmt.Errorf("alloc 12345678-1234: %w", kind.Load().(error))
		}
		e.submit(userJob("user", ""))
		if r := e.awaitReason("user", stageWait.String()); !r.Next.After(time.Now()) {
			e.Errorf("next attempt at %v", r.Next)
		}
		kind.Store(registry.ErrInvalid)
		rec := e.awaitState("user", AllocFailed)
		if want := "volumes cannot be prepared: " + stageWait.String() + "; look at the backend"; rec.Reason != want {
			t.Errorf("%s\nwant %s", rec.Reason, want)
		}
		e.has("refused user", "released user")
		e.hasCount("start", 0)
	})
}

// If a claim is refused for good, the reason is the refusal, even while another alloc holds the volume.
func TestRefusedClaimNamesNoHolder(t *testing.T) {
	withAgent(t, func(e *env) {
		e.setHolder("other", registry.MarkDone)
		e.shim.waiting = []registry.Wait{{Volume: registry.VolumeName{ID: "data"}, Step: registry.StepClaim,
			Detail: "volume data is on node n2"}}
		e.shim.prepare = func(host.AllocGroup) error { return registry.ErrInvalid }
		e.submit(userJob("user", ""))
		if r := e.awaitState("user", AllocFailed); r.Reason != "volumes cannot be prepared: volume data is on node n2" {
			t.Error(r.Reason)
		}
	})
}

func TestFailedTaskStopsTheOthers(t *testing.T) {
	withAgent(t, func(e *env) {
		j := job("work", "service", tasks("g",
			task("main", `{"restart":[{"attempts":1,"delay":"1s","interval":"1h","mode":"fail"}]}`), task("side", "")))
		e.submit(j)
		for attempt := range uint64(2) {
			e.exit(e.awaitAttempt("work", "main", attempt+1), "main", 3)
		}
		r := e.awaitState("work", AllocFailed)
		e.has("end work/main", "start work/main", "end work/main", "stop work/side")
		if !strings.Contains(r.Reason, "exit code 3") || !strings.Contains(r.Reason, "1 restarts within 1h") {
			e.Errorf("reason %q", r.Reason)
		}
		synctest.Wait() // a failed job runs again only when it is submitted again
		e.hasCount("start work/main", 2)
		e.submit(j)
		e.awaitRunning("work")
	})
}

func TestPrestartAndLeaderTasks(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(job("work", "batch", tasks("g",
			task("main", `{"leader":true}`), task("first", `{"lifecycle":[{"hook":"prestart"}]}`),
			task("proxy", `{"lifecycle":[{"hook":"prestart","sidecar":true}]}`))))
		e.awaitCount("start", 2)
		r := e.agent.Allocs()[0]
		e.hasCount("start work/main", 0)
		e.exit(r, "first", 0)
		e.awaitCount("start work/main", 1)
		e.exit(r, "main", 0)
		e.awaitState("work", AllocComplete)
		e.has("end work/first", "start work/main", "end work/main", "stop work/proxy")
	})
}

// A lifecycle task that is no sidecar is not started again after a success, and a sidecar is.
func TestLifecycleTaskEndsOnlyIfItIsNoSidecar(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(job("work", "service", tasks("g", task("main", ""),
			task("init", `{"lifecycle":[{"hook":"poststart"}]}`))))
		r := e.awaitRunning("work")
		e.exit(r, "init", 0)
		time.Sleep(time.Hour)
		if r = e.agent.record(r.ID); r.State != AllocRunning || r.Tasks["init"].State != TaskDead {
			e.Errorf("%s, %+v", r.State, r.Tasks["init"])
		}
		e.submit(job("batch", "batch", tasks("g", task("main", ""),
			task("proxy", `{"lifecycle":[{"hook":"prestart","sidecar":true}]}`))))
		r = e.awaitRunning("batch")
		e.exit(r, "proxy", 0)
		e.awaitAttempt("batch", "proxy", 2)
		e.exit(r, "main", 0)
		e.awaitState("batch", AllocComplete)
	})
}

func TestPermanentStartErrorFailsAtOnce(t *testing.T) {
	withAgent(t, func(e *env) {
		e.driver.startErr = registry.Errorf(registry.ErrNotFound, "no program /nope")
		e.submit(pluginJob("work"))
		if r := e.awaitState("work", AllocFailed); !strings.Contains(r.Reason, "no program /nope") {
			e.Errorf("reason %q", r.Reason)
		}
		e.has("starting work/plugin 1", "exited work/plugin 1 code=-1 final=true")
		e.hasCount("starting", 1)
	})
}

func TestRequestedRestartHappensOncePerAttempt(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(pluginJob("disk"))
		r := e.awaitRunning("disk")
		request := func(attempt uint64) {
			asked := host.PluginTask{TaskKey: host.TaskKey{Alloc: r.ID, Task: "plugin"},
				Restart: &registry.RestartRequest{Attempt: attempt, Cause: registry.CauseMissed}}
			for range 5 { // the shim repeats the request in each list
				e.shim.restarts <- asked
				synctest.Wait()
			}
		}
		request(1)
		e.awaitAttempt("disk", "plugin", 2)
		const why = "task plugin: the shim requested a restart: heartbeats missed; now attempt 2"
		if got := e.agent.record(r.ID).Why(); got != why {
			e.Errorf("why %q, want %q", got, why)
		}
		time.Sleep(steadyAfter)
		if got := e.agent.record(r.ID).Why(); got != "" {
			e.Errorf("why %q while the attempt is steady", got)
		}
		request(1) // that request was carried out already
		e.hasCount("stop ", 1)
		e.has("stop disk/plugin", "exited disk/plugin 1 code=0 final=false", "starting disk/plugin 2",
			"started disk/plugin 2")
		request(2) // the policy allows one restart, and the exit code 0 does not matter
		failed := e.awaitState("disk", AllocFailed)
		e.has("started disk/plugin 2", "stop disk/plugin", "exited disk/plugin 2 code=0 final=true")
		if !strings.Contains(failed.Reason, string(registry.CauseMissed)) {
			e.Errorf("reason %q", failed.Reason)
		}
		if n := e.agent.FailedPlugins(); len(n) != 1 || n["disk"] != 1 {
			e.Errorf("failed plugins: %v", n)
		}
		e.stopJob("disk", StopOptions{})
		if n := e.agent.FailedPlugins(); len(n) != 0 {
			e.Errorf("failed plugins of a stopped job: %v", n)
		}
	})
}

// A stop that the engine has not received is repeated, and the task still gets its grace.
func TestRepeatedStopGivesTheTaskItsGrace(t *testing.T) {
	withAgent(t, func(e *env) {
		fails := 2
		e.driver.stopErr = func(grace time.Duration) error {
			if fails--; fails >= 0 {
				return registry.Errorf(registry.ErrUnavailable, "no engine answers")
			}
			e.add("grace %v", grace)
			return nil
		}
		e.submit(serviceJob("db", `{"kill_timeout":"30s"}`))
		e.awaitRunning("db")
		e.stopJob("db", StopOptions{})
		e.awaitState("db", AllocStopped)
		e.has("grace 30s", "stop db/main")
	})
}

func TestPluginWaitsUntilTheShimLetsItStart(t *testing.T) {
	withAgent(t, func(e *env) {
		n := 0
		e.shim.starting = func(host.AllocTask) error {
			if n++; n < 4 {
				return registry.Errorf(registry.ErrConflict, "the old process still answers")
			}
			return nil
		}
		e.submit(pluginJob("disk"))
		if rec := e.awaitRunning("disk").Tasks["plugin"]; rec.Attempt != 1 || rec.Restarts.Total != 0 {
			e.Errorf("waiting counts as a failure: %+v", rec)
		}
	})
}

// Each commit syncs the disk twice. If a change must be recorded, one commit records all changes of that moment.
func TestAllocStartsAndStopsWithTwoCommits(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(pluginJob("disk"))
		e.awaitRunning("disk")
		synctest.Wait()
		var commits atomic.Int64
		e.agent.ledger.before = func() error { commits.Add(1); return nil }
		use := withVolumes(tasks("g", task("main", "")))
		for _, step := range []struct {
			name string
			do   func()
			want int64
		}{
			{"start: job and alloc, begin", func() { e.submit(job("user", "service", use)); e.awaitRunning("user") },
				2},
			{"stop: job and alloc, end", func() {
				e.stopJob("user", StopOptions{})
				e.awaitState("user", AllocStopped)
			}, 2},
			{"start of a batch job", func() { e.submit(job("work", "batch", use)); e.awaitRunning("work") }, 2},
			{"its end", func() {
				e.exit(e.awaitRunning("work"), "main", 0)
				e.awaitState("work", AllocComplete)
			}, 1},
		} {
			commits.Store(0)
			step.do()
			synctest.Wait()
			if n := commits.Load(); n != step.want {
				t.Errorf("%s: %d commits, want %d", step.name, n, step.want)
			}
		}
		e.stopJob("disk", StopOptions{})
		e.awaitAllEnded()
	})
}

// The agent logs these notes as errors.
func TestNotesOfFailuresAreMarked(t *testing.T) {
	t.Parallel()
	r := &AllocRecord{State: AllocRunning, Tasks: map[host.TaskName]*TaskRecord{"good": {}, "bad": {Failed: true}}}
	r.note("good", "complete")
	r.note("bad", "failed")
	r.note("", "placed")
	r.State = AllocFailed
	r.note("", "failed")
	for i, want := range []bool{false, true, false, true} {
		if n := r.Notes[i]; n.Failed != want {
			t.Errorf("note %q of task %q: failed is %v", n.Text, n.Task, n.Failed)
		}
	}
}

// If a start failed without an answer of the engine, the task may still start, so the volumes are kept until that is
// certain.
func TestVolumesWaitForAStartThatMayStillHappen(t *testing.T) {
	withAgent(t, func(e *env) {
		var removes atomic.Bool
		e.driver.failed = func(string) error {
			if !removes.Load() {
				return registry.Errorf(registry.ErrUnavailable, "container c may still start")
			}
			e.add("removed container c")
			return nil
		}
		e.driver.failStarts(registry.Errorf(registry.ErrUnavailable, "no engine answers"))
		e.submit(userJob("user", ""))
		e.awaitAlloc("user", "a failed start",
			func(r *AllocRecord) bool { return r.Tasks["main"].State == TaskWaiting })
		e.stopJob("user", StopOptions{})
		for range 2 {
			e.awaitAlloc("user", "the reason", func(r *AllocRecord) bool {
				return r.State == AllocReleasing && r.Reason == `task "main": container c may still start`
			})
			e.restart(nil)
		}
		e.hasCount("released user", 0)
		removes.Store(true)
		e.awaitAllEnded()
		e.has("removed container c", "released user")
	})
}
