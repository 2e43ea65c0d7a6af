package alloc

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/registry"
)

func start(t *testing.T, ts *Tasks, alloc string, attempt uint64) {
	t.Helper()
	if _, err := ts.Starting(t.Context(), registry.Call{}, pluginTask(t, alloc, attempt)); err != nil {
		t.Fatal(err)
	}
	if err := ts.Started(t.Context(), registry.Call{}, registry.TaskKey{Alloc: registry.AllocID(alloc), Task: "t"}, attempt, clock.Boot()); err != nil {
		t.Fatal(err)
	}
}

// A task's end takes its instances out of the table and tells why, in the transaction that records it.
func TestTaskThatExitsIsDeregistered(t *testing.T) {
	p := newParts(t)
	ts, end := p.tasks()
	defer end()
	start(t, ts, "a", 1)
	key := registry.TaskKey{Alloc: "a", Task: "t"}
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		err := p.commit([]registry.Record{registry.Instance{
			InstanceKey: registry.InstanceKey{Role: role, Plugin: "p", Alloc: "a", Task: "t"}, Attempt: 1, Endpoint: registry.Endpoint{Host: "/s"},
			Health: registry.Health{State: registry.Healthy, Cause: registry.CauseProbed},
		}})
		if err != nil {
			t.Fatal(err)
		}
	}
	var told registry.Change
	p.log.OnApplied(func(a registry.Applied) { told = a.Change })
	if err := ts.Exited(t.Context(), registry.Call{}, key, 1, Exit{Signal: 9}); err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, e := range told.Events {
		kinds = append(kinds, string(e.Kind)+" "+string(e.Cause))
	}
	last := told.Events[len(told.Events)-1]
	if len(kinds) != 3 || last.Kind != registry.EventTaskRemoved || last.Cause != registry.CauseExited || last.Detail != "ended by signal 9" || len(told.Put) != 1 {
		t.Errorf("one transaction told %q and put %d records; last %s", kinds, len(told.Put), last)
	}
}

func TestTaskIsWatchedWhileItRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		ts, end := p.tasks()
		defer end()
		key := registry.TaskKey{Alloc: "a", Task: "t"}
		start(t, ts, "a", 1)
		synctest.Wait()
		if err := ts.Started(t.Context(), registry.Call{}, key, 1, clock.Boot()); err != nil { // a replay
			t.Error(err)
		}
		if err := ts.Exited(t.Context(), registry.Call{}, key, 1, Exit{}); err != nil {
			t.Error(err)
		}
		start(t, ts, "a", 2)
		synctest.Wait()
		if err := ts.Exited(t.Context(), registry.Call{}, key, 1, Exit{Final: true}); err != nil { // late news
			t.Error(err)
		}
		if err := ts.Exited(t.Context(), registry.Call{}, key, 2, Exit{Final: true}); err != nil {
			t.Error(err)
		}
		expect(t, p.said(), "watch a/t 1", "unwatch a/t 1", "watch a/t 2", "unwatch a/t 2")
		if list, _, _ := ts.Plugins(t.Context(), ""); len(list) != 0 {
			t.Errorf("still known: %+v", list)
		}
	})
}

// A task that is stopped on purpose is not watched while it ends, and its instances stay until it has.
func TestStoppedTaskIsNotWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		ts, end := p.tasks()
		key := registry.TaskKey{Alloc: "a", Task: "t"}
		start(t, ts, "a", 1)
		synctest.Wait()
		for range 2 { // and a replay
			if err := ts.Stopping(t.Context(), registry.Call{}, key, 1); err != nil {
				t.Error(err)
			}
		}
		expect(t, p.said(), "watch a/t 1", "unwatch a/t 1")
		end()
		ts, end = p.tasks() // the next shim watches it no more
		defer end()
		synctest.Wait()
		if err := ts.Exited(t.Context(), registry.Call{}, key, 1, Exit{Final: true}); err != nil {
			t.Error(err)
		}
		expect(t, p.said(), "watch a/t 1", "unwatch a/t 1")
		if err := ts.Stopping(t.Context(), registry.Call{}, key, 1); err != nil { // late
			t.Error(err)
		}
	})
}

// A new attempt ends the watch of the one before, even if nobody said that it has exited.
func TestNewAttemptSupersedes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		ts, end := p.tasks()
		defer end()
		start(t, ts, "a", 1)
		synctest.Wait()
		start(t, ts, "a", 2)
		synctest.Wait()
		expect(t, p.said(), "watch a/t 1", "unwatch a/t 1", "watch a/t 2")
		_, err := ts.Starting(t.Context(), registry.Call{}, pluginTask(t, "a", 1))
		if !errors.Is(err, registry.ErrConflict) {
			t.Errorf("an old attempt: %v", err)
		}
	})
}

func TestOldProcessStillAnswers(t *testing.T) {
	p := newParts(t)
	ts, end := p.tasks()
	defer end()
	p.socket = true
	_, err := ts.Starting(t.Context(), registry.Call{}, pluginTask(t, "a", 1))
	if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), "still answers at") {
		t.Errorf("err = %v", err)
	}
	if list, _, _ := ts.Plugins(t.Context(), ""); len(list) != 0 {
		t.Errorf("recorded all the same: %+v", list)
	}
}

