package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/host"
	"holdfast/registry"
)

func TestNoTaskStartsBeforeItsVolumes(t *testing.T) {
	inWorld(t, func(w *world) {
		ready := false
		w.shim.prepare = func(host.AllocGroup) error {
			if !ready {
				return registry.Errorf(registry.ErrUnavailable, "plugin loopfs has no healthy instance")
			}
			return nil
		}
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		w.await("the reason is shown", func(all []*AllocRecord) bool {
			return len(all) == 1 && all[0].State == AllocPending && strings.Contains(all[0].Reason, "no healthy instance")
		})
		if n := w.count("start"); n != 0 {
			w.Errorf("%d tasks were started without their volumes", n)
		}
		w.shim.mu.Lock()
		ready = true
		w.shim.mu.Unlock()
		w.shim.hint <- struct{}{}
		r := w.awaitRunning("user")
		w.has("refused user", "prepared user", "start user/main")
		id := attemptID(r.ID, "main", 1)
		if binds := w.machine.get(id).task.Plan.Binds; len(binds) != 1 || binds[0].Target != "/data" {
			w.Errorf("the plan was not applied: %+v", binds)
		}
		if r.Reason != "" {
			w.Errorf("a running alloc still waits for %q", r.Reason)
		}
	})
}

func TestVolumesAreReleasedAfterTheTasks(t *testing.T) {
	inWorld(t, func(w *world) {
		tries := 0
		w.shim.release = func(host.AllocID) error {
			if tries++; tries < 3 {
				return registry.Errorf(registry.ErrUnavailable, "the plugin does not answer")
			}
			return nil
		}
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", ""), task("side", "")))))
		w.awaitRunning("user")
		if err := w.agent.StopJob(w.Context(), "user", w.shim, StopOptions{}); err != nil {
			w.Fatal(err)
		}
		w.awaitState("user", AllocStopped)
		w.has("stop user/", "stop user/", "released user")
		if tries != 3 {
			w.Errorf("released after %d tries", tries)
		}
	})
}

func TestUsersGoBeforePlugins(t *testing.T) {
	inWorld(t, func(w *world) {
		held := true // until the user's volumes are released, its plugin must live
		w.shim.release = func(host.AllocID) error {
			time.Sleep(time.Minute) // whoever does not wait overtakes
			if w.count("stop disk/plugin") > 0 {
				w.Error("the plugin was stopped before its volumes were given back")
			}
			held = false
			return nil
		}
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		w.submit(job("disk", "system", tasks("g", plugin("disk"))))
		w.awaitRunning("user")
		w.awaitRunning("disk")
		w.takeDown()
		w.has("starting disk/plugin 1", "started disk/plugin 1", "stop user/main", "released user", "stop disk/plugin", "exited disk/plugin 1 code=0 final=true")
		if held {
			w.Error("nothing was released")
		}
	})
}

func TestOneJobsUsersGoBeforeItsPlugins(t *testing.T) {
	inWorld(t, func(w *world) {
		w.shim.release = func(host.AllocID) error {
			time.Sleep(time.Minute)
			if w.count("stop all/plugin") > 0 {
				w.Error("the plugin was stopped before its volumes were given back")
			}
			return nil
		}
		w.submit(job("all", "service", tasks("plugins", plugin("disk")), withVolumes(tasks("users", task("main", "")))))
		w.await("both run", func([]*AllocRecord) bool { return w.count("start all/") == 2 })
		if err := w.agent.StopJob(w.Context(), "all", w.shim, StopOptions{}); err != nil {
			w.Fatal(err)
		}
		w.await("both have ended", allEnded)
		w.has("stop all/main", "released all", "stop all/plugin")
	})
}

func allEnded(all []*AllocRecord) bool { return len(unended(all, lastRank)) == 0 }

