package agent

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	bolt "go.etcd.io/bbolt"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

func contextWithTimeout(w *world, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(w.Context(), d)
}

// again is a new agent on what the old one has left; between happens while there is none.
func (w *world) again(between func()) host.Workload {
	w.Helper()
	w.kill()
	if between != nil {
		between()
	}
	w.open()
	living, err := w.agent.Workload(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	w.run()
	synctest.Wait()
	return living
}

func TestANewAgentAdoptsWhatLives(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("disk", "system", tasks("g", plugin("disk"))))
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		d, u := w.awaitRunning("disk"), w.awaitRunning("user")
		living := w.again(nil)
		if len(living.Allocs) != 1 || living.Allocs[0].Alloc != u.ID || string(living.Allocs[0].Sealed) != "volumes" {
			w.Errorf("living allocs: %+v", living.Allocs)
		}
		if len(living.Tasks) != 1 || living.Tasks[0].Alloc != d.ID || !living.Tasks[0].Running || living.Tasks[0].Attempt != 1 || living.Tasks[0].Started.Boot == "" {
			w.Errorf("living tasks: %+v", living.Tasks)
		}
		if n := w.count("start "); n != 2 {
			w.Errorf("%d starts: what lives was started again", n)
		}
		if w.count("prepared") != 1 || w.count("stop") != 0 {
			w.Errorf("what lives was touched: %v", w.all())
		}
		w.takeDown() // the adopted tasks are still the agent's
		w.has("stop user/main", "released user", "stop disk/plugin", "exited disk/plugin 1 code=0 final=true")
	})
}

func TestANewAgentLearnsHowTasksHaveEnded(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("disk", "system", tasks("g", plugin("disk"))))
		w.submit(job("work", "batch", withVolumes(tasks("g", task("main", "")))))
		d, b := w.awaitRunning("disk"), w.awaitRunning("work")
		living := w.again(func() {
			w.machine.end(attemptID(d.ID, "plugin", 1), 9, "die")
			w.machine.end(attemptID(b.ID, "main", 1), 0, "end")
		})
		if len(living.Tasks) != 1 || living.Tasks[0].Running {
			w.Errorf("a dead plugin lives: %+v", living.Tasks)
		}
		if len(living.Allocs) != 1 {
			w.Errorf("an alloc that is not released yet is left out: %+v", living.Allocs)
		}
		w.awaitState("work", AllocComplete) // it is taken down
		w.awaitRunning("disk")
		w.has("die disk/plugin", "exited disk/plugin 1 code=9 final=false", "starting disk/plugin 2", "start disk/plugin")
		w.has("end work/main", "released work")
		if n := w.count("start work"); n != 1 {
			w.Errorf("finished work was done %d times", n)
		}
	})
}

// An agent that dies between a start and its note leaves a task that nobody has noted.
func TestAnUnnotedStartIsFound(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("disk", "system", tasks("g", plugin("disk"))))
		r := w.awaitRunning("disk")
		w.again(func() {
			w.edit(r.ID, func(rec *AllocRecord) { rec.Tasks["plugin"].State, rec.Tasks["plugin"].Handle = TaskStarting, nil })
		})
		if n := w.count("start "); n != 1 {
			w.Errorf("started %d times", n)
		}
		w.takeDown()
		w.has("stop disk/plugin")
	})
}

func TestAnAttemptThatNeverRanIsNotUsedAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("disk", "system", tasks("g", plugin("disk"))))
		r := w.awaitRunning("disk")
		w.again(func() {
			w.machine.end(attemptID(r.ID, "plugin", 1), 0, "die")
			w.edit(r.ID, func(rec *AllocRecord) {
				rec.Tasks["plugin"].State, rec.Tasks["plugin"].Handle, rec.Tasks["plugin"].Attempt = TaskStarting, nil, 2
			})
		})
		w.await("the next one runs", func(all []*AllocRecord) bool { return all[0].Tasks["plugin"].State == TaskRunning })
		w.has("starting disk/plugin 1", "starting disk/plugin 3")
	})
}

func TestAStopIsFinishedByTheNextAgent(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		r := w.awaitRunning("user")
		w.again(func() {
			w.edit(r.ID, func(rec *AllocRecord) { rec.Stop, rec.State = true, AllocStopping })
		})
		w.awaitState("user", AllocStopped)
		w.has("stop user/main", "released user")
	})
}

func TestVolumesArePreparedAgainAfterABoot(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", `{"restart":[{"delay":"0s"}]}`)))))
		r := w.awaitRunning("user")
		w.again(func() {
			w.machine.end(attemptID(r.ID, "main", 1), -1, "boot")
			w.edit(r.ID, func(rec *AllocRecord) { rec.Boot = "another" })
		})
		w.await("it runs again", func(all []*AllocRecord) bool { return all[0].Tasks["main"].Attempt == 2 })
		w.has("prepared user", "start user/main", "boot user/main", "prepared user", "start user/main")
	})
}

func TestATakenDownJobRunsAgainWithTheNextAgent(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		w.awaitRunning("user")
		w.takeDown()
		w.again(nil)
		w.awaitRunning("user")
		w.has("stop user/main", "released user", "prepared user", "start user/main")
	})
}

// edit changes a record as a dead agent has left it.
func (w *world) edit(id host.AllocID, change func(*AllocRecord)) {
	w.Helper()
	l, err := openLedger(filepath.Join(w.dir, "agent", "agent.db"))
	if err != nil {
		w.Fatal(err)
	}
	_, allocs, err := l.load()
	if err != nil {
		w.Fatal(err)
	}
	change(allocs[id])
	if err := errors.Join(l.write(entry{allocsBucket, string(id), allocs[id]}), l.close()); err != nil {
		w.Fatal(err)
	}
}

func TestOneAgentAtATime(t *testing.T) {
	c := Config{StateDir: t.TempDir(), Drivers: []taskdriver.Driver{&machine{}}}
	first, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(c); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("a second agent: %v", err)
	}
	node := first.Node()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if second.Node() != node || node.ID == "" {
		t.Errorf("the node was %+v and is %+v", node, second.Node())
	}
}

func TestADamagedLedgerIsNotForgotten(t *testing.T) {
	dir := t.TempDir()
	c := Config{StateDir: dir, Drivers: []taskdriver.Driver{&machine{}}}
	a, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	broken := json.RawMessage(`{"id": 5}`)
	if err := errors.Join(a.ledger.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(allocsBucket).Put([]byte("x"), broken) }), a.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := New(c); !errors.Is(err, registry.ErrDamaged) {
		t.Errorf("a damaged record: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "agent", "agent.db"), []byte("no database"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(c); !errors.Is(err, registry.ErrDamaged) {
		t.Errorf("a damaged file: %v", err)
	}
}
