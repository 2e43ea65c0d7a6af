package task

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// host has all that Tasks depends on, in memory. Its journal has the supervised attempts.
type host struct {
	t       *testing.T
	state   *registrytest.Log
	answers bool // a process listens at every socket
	removed []string

	mu      sync.Mutex
	journal []string
}

func newHost(t *testing.T) *host { return &host{t: t, state: registrytest.NewLog(time.Now)} }

// tasks returns a running Tasks. end, or else the end of the test, ends it as the end of a shim does.
func (h *host) tasks() (t *Tasks, end func()) { return h.tasksOver(h.state) }

func (h *host) tasksOver(state registry.State) (t *Tasks, end func()) {
	boot := func() registry.BootTime { return bootTime }
	s := New(state, &fleet{}, Clock{Now: time.Now, Boot: boot}, nil, hclog.NewNullLogger())
	t = NewTasks(s, h, hooks.Layout{Run: "/run/h", State: "/state"}, hooks.Operations)
	t.supervise = h.supervise
	ctx, cancel := context.WithCancelCause(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = t.Run(ctx) })
	end = func() { cancel(errStopped); running.Wait() }
	h.t.Cleanup(end)
	return t, end
}

var taskA = registry.TaskKey{Alloc: "a", Task: "t"}

var bootTime = registry.BootTime{Boot: "b", At: time.Hour}

func (h *host) supervise(ctx context.Context, t registry.Task, _ hooks.PluginSpec) error {
	h.write("supervise %s %d", t.TaskKey, t.Attempt)
	<-ctx.Done()
	h.write("stop %s %d", t.TaskKey, t.Attempt)
	return context.Cause(ctx)
}

func (h *host) write(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.journal = append(h.journal, fmt.Sprintf(format, args...))
}

func (h *host) written() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.journal)
}

func (h *host) want(t *testing.T, want ...string) {
	t.Helper()
	if got := h.written(); !slices.Equal(got, want) {
		t.Errorf("got\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

func (h *host) MakeDirs([]hooks.HostDir) error { return nil }

func (h *host) ClearSocket(context.Context, string) (bool, error) { return h.answers, nil }

func (h *host) RemoveSocketDir(dir string) error {
	h.removed = append(h.removed, dir)
	return nil
}

func (h *host) SweepSocketDirs(map[string]bool) error { return nil }

// pluginTask is an attempt of a task that runs plugin p.
func pluginTask(t *testing.T, alloc string, attempt uint64) hooks.AllocTask {
	t.Helper()
	text := "task \"t\" {\n driver = \"exec\"\n csi_plugin {\n id = \"p\"\n type = \"monolith\"\n}\n}\n"
	job, diags := config.ParseJob(config.Source{Name: "p.hcl", Text: []byte(text)}, config.Options{})
	if err := diags.Err(); err != nil {
		t.Fatal(err)
	}
	return hooks.AllocTask{
		Alloc: registry.AllocID(alloc), Task: "t", Attempt: attempt, Isolated: true,
		Sealed: job.Groups[0].Tasks[0].Sealed,
	}
}

func start(t *testing.T, ts *Tasks, alloc string, attempt uint64) {
	t.Helper()
	if _, err := ts.Starting(t.Context(), registry.Call{}, pluginTask(t, alloc, attempt)); err != nil {
		t.Fatal(err)
	}
	if err := ts.Started(t.Context(), registry.Call{}, registry.TaskKey{Alloc: registry.AllocID(alloc), Task: "t"},
		attempt, bootTime); err != nil {
		t.Fatal(err)
	}
}

// The end of a task and the removal of its instances are one commit.
func TestTaskThatExitsIsDeregistered(t *testing.T) {
	h := newHost(t)
	ts, _ := h.tasks()
	start(t, ts, "a", 1)
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		registrytest.Put(t, h.state, registry.Instance{
			InstanceKey: registry.InstanceKey{Role: role, Plugin: "p", Alloc: "a", Task: "t"},
			Health:      registry.Health{State: registry.Healthy, Cause: registry.CauseProbed},
		})
	}
	var applied registry.Change
	h.state.OnApplied(func(a registry.Applied) { applied = a.Change })
	if err := ts.Exited(t.Context(), registry.Call{}, taskA, 1, Exit{Signal: 9}); err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, e := range applied.Events {
		kinds = append(kinds, string(e.Kind)+" "+string(e.Cause))
	}
	last := applied.Events[len(applied.Events)-1]
	if len(kinds) != 3 || last.Kind != registry.EventTaskRemoved || last.Cause != registry.CauseExited ||
		last.Detail != "ended by signal 9" || len(applied.Put) != 1 {
		t.Errorf("one commit has %q and puts %d records; last %s", kinds, len(applied.Put), last)
	}
}

// A task is supervised from Started to Exited, or until a newer attempt starts. Replayed and late reports change
// nothing.
func TestTaskIsSupervisedWhileItRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		ts, _ := h.tasks()
		for _, attempt := range []uint64{1, 2} {
			start(t, ts, "a", attempt)
			synctest.Wait()
		}
		if err := ts.Started(t.Context(), registry.Call{}, taskA, 2, bootTime); err != nil { // a replay
			t.Error(err)
		}
		_, err := ts.Starting(t.Context(), registry.Call{}, pluginTask(t, "a", 1))
		if !errors.Is(err, registry.ErrConflict) {
			t.Errorf("an old attempt: %v", err)
		}
		for _, attempt := range []uint64{1, 2} { // the first report is late
			if err := ts.Exited(t.Context(), registry.Call{}, taskA, attempt, Exit{Final: true}); err != nil {
				t.Error(err)
			}
		}
		h.want(t, "supervise a/t 1", "stop a/t 1", "supervise a/t 2", "stop a/t 2")
		if list, _, _ := ts.Plugins(t.Context(), ""); len(list) != 0 {
			t.Errorf("still known: %+v", list)
		}
	})
}

