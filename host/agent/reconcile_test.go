package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
)

// exitAll ends all running tasks until all allocs have ended.
func (e *env) exitAll(code int) {
	e.Helper()
	for range 10 { // one round suffices, unless slots are filled again
		synctest.Wait()
		running := unended(e.agent.Allocs(), lastRank)
		if len(running) == 0 {
			return
		}
		for _, r := range running {
			if r.Tasks["main"].State == TaskRunning {
				e.exit(r, "main", code)
			}
		}
	}
	e.Fatalf("tasks are started again and again: %d starts", e.count("start"))
}

func TestBatchAllocRunsOnce(t *testing.T) {
	for _, c := range []struct{ count, code int }{{11, 0}, {12, 1}, {40, 0}} {
		t.Run(fmt.Sprintf("%d allocs with exit code %d", c.count, c.code), func(t *testing.T) {
			withAgent(t, func(e *env) {
				e.submit(batchJob("many", c.count, `{"restart":[{"attempts":0,"mode":"fail"}]}`))
				e.exitAll(c.code)
				check := func() {
					t.Helper()
					synctest.Wait()
					e.hasCount("start", c.count)
					slots := map[slot]bool{}
					for _, r := range e.agent.Allocs() {
						slots[r.slot()] = true
					}
					if len(slots) != c.count {
						t.Errorf("%d of %d slots are known", len(slots), c.count)
					}
				}
				check()
				e.restart(nil)
				check()
				e.stopAll()
				check()
			})
		})
	}
}

func TestKeptSlotsAreSmall(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(batchJob("many", 30, ""))
		e.exitAll(0)
		synctest.Wait()
		pruned := 0
		for _, r := range e.agent.Allocs() {
			files, err := os.ReadDir(e.agent.dirs(r.ID).root)
			if err != nil || r.Pruned != (len(files) == 1) || files[0].Name() != "alloc.json" {
				t.Errorf("alloc %s is pruned: %v, its directory: %v %v", r.ID, r.Pruned, files, err)
			}
			if !r.Pruned {
				continue
			}
			pruned++
			if text, err := json.Marshal(r); err != nil || len(text) > 1000 {
				t.Errorf("%d bytes are kept of an ended alloc: %s, %v", len(text), text, err)
			}
			if err := e.agent.Logs(e.Context(), r.ID, "main", LogOptions{Stream: taskdriver.Stdout},
				os.Stderr); err == nil {
				t.Error("removed logs are read as empty")
			}
		}
		if pruned != 30-maxEnded {
			t.Errorf("%d of 30 allocs are pruned", pruned)
		}
	})
}

func TestUnwantedSlotsAreRemoved(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(batchJob("many", 40, ""))
		e.exitAll(0)
		e.submit(batchJob("many", 2, ""))
		e.await("only the newest are left", func(all []*AllocRecord) bool { return len(all) <= maxEnded+2 })
		var first host.AllocID
		for _, r := range e.agent.Allocs() {
			if r.Index == 0 {
				first = r.ID
			}
		}
		e.hasCount("start", 40)
		if first == "" {
			t.Error("slot 0 is empty")
		}
	})
}

func TestBatchResubmittedBeforeItsAllocHasEnded(t *testing.T) {
	complete := func(e *env, r *AllocRecord) { e.exit(r, "main", 0) }
	for name, c := range map[string]struct {
		end    func(*env, *AllocRecord)
		rerun  bool
		killed bool // the agent, after that
		starts int
	}{
		"complete":           {complete, false, false, 1},
		"complete and rerun": {complete, true, false, 2},
		"rerun and killed":   {complete, true, true, 2},
		"failed":             {func(e *env, r *AllocRecord) { e.exit(r, "main", 1) }, false, false, 2},
		"stopped":            {func(e *env, _ *AllocRecord) { e.stopJob("work", StopOptions{}) }, false, false, 2},
	} {
		t.Run(name, func(t *testing.T) {
			withAgent(t, func(e *env) {
				work := job("work", "batch",
					withVolumes(tasks("g", task("main", `{"restart":[{"attempts":0,"mode":"fail"}]}`))))
				var killed atomic.Bool
				e.shim.release = func(host.AllocID) error {
					if time.Sleep(time.Minute); killed.Load() {
						return context.Canceled
					}
					return nil
				}
				e.submit(work)
				c.end(e, e.awaitRunning("work"))
				e.awaitState("work", AllocReleasing)
				e.must(e.trySubmit(work, SubmitOptions{Rerun: c.rerun}))
				if c.killed {
					killed.Store(true)
					e.restart(func() { killed.Store(false) })
				}
				time.Sleep(time.Hour)
				synctest.Wait()
				e.hasCount("start", c.starts)
			})
		})
	}
}

// A batch job is submitted again while its alloc, whose task is complete, still stops another task.
func TestBatchResubmittedWhileItsAllocEnds(t *testing.T) {
	for main, other := range map[string]string{
		"":                `{"kill_timeout":"1m","lifecycle":[{"hook":"prestart","sidecar":true}]}`,
		`{"leader":true}`: `{"kill_timeout":"1m"}`,
	} {
		t.Run(main, func(t *testing.T) {
			withAgent(t, func(e *env) {
				e.driver.ignoreTerm = true
				work := job("work", "batch", tasks("g", task("main", main), task("other", other)))
				e.submit(work)
				e.exit(e.awaitRunning("work"), "main", 0)
				synctest.Wait()
				e.must(e.trySubmit(work, SubmitOptions{Rerun: true}))
				e.awaitCount("start work/main", 2)
			})
		})
	}
}

// If a batch job is submitted again unchanged, only allocs that are not complete run again. After a stop or with Rerun,
// all run again.
func TestResubmittedBatchRunsWhatIsNotComplete(t *testing.T) {
	const once = `{"restart":[{"attempts":0,"mode":"fail"}]}`
	for name, c := range map[string]struct {
		code  int
		stop  *StopOptions
		rerun bool
		more  int // starts
	}{
		"complete":             {},
		"complete and rerun":   {rerun: true, more: 2},
		"complete and stopped": {stop: &StopOptions{}, more: 2},
		"complete and purged":  {stop: &StopOptions{Purge: true}, more: 2},
		"failed":               {code: 1, more: 2},
		"failed and stopped":   {code: 1, stop: &StopOptions{}, more: 2},
	} {
		t.Run(name, func(t *testing.T) {
			withAgent(t, func(e *env) {
				e.submit(batchJob("work", 2, once))
				e.exitAll(c.code)
				if c.stop != nil {
					e.stopJob("work", *c.stop)
				}
				e.must(e.trySubmit(batchJob("work", 2, once), SubmitOptions{Rerun: c.rerun}))
				e.exitAll(0)
				e.hasCount("start", 2+c.more)
				wanted, fills := e.agent.job("work").Slots()
				have := 0
				for _, r := range e.agent.Allocs() {
					if fills(r) {
						have++
					}
				}
				if wanted != 2 || have != 2 {
					e.Errorf("%d of %d slots are filled", have, wanted)
				}
			})
		})
	}
}
