package agent

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// lossOf are the ways in which an agent may lose its ledger. Each gets a copy that was made before the jobs were submitted.
var lossOf = map[string]func(path string, old []byte) error{
	"removed":   func(path string, _ []byte) error { return os.Remove(path) },
	"emptied":   func(path string, _ []byte) error { return os.Truncate(path, 0) },
	"truncated": func(path string, _ []byte) error { return os.Truncate(path, 3*int64(os.Getpagesize())) },
	"cut off":   func(path string, _ []byte) error { return os.Truncate(path, 100) },
	"zeroed":    func(path string, _ []byte) error { return os.WriteFile(path, make([]byte, 1<<16), 0o600) },
	"restored":  func(path string, old []byte) error { return os.WriteFile(path, old, 0o600) },
}

// lose runs a plugin and a user of its volume, ends the agent and damages its ledger. Both tasks go on.
func (w *world) lose(damage func(path string, old []byte) error) (users, plugins *AllocRecord) {
	w.Helper()
	w.kill()
	old, err := os.ReadFile(ledgerPath(w.dir))
	if err != nil {
		w.Fatal(err)
	}
	w.open()
	w.run()
	w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
	w.submit(job("user", "service", withVolumes(tasks("g", task("main", ""))))) // its allocs are another version's now
	w.submit(job("disk", "system", tasks("g", plugin("disk"))))
	users, plugins = w.awaitRunning("user"), w.awaitRunning("disk")
	w.await("the second version", func(all []*AllocRecord) bool {
		return slices.ContainsFunc(all, func(r *AllocRecord) bool { return r.ID == users.ID && r.Version == 2 })
	})
	w.kill()
	if err := damage(ledgerPath(w.dir), old); err != nil {
		w.Fatal(err)
	}
	return users, plugins
}

// reopen is open with a way to recover; it returns what keeps the agent from starting.
func (w *world) reopen(how Recovery) (host.Workload, error) {
	a, err := New(Config{
		StateDir: w.dir, Name: "node1", Recover: how, Drivers: []taskdriver.Driver{w.machine}, Find: w.machine.find, Parents: w.machine.parents,
	})
	if err != nil {
		return host.Workload{}, err
	}
	w.agent = a
	living, err := a.Workload(w.Context())
	if err != nil {
		err = errors.Join(err, a.Close())
	}
	return living, err
}

func TestLostLedgerBeneathLivingTasksIsRefused(t *testing.T) {
	for name, damage := range lossOf {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				u, d := w.lose(damage)
				for range 2 { // to ask twice changes nothing
					_, err := w.reopen(RecoverNone)
					if err == nil {
						w.Fatal("the agent starts, and knows nothing of what runs")
					}
					for _, want := range []string{"agent.db", "--recover=adopt", "--recover=stop"} {
						if !strings.Contains(err.Error(), want) {
							w.Errorf("the refusal does not mention %s: %v", want, err)
						}
					}
					if errors.Is(err, registry.ErrDamaged) {
						continue // nobody can read which ones it knows
					}
					for _, want := range []string{short(u.ID), `job user`, `volume "data"`, short(d.ID), `plugin "disk"`} {
						if !strings.Contains(err.Error(), want) {
							w.Errorf("the refusal does not mention %s: %v", want, err)
						}
					}
				}
				if _, err := w.reopen(RecoverAdopt); err != nil { // so that the world can end
					w.Fatal(err)
				}
				w.run()
			})
		})
	}
}

func TestAdoptionRestoresJobsAndAllocs(t *testing.T) {
	for name, damage := range lossOf {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				node := w.agent.Node()
				u, d := w.lose(damage)
				before := w.all()
				living, err := w.reopen(RecoverAdopt)
				if err != nil {
					w.Fatal(err)
				}
				if len(living.Allocs) != 1 || living.Allocs[0].Alloc != u.ID || string(living.Allocs[0].Sealed) != "volumes" {
					w.Errorf("living allocs: %+v", living.Allocs)
				}
				started := d.Tasks["plugin"].Started
				if l := living.Tasks; len(l) != 1 || l[0].Alloc != d.ID || !l[0].Running || l[0].Started != started {
					w.Errorf("living tasks: %+v", living.Tasks)
				}
				if w.agent.Node() != node {
					w.Errorf("the node was %+v and is %+v", node, w.agent.Node())
				}
				w.run()
				synctest.Wait()
				w.again(nil) // also the agent after that one knows them
				if now := w.all(); len(now) != len(before) {
					w.Errorf("what runs was touched: %v", now[len(before):])
				}
				got := w.awaitRunning("user")
				handle := got.Tasks["main"].Handle.ID
				if got.ID != u.ID || got.Version != 2 || got.Plans == nil || handle != attemptID(u.ID, "main", 1) {
					w.Errorf("the alloc was %+v and is %+v", u, got)
				}
				jobs := w.agent.Jobs()
				if len(jobs) != 2 || jobs[1].Version != 2 || jobs[1].Source.Name != "user.hcl" || jobs[1].Stopped ||
					jobs[1].Job.Digest != "d-user" {
					w.Errorf("jobs: %+v", jobs)
				}
				w.takeDown()
				w.has("stop user/main", "released user", "stop disk/plugin")
			})
		})
	}
}