func TestStopEndsAWaitingAlloc(t *testing.T) {
	inWorld(t, func(w *world) {
		w.shim.prepare = func(host.AllocGroup) error {
			return registry.Errorf(registry.ErrConflict, "volume data is held by alloc 1234")
		}
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		w.await("the holder is named", func(all []*AllocRecord) bool {
			return len(all) == 1 && strings.Contains(all[0].Reason, "held by alloc 1234")
		})
		if err := w.agent.StopJob(w.Context(), "user", w.shim, StopOptions{}); err != nil {
			w.Fatal(err)
		}
		w.awaitState("user", AllocStopped)
		w.has("refused user", "released user")
		if w.count("start") != 0 {
			w.Error("a task was started")
		}
	})
}

func TestHopelessVolumesFailTheAlloc(t *testing.T) {
	inWorld(t, func(w *world) {
		w.shim.prepare = func(host.AllocGroup) error { return registry.Invalid("volume data was not made for block-device") }
		w.submit(job("user", "batch", withVolumes(tasks("g", task("main", "")))))
		r := w.awaitState("user", AllocFailed)
		if !strings.Contains(r.Reason, "not made for block-device") {
			w.Errorf("reason %q", r.Reason)
		}
		w.has("refused user", "released user")
	})
}

func TestBatchIsCompleteWhenItsTasksHaveEndedWell(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("work", "batch", withVolumes(tasks("g", task("main", ""), task("other", "")))))
		r := w.awaitRunning("work")
		w.machine.end(attemptID(r.ID, "main", 1), 0, "end")
		synctest.Wait()
		if w.count("released") != 0 {
			w.Error("released while a task runs")
		}
		w.machine.end(attemptID(r.ID, "other", 1), 0, "end")
		w.awaitState("work", AllocComplete)
		w.has("end work/main", "end work/other", "released work")
		if n := w.count("start"); n != 2 {
			w.Errorf("%d starts", n)
		}
	})
}

func TestAFailedTaskEndsItsSiblings(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("work", "service", tasks("g", task("main", `{"restart":[{"attempts":1,"delay":"1s","interval":"1h","mode":"fail"}]}`), task("side", ""))))
		for attempt := range uint64(2) {
			var id string
			w.await("an attempt runs", func(all []*AllocRecord) bool {
				if len(all) == 0 {
					return false
				}
				id = attemptID(all[0].ID, "main", attempt+1)
				rec := all[0].Tasks["main"]
				return rec.State == TaskRunning && rec.Attempt == attempt+1
			})
			w.machine.end(id, 3, "die")
		}
		r := w.awaitState("work", AllocFailed)
		w.has("die work/main", "start work/main", "die work/main", "stop work/side")
		if !strings.Contains(r.Reason, "exit code 3") || !strings.Contains(r.Reason, "1 restarts within 1h") {
			w.Errorf("reason %q", r.Reason)
		}
		// A job that has failed is not run again by itself, but it is when it is submitted again.
		synctest.Wait()
		if n := w.count("start work/main"); n != 2 {
			w.Errorf("main was started %d times", n)
		}
		w.submit(job("work", "service", tasks("g", task("main", `{"restart":[{"attempts":1,"delay":"1s","interval":"1h","mode":"fail"}]}`), task("side", ""))))
		w.awaitRunning("work")
	})
}

func TestPrestartAndLeader(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("work", "batch", tasks("g",
			task("main", `{"leader":true}`), task("first", `{"lifecycle":[{"hook":"prestart"}]}`),
			task("proxy", `{"lifecycle":[{"hook":"prestart","sidecar":true}]}`))))
		w.await("the prestart task runs", func([]*AllocRecord) bool { return w.count("start") == 2 })
		r := w.agent.Allocs()[0]
		if w.count("start work/main") != 0 {
			w.Error("main was started before first has ended")
		}
		w.machine.end(attemptID(r.ID, "first", 1), 0, "end")
		w.await("main runs", func([]*AllocRecord) bool { return w.count("start work/main") == 1 })
		w.machine.end(attemptID(r.ID, "main", 1), 0, "end")
		w.awaitState("work", AllocComplete)
		w.has("end work/first", "start work/main", "end work/main", "stop work/proxy")
	})
}

func TestAStartThatCannotWorkFailsAtOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		w.machine.refuse = registry.Errorf(registry.ErrNotFound, "no program /nope")
		w.submit(job("work", "service", tasks("g", plugin("disk"))))
		r := w.awaitState("work", AllocFailed)
		if !strings.Contains(r.Reason, "no program /nope") {
			w.Errorf("reason %q", r.Reason)
		}
		w.has("starting work/plugin 1", "exited work/plugin 1 code=-1 final=true")
		if w.count("starting") != 1 {
			w.Error("it was tried again")
		}
	})
}

func TestRestartsHappenOncePerAttempt(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("disk", "system", tasks("g", plugin("disk"))))
		r := w.awaitRunning("disk")
		ask := func(attempt uint64) {
			p := host.PendingRestart{TaskKey: host.TaskKey{Alloc: r.ID, Task: "plugin"}}
			p.Attempt, p.Cause = attempt, registry.CauseMissed
			for range 5 {
				w.shim.ask(p) // the same request, as every snapshot repeats it
				synctest.Wait()
			}
		}
		ask(1)
		w.await("the second attempt runs", func(all []*AllocRecord) bool {
			return all[0].Tasks["plugin"].Attempt == 2 && all[0].Tasks["plugin"].State == TaskRunning
		})
		ask(1) // it has been honoured
		if n := w.count("stop"); n != 1 {
			w.Errorf("%d stops for one request", n)
		}
		w.has("stop disk/plugin", "exited disk/plugin 1 code=0 final=false", "starting disk/plugin 2", "started disk/plugin 2")
		ask(2) // the policy allows one restart: the second failure, though it exits with 0, is the last
		failed := w.awaitState("disk", AllocFailed)
		w.has("started disk/plugin 2", "stop disk/plugin", "exited disk/plugin 2 code=0 final=true")
		if !strings.Contains(failed.Reason, string(registry.CauseMissed)) {
			w.Errorf("reason %q", failed.Reason)
		}
	})
}

func TestAPluginWaitsForTheShimToLetItStart(t *testing.T) {
	inWorld(t, func(w *world) {
		n := 0
		w.shim.starting = func(host.AllocTask) error {
			if n++; n < 4 {
				return registry.Errorf(registry.ErrConflict, "the old process still answers")
			}
			return nil
		}
		w.submit(job("disk", "system", tasks("g", plugin("disk"))))
		r := w.awaitRunning("disk")
		if rec := r.Tasks["plugin"]; rec.Attempt != 1 || rec.Restarts.Total != 0 {
			w.Errorf("waiting counts as a failure: %+v", rec)
		}
	})
}

func TestUpdateKeepsUnchangedGroups(t *testing.T) {
	inWorld(t, func(w *world) {
		same, changed := tasks("same", task("same", "")), withVolumes(tasks("changed", task("main", "")))
		same.Count = 2
		w.submit(job("work", "service", same, changed))
		w.await("all run", func([]*AllocRecord) bool { return w.count("start") == 3 })
		before := idsOf(w.agent.Allocs())

		same.Count = 3
		changed.Tasks = append(changed.Tasks[:0:0], task("main", `{"user":"nobody"}`))
		w.submit(job("work", "service", same, changed))
		w.await("the new ones run", func(all []*AllocRecord) bool { return w.count("start") == 5 && len(unended(all, lastRank)) == 4 })
		after := idsOf(w.agent.Allocs())
		for _, slot := range []string{"same[0]", "same[1]"} {
			if before[slot] != after[slot] {
				w.Errorf("%s was replaced", slot)
			}
		}
		if before["changed[0]"] == after["changed[0]"] || after["same[2]"] == "" {
			w.Errorf("before %v, after %v", before, after)
		}
		w.has("prepared work", "start work/main", "stop work/main", "released work", "prepared work", "start work/main")
		if n := w.count("stop"); n != 1 {
			w.Errorf("%d tasks were stopped", n)
		}

		w.submit(job("work", "service", same)) // the other group is gone
		w.await("it has ended", func(all []*AllocRecord) bool { return len(unended(all, lastRank)) == 3 })
	})
}

