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

	"holdfast/host"
	"holdfast/registry"
)

// ledgerLosses are ways to damage the ledger. old is its content before the jobs were submitted.
var ledgerLosses = map[string]func(path string, old []byte) error{
	"removed":   func(path string, _ []byte) error { return os.Remove(path) },
	"emptied":   func(path string, _ []byte) error { return os.Truncate(path, 0) },
	"truncated": func(path string, _ []byte) error { return os.Truncate(path, 3*int64(os.Getpagesize())) },
	"cut off":   func(path string, _ []byte) error { return os.Truncate(path, 100) },
	"zeroed":    func(path string, _ []byte) error { return os.WriteFile(path, make([]byte, 1<<16), 0o600) },
	"restored":  func(path string, old []byte) error { return os.WriteFile(path, old, 0o600) },
	"a damaged record": func(path string, _ []byte) error {
		l, err := openLedger(path)
		if err != nil {
			return err
		}
		return errors.Join(l.write(entry{allocsBucket, "x", map[string]int{"id": 5}}), l.close())
	},
}

// lose runs a plugin and a user of its volume, mounts a volume for a container engine, ends the agent and damages its
// ledger. Both tasks keep running.
func (e *env) lose(damage func(path string, old []byte) error) (users, plugins *AllocRecord) {
	e.Helper()
	e.must(e.agent.setEngineMount("notes", &EngineMount{Volume: "notes", Alloc: "earlier"}))
	e.kill()
	old, err := os.ReadFile(ledgerPath(e.dir))
	e.must(err)
	e.open()
	e.run()
	e.submit(userJob("user", ""))
	plugins, _ = e.runPluginAndUser() // this submits the user again, as version 2
	users = e.awaitAlloc("user", "version 2", func(r *AllocRecord) bool {
		return r.Version == 2 && r.State == AllocRunning
	})
	e.engineMount("container", podman)
	e.kill()
	e.must(damage(ledgerPath(e.dir), old))
	return users, plugins
}

// reopen opens the agent again, and returns the error that keeps it from starting.
func (e *env) reopen(how Recovery) (host.Workload, error) {
	c := e.config()
	c.Recover = how
	a, err := New(c)
	if err != nil {
		return host.Workload{}, err
	}
	e.agent = a
	workload, err := a.Workload(e.Context())
	if err != nil {
		err = errors.Join(err, a.Close())
	}
	return workload, err
}

func (e *env) recover(how Recovery) {
	e.Helper()
	_, err := e.reopen(how)
	e.must(err)
	e.run()
	synctest.Wait()
}

// An agent whose ledger does not know running tasks does not start, and changes nothing. With RecoverAdopt it adopts
// the tasks. It always knows the mounts of container engines.
func TestLostRecordsAreRefusedOrAdopted(t *testing.T) {
	for name, damage := range ledgerLosses {
		t.Run(name, func(t *testing.T) {
			withAgent(t, func(e *env) {
				node := e.agent.Node()
				u, d := e.lose(damage)
				before := e.all()
				for range 2 {
					_, err := e.reopen(RecoverNone)
					e.hasError(err, nil, "agent.db", "--recover=adopt", "--recover=stop")
					if !errors.Is(err, registry.ErrDamaged) { // else no record can be read
						e.hasError(err, nil, short(u.ID), `job user`, `volume "data"`, short(d.ID), `plugin "disk"`)
					}
				}
				w, err := e.reopen(RecoverAdopt)
				e.must(err)
				if len(w.Allocs) != 2 || w.Allocs[1].Alloc != u.ID || string(w.Allocs[1].Sealed) != "volumes" {
					e.Errorf("allocs: %+v", w.Allocs)
				}
				if m := w.Allocs[0]; m.Job != engineJob || m.Group != "notes" || string(m.Sealed) != "group" {
					e.Errorf("the mount of the engine: %+v", m)
				}
				e.engineUses(1, 0, "container")
				started := d.Tasks["plugin"].Started
				if len(w.Tasks) != 1 || w.Tasks[0].Alloc != d.ID || !w.Tasks[0].Running ||
					w.Tasks[0].Started != started {
					e.Errorf("tasks: %+v", w.Tasks)
				}
				if e.agent.Node() != node {
					e.Errorf("the node was %+v and is %+v", node, e.agent.Node())
				}
				e.run()
				synctest.Wait()
				e.restart(nil) // the next agent has the records too
				if now := e.all(); len(now) != len(before) {
					e.Errorf("running tasks were touched: %v", now[len(before):])
				}
				got := e.awaitRunning("user")
				if got.ID != u.ID || got.Version != 2 || got.Plans == nil ||
					got.Tasks["main"].Handle.ID != attemptID(u.ID, "main", 1) {
					e.Errorf("the alloc was %+v and is %+v", u, got)
				}
				j := e.agent.job("user")
				if j.Version != 2 || j.Source.Name != "user.hcl" || j.Stopped || j.Job.Digest != "d-user" ||
					e.agent.job("disk") == nil {
					e.Errorf("job: %+v", j)
				}
				e.engineUnmount("container", podman)
				e.restart(nil)
				e.engineUses(1, 1)
				e.stopAll()
				e.has("stop user/main", "released user", "stop disk/plugin")
			})
		})
	}
}