func TestLostAllocsAreStoppedUsersFirst(t *testing.T) {
	inWorld(t, func(w *world) {
		w.shim.release = func(host.AllocID) error {
			time.Sleep(time.Minute)
			if w.count("stop disk/plugin") > 0 {
				w.Error("the plugin was stopped beneath a volume in use")
			}
			return nil
		}
		w.lose(lossOf["emptied"])
		if _, err := w.reopen(RecoverStop); err != nil {
			w.Fatal(err)
		}
		w.run()
		synctest.Wait()
		w.again(nil) // one that dies meanwhile does not change the order
		w.await("all is gone", func(all []*AllocRecord) bool { return len(all) == 0 })
		w.has("stop user/main", "released user", "stop disk/plugin", "exited disk/plugin 1 code=0 final=true")
		if jobs := w.agent.Jobs(); len(jobs) != 0 {
			w.Errorf("jobs that were to be taken down are kept: %+v", jobs)
		}
	})
}

// An attempt that was started after the copy was written is known to its directory alone.
func TestAdoptionFindsTheNewestAttempt(t *testing.T) {
	inWorld(t, func(w *world) {
		_, d := w.lose(func(string, []byte) error { return nil })
		path := w.agent.dirs(d.ID).copy()
		old, err := os.ReadFile(path)
		if err != nil {
			w.Fatal(err)
		}
		w.open()
		w.run()
		w.machine.end(attemptID(d.ID, "plugin", 1), 1, "die")
		w.await("attempt 2 runs", func(all []*AllocRecord) bool {
			return slices.ContainsFunc(all, func(r *AllocRecord) bool {
				t := r.Tasks["plugin"]
				return t != nil && t.Attempt == 2 && t.State == TaskRunning
			})
		})
		w.kill()
		if err := errors.Join(os.WriteFile(path, old, 0o600), os.Remove(ledgerPath(w.dir))); err != nil {
			w.Fatal(err)
		}
		if _, err := w.reopen(RecoverAdopt); err != nil {
			w.Fatal(err)
		}
		w.run()
		synctest.Wait()
		if n := w.count("start disk/plugin"); n != 2 {
			w.Errorf("%d starts of the plugin: one runs beside the other", n)
		}
		w.takeDown()
		if n := w.count("stop disk/plugin"); n != 1 {
			w.Errorf("the plugin was stopped %d times", n)
		}
	})
}

func TestEndedAllocsDoNotKeepAnAgentFromStarting(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("work", "batch", tasks("g", task("main", ""))))
		r := w.awaitRunning("work")
		w.machine.end(attemptID(r.ID, "main", 1), 0, "end")
		w.awaitState("work", AllocComplete)
		w.again(func() {
			if err := os.Remove(ledgerPath(w.dir)); err != nil {
				w.Fatal(err)
			}
		})
	})
}

func TestNoTaskStartsWithoutACopyOfItsAlloc(t *testing.T) {
	inWorld(t, func(w *world) {
		blocked := func() string { // a directory at the file's place
			for _, r := range w.agent.Allocs() {
				return w.agent.dirs(r.ID).copy()
			}
			return ""
		}
		w.shim.prepare = func(host.AllocGroup) error { return os.Mkdir(blocked(), 0o700) }
		w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
		w.await("the reason is shown", func(all []*AllocRecord) bool {
			return len(all) == 1 && strings.Contains(all[0].Reason, "cannot write a copy of the alloc")
		})
		if w.count("start") != 0 {
			w.Error("a task was started")
		}
		if err := os.Remove(blocked()); err != nil {
			w.Fatal(err)
		}
		if r := w.awaitRunning("user"); r.Reason != "" {
			w.Errorf("a running alloc still waits for %q", r.Reason)
		}
	})
}