// A new shim goes on watching what ran, and a restart request stands until a newer attempt is reported.
func TestTasksSurviveTheShim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		ts, end := p.tasks()
		start(t, ts, "a", 1)
		synctest.Wait()
		key := registry.TaskKey{Alloc: "a", Task: "t"}
		_, err := p.log.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
			task, _ := v.Task(key)
			task.Restart = &registry.RestartRequest{Attempt: 1, Cause: registry.CauseStartTimeout}
			return registry.Change{Put: []registry.Record{task}}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		end()
		p.log = p.log.Reopen()
		ts, end = p.tasks()
		defer end()
		synctest.Wait()
		expect(t, p.said(), "watch a/t 1", "unwatch a/t 1", "watch a/t 1")
		if list, _, _ := ts.Restarts(t.Context()); len(list) != 1 || list[0].TaskKey != key || list[0].Cause != registry.CauseStartTimeout {
			t.Errorf("restarts: %+v", list)
		}
		start(t, ts, "a", 2)
		if list, _, _ := ts.Restarts(t.Context()); len(list) != 0 {
			t.Errorf("a request of an ended attempt stands: %+v", list)
		}
	})
}

func TestSyncOfTasks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		ts, end := p.tasks()
		defer end()
		start(t, ts, "gone", 1)
		start(t, ts, "kept", 1)
		start(t, ts, "stops", 1)
		synctest.Wait()
		if err := ts.Stopping(t.Context(), registry.Call{}, registry.TaskKey{Alloc: "stops", Task: "t"}, 1); err != nil {
			t.Fatal(err)
		}
		start(t, ts, "ahead", 5)
		odd := pluginTask(t, "odd", 1)
		odd.Sealed = []byte("nothing of ours")
		found, err := ts.Sync(t.Context(), []LivingTask{
			{Task: pluginTask(t, "kept", 1), Running: true, Started: clock.Boot()},
			{Task: pluginTask(t, "stops", 1), Running: true, Started: clock.Boot()},
			{Task: pluginTask(t, "ahead", 4), Running: true, Started: clock.Boot()},
			{Task: odd, Running: true, Started: clock.Boot()},
			{Task: pluginTask(t, "adopted", 3), Running: true, Started: clock.Boot()},
		})
		if err != nil || !slices.Equal(found.Removed, []registry.TaskKey{{Alloc: "gone", Task: "t"}}) {
			t.Errorf("Sync = %v, %v", found, err)
		}
		if len(found.Refused) != 2 || found.Refused[0].Task.Alloc != "ahead" || found.Refused[1].Task.Alloc != "odd" {
			t.Errorf("one that cannot be taken over is not told, or holds up the others: %+v", found.Refused)
		}
		synctest.Wait()
		said := p.said()
		if !slices.Contains(said, "watch adopted/t 3") || !slices.Contains(said, "unwatch gone/t 1") || slices.Contains(said, "unwatch kept/t 1") {
			t.Errorf("said %q", said)
		}
		if watches := slices.DeleteFunc(said, func(s string) bool { return s != "watch stops/t 1" }); len(watches) != 1 {
			t.Errorf("a task that is being stopped is watched %d times, not once, before it was", len(watches))
		}
	})
}

// A host that cannot apply what a plan needs is told before anything is done.
func TestPlanOperationTheHostLacks(t *testing.T) {
	p := newParts(t)
	ts, end := p.tasks()
	defer end()
	ts.operations = nil
	_, err := ts.Starting(t.Context(), registry.Call{}, pluginTask(t, "a", 1))
	if !errors.Is(err, registry.ErrUnsupported) || !strings.Contains(err.Error(), "bind") {
		t.Errorf("err = %v", err)
	}
	expect(t, p.said())
}

// A task that a newer shim has started goes on being watched, also by one that does not know all of what it was started with: after a
// rollback nobody else is there. It is not started again without that.
func TestTaskOfANewerShimIsWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		at := pluginTask(t, "a", 1)
		at.Sealed = []byte(strings.Replace(string(at.Sealed), `"version":1`, `"version":99,"later":true`, 1))
		err := p.commit([]registry.Record{registry.Task{
			TaskKey: at.Key(), Attempt: 1, Phase: registry.TaskRunning, Isolated: true, Sealed: at.Sealed,
			Endpoint: registry.Endpoint{Host: "/run/h/t/x/csi.sock", Task: "/csi/csi.sock"}, Plan: []byte("{}"),
		}})
		if err != nil {
			t.Fatal(err)
		}
		ts, end := p.tasks()
		defer end()
		synctest.Wait()
		expect(t, p.said(), "watch a/t 1")
		for id, want := range map[registry.PluginID]int{"": 1, "p": 1, "plugin": 0, "csi": 0} {
			if list, _, _ := ts.Plugins(t.Context(), id); len(list) != want || want > 0 && list[0].Plugin != "p" {
				t.Errorf("the tasks that run plugin %q: %+v", id, list)
			}
		}
		at.Attempt = 2
		if _, err := ts.Starting(t.Context(), registry.Call{}, at); !errors.Is(err, registry.ErrUnsupported) || !strings.Contains(err.Error(), "task a/t") {
			t.Errorf("a start of it: %v", err)
		}
	})
}

