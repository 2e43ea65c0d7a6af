package agent

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"testing/synctest"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
)

// batch is a job of one task that is to run so many times.
func batch(id string, count int, rest string) *hooks.Job {
	g := tasks("g", task("main", rest))
	g.Count = count
	return job(id, "batch", g)
}

// endAll has every task that runs end with the code, until nothing is left to run.
func (w *world) endAll(code int) {
	w.Helper()
	for range 10 { // one does, unless slots are filled again
		synctest.Wait()
		running := unended(w.agent.Allocs(), lastRank)
		if len(running) == 0 {
			return
		}
		for _, r := range running {
			if r.Tasks["main"].State == TaskRunning {
				w.machine.end(attemptID(r.ID, "main", r.Tasks["main"].Attempt), code, "end")
			}
		}
	}
	w.Fatalf("tasks are started again and again: %d starts", w.count("start"))
}

func TestBatchAllocRunsOnce(t *testing.T) {
	for _, c := range []struct{ count, code int }{{11, 0}, {12, 0}, {12, 1}, {40, 0}} {
		t.Run(fmt.Sprintf("%d allocs end with %d", c.count, c.code), func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.submit(batch("many", c.count, `{"restart":[{"attempts":0,"mode":"fail"}]}`))
				w.endAll(c.code)
				check := func(when string) {
					t.Helper()
					synctest.Wait()
					if n := w.count("start"); n != c.count {
						t.Errorf("%s: %d starts for %d allocs", when, n, c.count)
					}
					slots := map[slot]bool{}
					for _, r := range w.agent.Allocs() {
						slots[r.slot()] = true
					}
					if len(slots) != c.count {
						t.Errorf("%s: %d of %d slots are known", when, len(slots), c.count)
					}
				}
				check("when all have ended")
				w.kill()
				w.open()
				w.run()
				check("under the next agent")
				w.takeDown()
				check("when everything is taken down")
			})
		})
	}
}

func TestSettledSlotsAreKeptSmall(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(batch("many", 30, ""))
		w.endAll(0)
		synctest.Wait()
		pruned := 0
		for _, r := range w.agent.Allocs() {
			files, err := os.ReadDir(w.agent.dirs(r.ID).root)
			if err != nil || r.Pruned != (len(files) == 1) || files[0].Name() != "alloc.json" {
				t.Errorf("alloc %s is pruned: %v, its directory: %v %v", r.ID, r.Pruned, files, err)
			}
			text, err := json.Marshal(r)
			if err != nil {
				t.Fatal(err)
			}
			if r.Pruned {
				pruned++
				if len(text) > 1000 {
					t.Errorf("%d bytes are kept of an ended alloc: %s", len(text), text)
				}
				if err := w.agent.Logs(w.Context(), r.ID, "main", taskdriver.Stdout, false, os.Stderr); err == nil {
					t.Error("the logs that were removed are read as empty")
				}
			}
		}
		if pruned != 30-keptEnded {
			t.Errorf("%d of 30 allocs are pruned", pruned)
		}
	})
}

// What a job wants no more is forgotten: slots beyond a smaller count, and those of a changed group.
func TestUnwantedSlotsAreForgotten(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(batch("many", 40, ""))
		w.endAll(0)
		w.submit(batch("many", 2, ""))
		w.await("only the newest are left", func(all []*AllocRecord) bool { return len(all) <= keptEnded+2 })
		var first host.AllocID
		for _, r := range w.agent.Allocs() {
			if r.Index == 0 {
				first = r.ID
			}
		}
		if w.count("start") != 40 || first == "" {
			t.Errorf("%d starts, slot 0 is filled by %q", w.count("start"), first)
		}
	})
}

// A batch job that is submitted again unchanged runs only what is not complete, unless it was stopped or is to be run again.
func TestResubmittedBatchRunsWhatIsNotComplete(t *testing.T) {
	const once = `{"restart":[{"attempts":0,"mode":"fail"}]}`
	for name, c := range map[string]struct {
		code    int
		between func(w *world)
		options SubmitOptions
		more    int // starts
	}{
		"complete":             {},
		"complete and rerun":   {options: SubmitOptions{Rerun: true}, more: 2},
		"complete and stopped": {between: func(w *world) { w.stopJob("work", StopOptions{}) }, more: 2},
		"complete and purged":  {between: func(w *world) { w.stopJob("work", StopOptions{Purge: true}) }, more: 2},
		"failed":               {code: 1, more: 2},
		"failed and stopped":   {code: 1, between: func(w *world) { w.stopJob("work", StopOptions{}) }, more: 2},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.submit(batch("work", 2, once))
				w.endAll(c.code)
				if c.between != nil {
					c.between(w)
				}
				j, err := w.agent.Submit(w.Context(), batch("work", 2, once), Source{}, w.shim, c.options)
				if err != nil {
					w.Fatal(err)
				}
				w.endAll(0)
				if n := w.count("start") - 2; n != c.more {
					w.Errorf("%d allocs were run again, want %d", n, c.more)
				}
				wanted, stands := j.Slots()
				have := 0
				for _, r := range w.agent.Allocs() {
					if stands(r) {
						have++
					}
				}
				if wanted != 2 || have != 2 {
					w.Errorf("%d of %d allocs stand for the job", have, wanted)
				}
			})
		})
	}
}

func (w *world) stopJob(id string, o StopOptions) {
	w.Helper()
	if err := w.agent.StopJob(w.Context(), id, w.shim, o); err != nil {
		w.Fatal(err)
	}
}