// Slots that a batch job has settled stay so, also those whose allocs are pruned: adopted work is not done twice.
func TestAdoptionKeepsSettledSlots(t *testing.T) {
	inWorld(t, func(w *world) {
		g := tasks("g", task("main", ""))
		g.Count = keptEnded + 5
		w.submit(job("work", "batch", g))
		running := func(all []*AllocRecord) (n int) {
			for _, r := range all {
				if r.Tasks["main"].State == TaskRunning {
					n++
				}
			}
			return n
		}
		w.await("all run", func(all []*AllocRecord) bool { return running(all) == g.Count })
		for _, r := range w.agent.Allocs()[1:] {
			w.machine.end(attemptID(r.ID, "main", 1), 0, "end")
		}
		w.await("all but one have ended", func(all []*AllocRecord) bool { return len(unended(all, lastRank)) == 1 })
		w.kill()
		if err := os.Truncate(ledgerPath(w.dir), 0); err != nil {
			w.Fatal(err)
		}
		if _, err := w.reopen(RecoverAdopt); err != nil {
			w.Fatal(err)
		}
		w.run()
		synctest.Wait()
		if n := w.count("start "); n != g.Count {
			w.Errorf("%d starts of %d tasks", n, g.Count)
		}
	})
}

// Without any record of them nobody can say which volumes running tasks use: there is nothing to adopt, and no order to stop them in.
func TestTasksWithoutAnyRecordAreNeverIgnored(t *testing.T) {
	inWorld(t, func(w *world) {
		u, d := w.lose(func(path string, _ []byte) error { return os.RemoveAll(filepath.Dir(path)) })
		for _, how := range []Recovery{RecoverNone, RecoverAdopt, RecoverStop, RecoverNone} {
			_, err := w.reopen(how)
			if err == nil {
				w.Fatalf("the agent starts with %q, and knows nothing of what runs", how)
			}
			for _, want := range []string{short(u.ID), short(d.ID), `task "plugin"`, "agent.db", "alloc.json"} {
				if !strings.Contains(err.Error(), want) {
					w.Errorf("the refusal does not mention %s: %v", want, err)
				}
			}
			if !regexp.MustCompile(`kill -TERM (1001 1002|1002 1001),`).MatchString(err.Error()) {
				w.Errorf("the refusal does not say how to stop both tasks: %v", err)
			}
		}
		w.machine.end(attemptID(u.ID, "main", 1), 0, "end")
		w.machine.end(attemptID(d.ID, "plugin", 1), 0, "end")
		if _, err := w.reopen(RecoverNone); err != nil {
			w.Errorf("nothing runs any more, and the agent does not start: %v", err)
		}
		w.run()
	})
}

// Without the shim's records nothing says that a running alloc's volumes are in use.
func TestLostShimRecordsBeneathUsersOfVolumesAreRefused(t *testing.T) {
	inWorld(t, func(w *world) {
		u, _ := w.lose(func(string, []byte) error { return os.Remove(w.shimRecords()) })
		for range 2 {
			_, err := w.reopen(RecoverNone)
			if err == nil {
				w.Fatal("the agent starts, and the shim knows nothing of the volume in use")
			}
			for _, want := range []string{"shim.db", short(u.ID), `job user`, "--recover=adopt", "--recover=stop", "doctor --repair"} {
				if !strings.Contains(err.Error(), want) {
					w.Errorf("the refusal does not mention %s: %v", want, err)
				}
			}
			if strings.Contains(err.Error(), `"disk"`) {
				w.Errorf("the plugin's alloc uses no volume: %v", err)
			}
		}
		if _, err := w.reopen(RecoverAdopt); err != nil {
			w.Fatal(err)
		}
		w.run()
		r := w.awaitRunning("user")
		if !slices.ContainsFunc(r.Notes, func(n Note) bool { return strings.Contains(n.Text, "shim.db was lost") }) {
			w.Errorf("its notes do not say what was lost: %+v", r.Notes)
		}
		w.kill()
		if _, err := w.reopen(RecoverStop); err != nil {
			w.Fatal(err)
		}
		w.run()
		w.await("the user is gone", func(all []*AllocRecord) bool { return len(all) == 1 && all[0].Job == "disk" })
		w.takeDown()
	})
}
