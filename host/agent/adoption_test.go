package agent

import (
	"testing"
	"time"
)

func TestNewAgentAdoptsRunningTasks(t *testing.T) {
	withAgent(t, func(e *env) {
		d, u := e.runPluginAndUser()
		w := e.restart(nil)
		if len(w.Allocs) != 1 || w.Allocs[0].Alloc != u.ID || string(w.Allocs[0].Sealed) != "volumes" {
			e.Errorf("allocs: %+v", w.Allocs)
		}
		if len(w.Tasks) != 1 || w.Tasks[0].Alloc != d.ID || !w.Tasks[0].Running || w.Tasks[0].Attempt != 1 ||
			w.Tasks[0].Started.Boot == "" {
			e.Errorf("tasks: %+v", w.Tasks)
		}
		e.hasCount("start ", 2)
		e.hasCount("prepared", 1)
		e.hasCount("stop", 0)
		e.stopAll() // the adopted tasks belong to the new agent
		e.has("stop user/main", "released user", "stop disk/plugin", "exited disk/plugin 1 code=0 final=true")
	})
}

func TestNewAgentLearnsHowTasksEnded(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(pluginJob("disk"))
		e.submit(job("work", "batch", withVolumes(tasks("g", task("main", "")))))
		d, b := e.awaitRunning("disk"), e.awaitRunning("work")
		w := e.restart(func() {
			e.exit(d, "plugin", 9)
			e.exit(b, "main", 0)
		})
		if len(w.Tasks) != 1 || w.Tasks[0].Running {
			e.Errorf("tasks: %+v", w.Tasks)
		}
		if len(w.Allocs) != 1 {
			e.Errorf("an alloc with volumes is missing: %+v", w.Allocs)
		}
		e.awaitState("work", AllocComplete)
		e.awaitRunning("disk")
		e.has("end disk/plugin", "exited disk/plugin 1 code=9 final=false", "starting disk/plugin 2",
			"start disk/plugin")
		e.has("end work/main", "released work")
		e.hasCount("start work", 1)
	})
}

func TestNewAgentContinuesFromRecords(t *testing.T) {
	for name, c := range map[string]struct {
		before func(e *env, r *AllocRecord) // the agent dies in this state
		await  func(e *env)
		has    []string
	}{
		"a start that was not recorded": {
			func(e *env, r *AllocRecord) {
				e.edit(r.ID, func(r *AllocRecord) { r.Tasks["main"].State, r.Tasks["main"].Handle = TaskStarting, nil })
				time.Sleep(time.Hour)
			},
			func(e *env) {
				if r := e.awaitRunning("user"); r.Tasks["main"].Since.After(r.Created) {
					e.Errorf("the task runs since %v, but it was started at %v", r.Tasks["main"].Since, r.Created)
				}
				e.hasCount("start ", 1)
				e.stopAll()
			}, []string{"start user/main", "stop user/main"},
		},
		"an attempt that never ran": {
			func(e *env, r *AllocRecord) {
				e.exit(r, "main", 0)
				e.edit(r.ID, func(r *AllocRecord) {
					r.Tasks["main"].State, r.Tasks["main"].Handle, r.Tasks["main"].Attempt = TaskStarting, nil, 2
				})
			},
			func(e *env) { e.awaitAttempt("user", "main", 3) }, []string{"end user/main", "start user/main"},
		},
		"a release before the end of the alloc was recorded": {
			func(e *env, r *AllocRecord) {
				e.edit(r.ID, func(now *AllocRecord) {
					now.Stop, now.State, now.Tasks = true, AllocStopping, r.clone().Tasks
					now.Tasks["main"].State, now.Tasks["main"].Handle = TaskStarting, nil
				})
				e.exit(r, "main", 0)
				e.must(e.shim.ReleaseAlloc(e.Context(), r.ID))
			},
			func(e *env) { e.awaitState("user", AllocStopped) },
			[]string{"released user", "released user"},
		},
		"a power cut after a start": { // task.json may be lost
			func(e *env, r *AllocRecord) {
				e.exit(r, "main", 0)
				e.driver.forget(r.ID)
				e.edit(r.ID, func(r *AllocRecord) {
					r.Tasks["main"].State, r.Tasks["main"].Handle = TaskStarting, nil
					r.Boot, r.Tasks["main"].Started.Boot = "another", "another"
				})
			},
			func(e *env) {
				e.awaitAttempt("user", "main", 2)
				if n := e.awaitRunning("user").Tasks["main"].Restarts.Total; n != 1 {
					e.Errorf("%d restarts under the policy of the task, want 1", n)
				}
			},
			[]string{"prepared user", "start user/main", "end user/main", "prepared user", "start user/main"},
		},
		"a stop": {
			func(e *env, r *AllocRecord) {
				e.edit(r.ID, func(r *AllocRecord) { r.Stop, r.State = true, AllocStopping })
			},
			func(e *env) { e.awaitState("user", AllocStopped) }, []string{"stop user/main", "released user"},
		},
		"a reboot": {
			func(e *env, r *AllocRecord) {
				e.exit(r, "main", -1)
				e.edit(r.ID, func(r *AllocRecord) { r.Boot = "another" })
			},
			func(e *env) { e.awaitAttempt("user", "main", 2) },
			[]string{"prepared user", "start user/main", "end user/main", "prepared user", "start user/main"},
		},
		"after all jobs were stopped": {
			nil, func(e *env) { e.awaitRunning("user") },
			[]string{"stop user/main", "released user", "prepared user", "start user/main"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			withAgent(t, func(e *env) {
				e.submit(userJob("user", `{"restart":[{"delay":"0s"}]}`))
				r := e.awaitRunning("user")
				if c.before == nil {
					e.stopAll()
				}
				e.restart(func() {
					if c.before != nil {
						c.before(e, r)
					}
				})
				c.await(e)
				e.has(c.has...)
			})
		})
	}
}
