package agent

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"holdfast/host"
	"holdfast/registry"
)

func TestOperatorRestartsATaskWithoutAnEffectOnThePolicy(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(userJob("user", ""))
		r := e.awaitRunning("user")
		for n := range 4 { // more than the policy allows
			tasks, err := e.agent.RestartAlloc(e.Context(), r.ID, "", e.shim, false)
			if err != nil || len(tasks) != 1 || tasks[0] != "main" {
				e.Fatalf("%v, %v", tasks, err)
			}
			e.awaitAttempt("user", "main", uint64(n+2))
		}
		now := e.agent.record(r.ID)
		if now.State != AllocRunning || now.Tasks["main"].Restarts.Count != 0 || now.Tasks["main"].Restarts.Total != 4 {
			e.Errorf("%s, %+v", now.State, now.Tasks["main"])
		}
		_, err := e.agent.RestartAlloc(e.Context(), r.ID, "other", e.shim, false)
		if !errors.Is(err, registry.ErrNotFound) {
			e.Errorf("an unknown task: %v", err)
		}
	})
}

// An operator has requested a restart, and the agent is killed while the task uses its grace.
func TestRestartOfAnOperatorSurvivesTheAgent(t *testing.T) {
	for name, between := range map[string]func(*env, *AllocRecord){
		"the task runs": func(*env, *AllocRecord) {},
		"it has ended":  func(e *env, r *AllocRecord) { e.exit(r, "main", 143) },
	} {
		t.Run(name, func(t *testing.T) {
			withAgent(t, func(e *env) {
				e.driver.ignoreTerm = true
				e.submit(serviceJob("db", `{"kill_timeout":"1h","restart":[{"attempts":0,"mode":"fail"}]}`))
				r := e.awaitRunning("db")
				if _, err := e.agent.RestartAlloc(e.Context(), r.ID, "", e.shim, false); err != nil {
					e.Fatal(err)
				}
				synctest.Wait()
				e.restart(func() {
					e.driver.ignoreTerm = false
					between(e, r)
				})
				e.awaitAttempt("db", "main", 2)
			})
		})
	}
}

// An alloc is stopped while its task is restarted, and the restart policy allows no restart.
func TestAllocThatIsStoppedDuringARestartIsReplaced(t *testing.T) {
	withAgent(t, func(e *env) {
		e.driver.ignoreTerm = true
		p := plugin("disk")
		p.Rest = []byte(`{"restart":[{"attempts":0,"mode":"fail"}]}`)
		e.submit(job("disk", "service", tasks("g", p)))
		r := e.awaitRunning("disk")
		e.shim.restarts <- host.PluginTask{TaskKey: host.TaskKey{Alloc: r.ID, Task: "plugin"},
			Restart: &registry.RestartRequest{Attempt: 1, Cause: registry.CauseMissed}}
		synctest.Wait()
		e.must(e.agent.StopAlloc(e.Context(), r.ID, e.shim, false))
		e.awaitAlloc("disk", "another alloc",
			func(other *AllocRecord) bool { return other.ID != r.ID && other.State == AllocRunning })
		if was := e.agent.record(r.ID); was.State != AllocStopped {
			e.Errorf("the alloc is %s: %s", was.State, was.Reason)
		}
	})
}

// A batch task ends with code 0 because an operator restarts it. Its alloc is stopped before the next attempt runs. The
// alloc is not complete, so its job places another one.
func TestRestartedBatchTaskIsNotComplete(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(batchJob("work", 1, ""))
		r := e.awaitRunning("work")
		e.driver.prepare = func(ctx context.Context, _ func(string)) error { // as a slow pull of an image
			<-ctx.Done()
			return ctx.Err()
		}
		_, err := e.agent.RestartAlloc(e.Context(), r.ID, "", e.shim, false)
		e.must(err)
		synctest.Wait()
		e.must(e.agent.StopAlloc(e.Context(), r.ID, e.shim, false))
		e.awaitState("work", AllocStopped)
		e.awaitAlloc("work", "another alloc", func(other *AllocRecord) bool { return other.ID != r.ID })
		e.stopJob("work", StopOptions{})
		e.awaitAllEnded()
	})
}

func TestStoppedAllocIsReplaced(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(userJob("user", ""))
		r := e.awaitRunning("user")
		if err := e.agent.StopAlloc(e.Context(), r.ID, e.shim, false); err != nil {
			e.Fatal(err)
		}
		e.await("another alloc", func(all []*AllocRecord) bool {
			other := slices.IndexFunc(all, func(other *AllocRecord) bool { return other.ID != r.ID })
			return len(all) == 2 && e.agent.record(r.ID).State == AllocStopped && all[other].State == AllocRunning
		})
		if err := e.agent.StopAlloc(e.Context(), r.ID, e.shim, false); !errors.Is(err, registry.ErrConflict) {
			e.Errorf("an ended alloc: %v", err)
		}
		if _, err := e.agent.RestartAlloc(e.Context(), r.ID, "", e.shim, false); !errors.Is(err, registry.ErrConflict) {
			e.Errorf("an ended alloc: %v", err)
		}
	})
}

// If an alloc was to be replaced and its job is then stopped, its volumes are deleted, even if the first release still
// waits.
func TestJobStoppedDuringAReplacementKeepsNoVolume(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(userJob("user", ""))
		r := e.awaitRunning("user")
		e.shim.stuck.Store(true)
		e.must(e.agent.StopAlloc(e.Context(), r.ID, e.shim, false))
		synctest.Wait()
		e.hasCount("kept volumes of user", 1)
		e.shim.stuck.Store(false) // for later calls
		e.stopJob("user", StopOptions{})
		e.awaitAllEnded()
		e.hasCount("kept volumes of user", 1)
		e.hasCount("released user", 1)
	})
}

func TestTailKeepsTheLastLines(t *testing.T) {
	for _, c := range []struct {
		text string
		keep int
		want string
	}{
		{"", 2, ""}, {"a\n", 2, "a\n"}, {"a\nb\nc\n", 2, "b\nc\n"}, {"a\nb\nc", 2, "b\nc"}, {"a\nb\nc", 1, "c"},
		{"\n\n\n", 2, "\n\n"}, {"a\nb\n", 1, "b\n"}, {"1\n2\n3\n4\n5\n6\n7\n8\n", 2, "7\n8\n"},
	} {
		for _, chunk := range []int{1, 3, 100} {
			var present lineCounter
			var out bytes.Buffer
			skipper := &lineSkipper{to: &out}
			for part := range slices.Chunk([]byte(c.text), chunk) {
				_, _ = present.Write(part)
			}
			skipper.skip = present.lines() - c.keep
			for part := range slices.Chunk([]byte(c.text+"new"), chunk) {
				if n, err := skipper.Write(part); n != len(part) || err != nil {
					t.Fatal(n, err)
				}
			}
			if got := strings.TrimSuffix(out.String(), "new"); got != c.want {
				t.Errorf("the last %d lines of %q, in chunks of %d: %q", c.keep, c.text, chunk, got)
			}
		}
	}
}