// impatient is a log whose callers do not learn what became of a change that was being written when their context ended.
type impatient struct {
	registry.State
	writing func()
}

func (l impatient) Commit(ctx context.Context, decide func(registry.View) (registry.Change, error)) (registry.Seq, error) {
	at, err := l.State.Commit(context.WithoutCancel(ctx), decide)
	l.writing()
	if ctx.Err() != nil {
		return 0, registry.Errorf(registry.ErrUncertain, "commit under way: %w", context.Cause(ctx))
	}
	return at, err
}

// removals are the directories of sockets that were removed.
type removals struct {
	*parts
	dirs []string
}

func (r *removals) RemoveSocketDir(dir string) error {
	r.dirs = append(r.dirs, dir)
	return nil
}

// A shim that lets go while the end of a task is being written removes the directory of its socket: the next one answers the call again from
// what is stored, and would leave it.
func TestDirectoryOfATaskThatEndsInASwapIsRemoved(t *testing.T) {
	p := &removals{parts: newParts(t)}
	cut := func() {}
	ts := NewTasks(impatient{p.log, func() { cut() }}, p, p, hooks.Layout{Run: "/run/h", State: "/state"}, us, clock, hclog.NewNullLogger())
	defer running(ts.Run)()
	start(t, ts, "a", 1)
	ctx, cancel := context.WithCancel(t.Context())
	cut = cancel
	key := registry.TaskKey{Alloc: "a", Task: "t"}
	if err := ts.Exited(ctx, registry.Call{}, key, 1, Exit{Final: true}); err != nil {
		t.Error(err)
	}
	if len(p.dirs) != 1 {
		t.Errorf("removed: %q", p.dirs)
	}
}

// What a shim takes over from another is watched after the calm. A task that has ended by the time that its watch begins is not watched.
func TestTasksAreWatchedAfterTheCalm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		ts, end := p.tasks()
		synctest.Wait()
		start(t, ts, "a", 1)
		start(t, ts, "b", 1)
		var ended registry.Task
		if err := p.log.View(t.Context(), func(v registry.View) error { ended, _ = v.Task(registry.TaskKey{Alloc: "b", Task: "t"}); return nil }); err != nil {
			t.Fatal(err)
		}
		if err := ts.Exited(t.Context(), registry.Call{}, ended.TaskKey, 1, Exit{}); err != nil {
			t.Fatal(err)
		}
		end()
		watches := func() (list []string) {
			synctest.Wait()
			return slices.DeleteFunc(p.said(), func(s string) bool { return !strings.HasPrefix(s, "watch ") })
		}
		before := len(watches())
		ts = NewTasks(p.log, p, p, hooks.Layout{Run: "/run/h", State: "/state"}, us, clock, hclog.NewNullLogger())
		ts.Calm = time.Minute
		defer running(ts.Run)()
		time.Sleep(ts.Calm - time.Nanosecond)
		if got := watches()[before:]; len(got) > 0 {
			t.Errorf("watched in the calm: %q", got)
		}
		time.Sleep(time.Nanosecond)
		if got := watches()[before:]; len(got) != 1 || !strings.HasPrefix(got[0], "watch a") {
			t.Errorf("watched after the calm: %q", got)
		}
		if err := ts.watch(ended); err != nil { // as it was read before it ended
			t.Fatal(err)
		}
		if got := watches()[before:]; len(got) != 1 {
			t.Errorf("a task that has ended is watched: %q", got)
		}
	})
}

// A shim that takes over has tasks watched after its breath, and not all at once.
func TestWatchesBeginOneAfterTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		ts, end := p.tasks()
		for _, alloc := range []string{"a", "b", "c"} {
			start(t, ts, alloc, 1)
		}
		synctest.Wait()
		end()
		p.said()
		ts = NewTasks(p.log, p, p, hooks.Layout{Run: "/run/h", State: "/state"}, us, clock, hclog.NewNullLogger())
		ts.Calm = 50 * time.Millisecond
		end = running(ts.Run)
		defer end()
		watched := func() (n int) {
			synctest.Wait()
			ts.mu.Lock()
			defer ts.mu.Unlock()
			return len(ts.watches)
		}
		time.Sleep(ts.Calm - 1)
		if n := watched(); n != 0 {
			t.Errorf("%d are watched before the breath is over", n)
		}
		time.Sleep(time.Nanosecond)
		for want := range 3 {
			if n := watched(); n != want+1 {
				t.Errorf("%d are watched, not %d", n, want+1)
			}
			time.Sleep(between(ts.Calm, 3))
		}
	})
}