func TestAKeptAllocThatFailsIsNotReplaced(t *testing.T) {
	inWorld(t, func(w *world) {
		j := job("work", "service", tasks("g", task("main", `{"restart":[{"attempts":0}]}`)))
		w.submit(j)
		r := w.awaitRunning("work")
		w.submit(j)
		w.await("it is of the second submission", func(all []*AllocRecord) bool { return all[0].Version == 2 })
		w.machine.end(attemptID(r.ID, "main", 1), 1, "die")
		w.awaitState("work", AllocFailed)
		synctest.Wait()
		if n := w.count("start"); n != 1 {
			w.Errorf("it was started %d times", n)
		}
	})
}

func idsOf(all []*AllocRecord) map[string]host.AllocID {
	out := map[string]host.AllocID{}
	for _, r := range all {
		if !r.State.Ended() {
			out[fmt.Sprintf("%s[%d]", r.Group.Name, r.Index)] = r.ID
		}
	}
	return out
}

func TestAPluginInUseIsNotStopped(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("disk", "system", tasks("g", plugin("disk"))))
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		w.awaitRunning("disk")
		r := w.awaitRunning("user")
		v := host.VolumeStatus{}
		v.ID, v.Holders = "data", []registry.Holder{{Claim: registry.Claim{Alloc: r.ID}}}
		w.shim.mu.Lock()
		w.shim.volumes = []host.VolumeStatus{v}
		w.shim.mu.Unlock()
		err := w.agent.StopJob(w.Context(), "disk", w.shim, StopOptions{})
		if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), `job user`) {
			w.Errorf("stopped under its user: %v", err)
		}
		if err := w.agent.StopJob(w.Context(), "disk", w.shim, StopOptions{Force: true, Purge: true}); err != nil {
			w.Error(err)
		}
		w.await("it has ended and is forgotten", func(all []*AllocRecord) bool { return len(all) == 1 && all[0].Job == "user" })
	})
}

func TestTakeDownSaysWhatIsLeft(t *testing.T) {
	inWorld(t, func(w *world) {
		w.shim.release = func(host.AllocID) error { return registry.Errorf(registry.ErrUnavailable, "the plugin is gone") }
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		w.submit(job("disk", "system", tasks("g", plugin("disk"))))
		w.awaitRunning("user")
		w.awaitRunning("disk")
		ctx, cancel := contextWithTimeout(w, time.Minute)
		defer cancel()
		err := w.agent.TakeDown(ctx)
		if err == nil || !strings.Contains(err.Error(), "the plugin is gone") {
			w.Errorf("taken down: %v", err)
		}
		if w.count("stop disk/plugin") != 0 {
			w.Error("the plugin was stopped though its volume is held")
		}
		ctx, cancel = contextWithTimeout(w, time.Minute)
		defer cancel()
		if err := w.agent.TakeDownByForce(ctx); err == nil {
			w.Error("a volume that was not given back is no error")
		}
		w.has("stop user/main", "stop disk/plugin")
	})
}

func TestForceGivesTasksNoTime(t *testing.T) {
	inWorld(t, func(w *world) {
		w.machine.deaf = true
		w.submit(job("slow", "service", tasks("g", task("main", `{"kill_timeout":"1h"}`))))
		w.awaitRunning("slow")
		ctx, cancel := contextWithTimeout(w, time.Minute)
		defer cancel()
		if err := w.agent.TakeDown(ctx); err == nil {
			w.Error("a task that uses its hour has ended within a minute")
		}
		ctx, cancel = contextWithTimeout(w, time.Minute)
		defer cancel()
		if err := w.agent.TakeDownByForce(ctx); err != nil {
			w.Errorf("by force: %v", err)
		}
		w.has("stop slow/main")
	})
}

func TestNotesAreToldFromTheFirst(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("user", "service", tasks("g", task("main", ""))))
		w.awaitRunning("user")
		ctx, cancel := context.WithCancel(w.Context())
		cancel() // what has happened by then is told all the same
		var told []string
		_ = w.agent.Notes(ctx, func(n Note) error {
			told = append(told, n.Text)
			return nil
		})
		if len(told) != 2 || !strings.HasPrefix(told[0], "placed") || !strings.HasPrefix(told[1], "started") {
			w.Errorf("told: %q", told)
		}
	})
}