// A task that is being stopped is not supervised, also not by the next shim.
func TestStoppingTaskIsNotSupervised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		ts, end := h.tasks()
		start(t, ts, "a", 1)
		synctest.Wait()
		for range 2 { // and a replay
			if err := ts.Stopping(t.Context(), registry.Call{}, taskA, 1); err != nil {
				t.Error(err)
			}
		}
		end()
		h.tasks()
		synctest.Wait()
		h.want(t, "supervise a/t 1", "stop a/t 1")
	})
}

// A start is refused while an earlier process answers at the socket, and if the host lacks an operation of the plan.
func TestStartIsRefusedWhileTheOldProcessAnswers(t *testing.T) {
	for want, refuse := range map[string]func(*host, *Tasks){
		"still answers at": func(h *host, _ *Tasks) { h.answers = true },
		"bind":             func(_ *host, ts *Tasks) { ts.operations = nil },
	} {
		h := newHost(t)
		ts, _ := h.tasks()
		refuse(h, ts)
		_, err := ts.Starting(t.Context(), registry.Call{}, pluginTask(t, "a", 1))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if list, _, _ := ts.Plugins(t.Context(), ""); len(list) != 0 {
			t.Errorf("recorded all the same: %+v", list)
		}
	}
}

// A restart request stands until the host reports a newer attempt.
func TestSupervisionAndRestartRequestsSurviveTheShim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		ts, end := h.tasks()
		start(t, ts, "a", 1)
		synctest.Wait()
		_ = h.state.View(t.Context(), func(v registry.View) error {
			task, _ := v.Task(taskA)
			task.Restart = &registry.RestartRequest{Attempt: 1, Cause: registry.CauseStartTimeout}
			registrytest.Put(t, h.state, task)
			return nil
		})
		end()
		h.state = h.state.Reopen()
		ts, _ = h.tasks()
		synctest.Wait()
		h.want(t, "supervise a/t 1", "stop a/t 1", "supervise a/t 1")
		if list, _, _ := ts.Plugins(t.Context(), ""); len(list) != 1 || list[0].TaskKey != taskA ||
			list[0].Restart == nil || list[0].Restart.Cause != registry.CauseStartTimeout {
			t.Errorf("no restart is requested: %+v", list)
		}
		start(t, ts, "a", 2)
		if list, _, _ := ts.Plugins(t.Context(), ""); len(list) != 1 || list[0].Restart != nil {
			t.Errorf("a request of an ended attempt stands: %+v", list)
		}
	})
}