func TestLostAllocsAreStoppedUsersFirst(t *testing.T) {
	withAgent(t, func(e *env) {
		e.releaseSlowly("disk/plugin")
		e.lose(ledgerLosses["emptied"])
		e.recover(RecoverStop)
		e.restart(nil) // the order survives the agent
		e.await("all is removed", func(all []*AllocRecord) bool { return len(all) == 0 })
		e.has("stop user/main", "released user", "stop disk/plugin", "exited disk/plugin 1 code=0 final=true")
		if jobs := e.agent.Jobs(); len(jobs) != 0 {
			e.Errorf("jobs are left: %+v", jobs)
		}
	})
}

// An attempt that started after the copy was written is known only from its directory.
func TestAdoptionFindsTheNewestAttempt(t *testing.T) {
	withAgent(t, func(e *env) {
		_, d := e.lose(func(string, []byte) error { return nil })
		path := e.agent.dirs(d.ID).copy()
		old, err := os.ReadFile(path)
		e.must(err)
		e.open()
		e.run()
		e.exit(d, "plugin", 1)
		e.awaitAttempt("disk", "plugin", 2)
		e.kill()
		e.must(errors.Join(os.WriteFile(path, old, 0o600), os.Remove(ledgerPath(e.dir))))
		e.recover(RecoverAdopt)
		e.hasCount("start disk/plugin", 2)
		e.stopAll()
		e.hasCount("stop disk/plugin", 1)
	})
}

func TestEndedAllocsDoNotKeepAnAgentFromStarting(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(batchJob("work", 1, ""))
		e.exit(e.awaitRunning("work"), "main", 0)
		e.awaitState("work", AllocComplete)
		e.restart(func() { e.must(os.Remove(ledgerPath(e.dir))) })
	})
}

func TestNoTaskStartsWithoutACopyOfItsAlloc(t *testing.T) {
	withAgent(t, func(e *env) {
		var blocked string // a directory at the path of the copy
		e.shim.prepare = func(g host.AllocGroup) error {
			blocked = e.agent.dirs(g.Alloc).copy()
			return errors.Join(os.RemoveAll(blocked), os.Mkdir(blocked, 0o700))
		}
		e.submit(userJob("user", ""))
		e.awaitReason("user", "cannot write a copy of the alloc's record")
		e.hasCount("start", 0)
		e.must(os.Remove(blocked))
		if r := e.awaitRunning("user"); r.Reason != "" {
			e.Errorf("a running alloc waits for %q", r.Reason)
		}
	})
}

// Completed batch allocs keep their slots when they are adopted, even if they were pruned.
func TestAdoptionKeepsFilledSlots(t *testing.T) {
	withAgent(t, func(e *env) {
		const count = maxEnded + 5
		e.submit(batchJob("work", count, ""))
		e.awaitCount("start ", count)
		for _, r := range e.agent.Allocs()[1:] {
			e.exit(r, "main", 0)
		}
		e.await("all but one have ended", func(all []*AllocRecord) bool { return len(unended(all, lastRank)) == 1 })
		e.kill()
		e.must(os.Truncate(ledgerPath(e.dir), 0))
		e.recover(RecoverAdopt)
		e.hasCount("start ", count)
	})
}

// Without any record, the volumes that the tasks use are unknown. The tasks can then be neither adopted nor stopped in
// order.
func TestTasksWithoutAnyRecordAreRefused(t *testing.T) {
	withAgent(t, func(e *env) {
		u, d := e.lose(func(path string, _ []byte) error { return os.RemoveAll(filepath.Dir(path)) })
		for _, how := range []Recovery{RecoverNone, RecoverAdopt, RecoverStop, RecoverNone} {
			_, err := e.reopen(how)
			e.hasError(err, registry.ErrConflict, short(u.ID), short(d.ID), `task "plugin"`, "agent.db", "alloc.json")
			if !regexp.MustCompile(`kill -TERM (1001 1002|1002 1001),`).MatchString(err.Error()) {
				e.Errorf("the error does not say how to stop both tasks: %v", err)
			}
		}
		e.exit(u, "main", 0)
		e.exit(d, "plugin", 0)
		e.recover(RecoverNone)
	})
}

func TestLostShimRecordsBeneathUsersOfVolumesAreRefused(t *testing.T) {
	withAgent(t, func(e *env) {
		u, _ := e.lose(func(string, []byte) error { return os.Remove(e.shimDB()) })
		for range 2 {
			_, err := e.reopen(RecoverNone)
			e.hasError(err, registry.ErrConflict, "shim.db", short(u.ID), "job user", "--recover=adopt",
				"--recover=stop", "doctor --repair")
			if strings.Contains(err.Error(), "disk") {
				e.Errorf("the plugin's alloc uses no volume: %v", err)
			}
		}
		e.recover(RecoverAdopt)
		r := e.awaitRunning("user")
		lost := func(n Note) bool { return strings.Contains(n.Text, "shim.db, which recorded its volumes, was lost") }
		if !slices.ContainsFunc(r.Notes, lost) {
			e.Errorf("no note about the loss: %+v", r.Notes)
		}
		e.kill()
		e.recover(RecoverStop)
		e.await("the user is gone", func(all []*AllocRecord) bool { return len(all) == 1 && all[0].Job == "disk" })
		e.stopAll()
	})
}