func TestSyncAdoptsAndRemovesTasks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		ts, _ := h.tasks()
		start(t, ts, "gone", 1)
		start(t, ts, "kept", 1)
		start(t, ts, "stops", 1)
		synctest.Wait()
		if err := ts.Stopping(t.Context(), registry.Call{}, registry.TaskKey{Alloc: "stops", Task: "t"},
			1); err != nil {
			t.Fatal(err)
		}
		start(t, ts, "ahead", 5)
		registrytest.Put(t, h.state, registry.Instance{
			InstanceKey: registry.InstanceKey{Role: registry.RoleNode, Plugin: "p", Alloc: "gone", Task: "t"},
			Health:      registry.Health{State: registry.Healthy, Cause: registry.CauseProbed},
		})
		var ends []string
		h.state.OnApplied(func(a registry.Applied) {
			for _, e := range a.Change.Events {
				if e.Kind == registry.EventTaskRemoved {
					ends = append(ends, e.Detail)
				}
			}
		})
		odd := pluginTask(t, "odd", 1)
		odd.Sealed = []byte("nothing of ours")
		found, err := ts.Sync(t.Context(), []LivingTask{
			{Task: pluginTask(t, "kept", 1), Running: true, Started: bootTime},
			{Task: pluginTask(t, "stops", 1), Running: true, Started: bootTime},
			{Task: pluginTask(t, "ahead", 4), Running: true, Started: bootTime},
			{Task: odd, Running: true, Started: bootTime},
			{Task: pluginTask(t, "adopted", 3), Running: true, Started: bootTime},
		})
		if err != nil || !slices.Equal(found.Removed, []registry.TaskKey{{Alloc: "gone", Task: "t"}}) {
			t.Errorf("Sync = %v, %v", found, err)
		}
		if len(found.Refused) != 2 || found.Refused[0].Task.Alloc != "ahead" || found.Refused[1].Task.Alloc != "odd" {
			t.Errorf("a task that cannot be adopted is not refused, or holds up the others: %+v", found.Refused)
		}
		if !slices.Equal(ends, []string{"ended with an unknown status"}) {
			t.Errorf("the events of ends say %q", ends)
		}
		synctest.Wait()
		said := h.written()
		if !slices.Contains(said, "supervise adopted/t 3") || !slices.Contains(said, "stop gone/t 1") ||
			slices.Contains(said, "stop kept/t 1") {
			t.Errorf("said %q", said)
		}
		if supervised := slices.DeleteFunc(said,
			func(s string) bool { return s != "supervise stops/t 1" }); len(supervised) != 1 {
			t.Errorf("a task that is being stopped is watched %d times, not once, before it was", len(supervised))
		}
	})
}

// After a rollback this shim supervises a task that a newer shim has started, even if it does not know all of its spec.
// It does not start such a task again.
func TestTaskOfANewerShimIsSupervised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		at := pluginTask(t, "a", 1)
		at.Sealed = []byte(strings.Replace(string(at.Sealed), `"version":1`, `"version":99,"later":true`, 1))
		registrytest.Put(t, h.state, registry.Task{
			TaskKey: at.Key(), Attempt: 1, Phase: registry.TaskRunning, Isolated: true, Sealed: at.Sealed,
			Endpoint: registry.Endpoint{Host: "/run/h/t/x/csi.sock", Task: "/csi/csi.sock"}, Plan: []byte("{}"),
		})
		ts, _ := h.tasks()
		synctest.Wait()
		h.want(t, "supervise a/t 1")
		for id, want := range map[registry.PluginID]int{"": 1, "p": 1, "plugin": 0, "csi": 0} {
			if list, _, _ := ts.Plugins(t.Context(), id); len(list) != want || want > 0 && list[0].Plugin != "p" {
				t.Errorf("the tasks that run plugin %q: %+v", id, list)
			}
		}
		at.Attempt = 2
		if _, err := ts.Starting(t.Context(), registry.Call{}, at); !errors.Is(err, registry.ErrUnsupported) ||
			!strings.Contains(err.Error(), "task a/t") {
			t.Errorf("a start of it: %v", err)
		}
	})
}

// A swap may end the caller's context while the end of a task is written. The directory of the socket is removed
// nevertheless: the next shim answers a replay from the stored answer and would not remove it.
func TestSocketDirectoryIsRemovedWhenTheCallerGoesDuringExited(t *testing.T) {
	h := newHost(t)
	cut := func() {}
	ts, _ := h.tasksOver(impatient{h.state, func() { cut() }})
	start(t, ts, "a", 1)
	ctx, cancel := context.WithCancel(t.Context())
	cut = cancel
	if err := ts.Exited(ctx, registry.Call{}, taskA, 1, Exit{Final: true}); err != nil {
		t.Error(err)
	}
	if len(h.removed) != 1 {
		t.Errorf("removed: %q", h.removed)
	}
}

// impatient is a state whose callers do not learn the outcome of a commit that was running when their context ended.
type impatient struct {
	registry.State
	committed func()
}

func (s impatient) Commit(ctx context.Context, decisions ...registry.Decision) (registry.Seq, error) {
	at, err := s.State.Commit(context.WithoutCancel(ctx), decisions...)
	s.committed()
	if ctx.Err() != nil {
		return 0, registry.Errorf(registry.ErrUncertain, "commit under way: %w", context.Cause(ctx))
	}
	return at, err
}
