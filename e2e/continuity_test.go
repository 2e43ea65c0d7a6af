package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// listener is somebody who is told events, from host to host, and goes on after the last one that they have seen.
type listener struct {
	name  string
	wants host.WatchOptions
	slow  time.Duration // for each event
	stays int           // leaves after so many events, and comes again; 0: stays
	record
}

// passes says whether the listener is to be told of an event.
func (l *listener) passes(e host.Event) bool {
	return registry.Filter{Role: l.wants.Role, Plugin: l.wants.Plugin, Kinds: l.wants.Kinds}.Pass(e)
}

// listens until ctx ends.
func (l *listener) listens(ctx context.Context, m *mess) {
	for ctx.Err() == nil {
		at, told := m.now(), 0
		o := l.wants
		o.After = l.last()
		err := at.Watch(ctx, o, func(e host.Event) error {
			l.add(e)
			pause(ctx, l.slow)
			if told++; told == l.stays {
				return io.EOF
			}
			return nil
		})
		switch {
		case errors.Is(err, io.EOF), ctx.Err() != nil:
		case closed(at.closing), errors.Is(err, host.ErrUnavailable): // closing has begun
			<-at.replaced
		default:
			m.t.Errorf("%s is told nothing any more: %v", l.name, err)
			return
		}
	}
}

// audience is listeners of every kind.
func audience() []*listener {
	return []*listener{
		{name: "all"},
		{name: "slow", slow: 3 * time.Millisecond},
		{name: "comes and goes", stays: 3},
		{name: "comes and goes, for nodes", stays: 1, wants: host.WatchOptions{Role: host.RoleNode}},
		{name: "of the plugin that is there", wants: host.WatchOptions{Plugin: "fake"}},
		{name: "of volumes", wants: host.WatchOptions{Kinds: []host.EventKind{"volume created", "volume deleted"}}},
		{name: "of health", stays: 2, wants: host.WatchOptions{Kinds: []host.EventKind{"unhealthy", "healthy"}}, slow: time.Millisecond},
	}
}

// Everybody who listens is told exactly the events after the cursor that they present, in order, while shims are replaced and killed and the host
// is closed and opened, and plugins start, fail and stop. What really happened to a plugin is told once, and nothing of one that goes on.
func TestEventContinuity(t *testing.T) {
	t.Parallel()
	s := newSuccession(t, everything...)
	m := s.mess()
	p := s.plugin("alloc-p", csifake.Monolith)
	m.keep(func(a *account) {
		a.tasks[p.task.Key()] = host.WorkloadTask{AllocTask: p.task, Running: true, Started: m.sinceBoot()}
	})
	ctx, stop := context.WithCancel(s.ctx())
	defer stop()
	all := audience()
	var listening, churning sync.WaitGroup
	for _, l := range all {
		listening.Go(func() { l.listens(ctx, m) })
	}
	healthy, enough := context.WithCancel(ctx)
	defer enough()
	churn, calm := context.WithCancel(ctx)
	defer calm()
	var lives []host.AllocID
	listening.Go(func() { m.staysHealthy(healthy, "fake") })
	shelf := m.newShelf(&service{id: "fake"}, 1)
	churning.Go(func() { lives = m.pluginsComeAndGo(churn) })
	churning.Go(func() { m.volumeComesAndGoes(churn, shelf) })
	for _, follows := range []func(){func() { s.swap() }, s.kill, func() { s.swap() }, m.reopen, func() { s.swap() }, m.reopen, s.kill} {
		told := len(all[0].all())
		s.eventually("more is told", func() bool { return len(all[0].all()) > told+10 })
		follows()
	}
	calm()
	churning.Wait()
	m.runs.Wait()
	enough()
	s.must(s.host.TaskStopping(s.ctx(), p.task.Key(), 1))
	s.exit(p)
	history := s.history(func(e host.Event) bool { return e.Kind == "task deregistered" && e.Alloc == "alloc-p" })
	for _, l := range all {
		want := slices.DeleteFunc(slices.Clone(history), func(e host.Event) bool { return !l.passes(e) })
		s.eventually(l.name+" is told all", func() bool { return len(l.all()) >= len(want) })
		if problem := other(l.all(), want); problem != "" {
			t.Errorf("%s: %s", l.name, problem)
		}
	}
	stop()
	listening.Wait()
	for _, problem := range append(replay(history), healthOf(history, lives)...) {
		t.Error(problem)
	}
	t.Logf("%d events, %d lives of plugins, %d shims", len(history), len(lives), len(s.pids))
}

// mess is the succession as those of the chaos see it.
func (s *succession) mess() *mess {
	m := &mess{world: s.world, told: &record{}, over: make(chan struct{}), living: newAccount(), owed: map[string]bool{}, seed: 1}
	m.tenancy = newTenancy(s.host)
	return m
}

// other says where a list of events differs from what it should be.
func other(got, want []host.Event) string {
	for i, e := range want {
		if i >= len(got) {
			return fmt.Sprintf("of %d events %d were told; the first that was not is %s", len(want), len(got), e)
		}
		if got[i].String() != e.String() || got[i].Generation != e.Generation {
			return fmt.Sprintf("event %d is %s, and what was told is %s", i, e, got[i])
		}
	}
	if len(got) > len(want) {
		return fmt.Sprintf("one was told that is none: %s", got[len(want)])
	}
	return ""
}

// pluginsComeAndGo has plugins start, die, start again and end on purpose, one after the other.
func (m *mess) pluginsComeAndGo(ctx context.Context) (lives []host.AllocID) {
	for n := 0; ctx.Err() == nil; n++ {
		s := m.newSeat(&service{id: "churn", backend: csifake.NewBackend("")}, csifake.Monolith, n)
		s.next()
		s.start()
		s.isSoon(host.Healthy)
		s.plugin().Kill()
		s.isSoon(host.Unhealthy)
		s.end(true, false)
		s.start()
		s.isSoon(host.Healthy)
		s.report("stopping", func(h *host.Host) error { return h.TaskStopping(m.ctx(), s.task.Key(), s.task.Attempt) })
		s.end(false, true)
		lives = append(lives, s.task.Alloc)
	}
	return lives
}

// isSoon returns once the attempt is.
func (s *seat) isSoon(health registry.HealthState) {
	err := until(s.m.ctx(), fmt.Sprintf("%s is %s", s.task.Alloc, health), func() bool {
		var list host.PluginList
		err := s.m.call(func(h *host.Host) (err error) {
			list, _, err = h.Plugins(s.m.ctx(), host.PluginQuery{Plugin: "churn"})
			return err
		})
		return err == nil && slices.ContainsFunc(list.Instances, func(i host.Instance) bool {
			return i.Alloc == s.task.Alloc && i.Attempt == s.task.Attempt && i.Health.State == health
		})
	})
	if err != nil {
		s.m.t.Error(err)
	}
}

func (m *mess) volumeComesAndGoes(ctx context.Context, s *shelf) {
	for ctx.Err() == nil {
		if err := m.make(s, patience); err != nil {
			m.t.Errorf("make volume %s: %v", s.id, err)
		}
		if err := m.remove(s, patience); err != nil && !errors.Is(err, host.ErrNotFound) { // a host was closed before it could say so
			m.t.Errorf("remove volume %s: %v", s.id, err)
		}
	}
}

// staysHealthy follows the fingerprint of a plugin that goes on: whoever asks anew, at whichever shim, never hears of less than there is.
func (m *mess) staysHealthy(ctx context.Context, id host.PluginID) {
	for ctx.Err() == nil {
		at := m.now()
		err := at.Fingerprints(ctx, host.PluginQuery{Plugin: id}, func(list []host.PluginFingerprint, complete bool) error {
			if complete && len(list) != 2 {
				m.t.Errorf("plugin %s has %d roles", id, len(list))
			}
			for _, f := range list {
				if ctx.Err() == nil && f.Healthy != 1 {
					m.t.Errorf("plugin %s is told to have %d healthy instances as %s", id, f.Healthy, f.Role)
				}
			}
			return nil
		})
		if ctx.Err() == nil && errors.Is(err, host.ErrUnavailable) {
			<-at.replaced
		}
	}
}

// healthOf says what of the health of plugins was told that was not so, or not told that was: each life has one death, and an end on
// purpose; whoever else there is has no death.
func healthOf(history []host.Event, lives []host.AllocID) (problems []string) {
	told := map[string][]string{}
	for _, e := range history {
		switch e.Kind {
		case "registered", "updated", "healthy", "unhealthy", "deregistered":
			of := fmt.Sprintf("%s %s", e.Alloc, e.Role)
			told[of] = append(told[of], string(e.Kind))
		}
	}
	for of, kinds := range told {
		alloc, _, _ := strings.Cut(of, " ")
		want := "registered deregistered"
		if slices.Contains(lives, host.AllocID(alloc)) {
			want = "registered unhealthy deregistered registered deregistered"
		}
		if got := strings.Join(kinds, " "); got != want {
			problems = append(problems, fmt.Sprintf("of %s is told: %s; it should be: %s", of, got, want))
		}
	}
	return problems
}

// inTheGap does something while nobody has the state, between the old shim, which has let it go, and the new one: it is locked in between.
func (s *succession) inTheGap(do func()) {
	s.t.Helper()
	file, err := unix.Open(filepath.Join(s.config.StateDir, "shim.db"), unix.O_RDWR|unix.O_CLOEXEC, 0)
	s.must(err)
	defer unix.Close(file)
	done := goes(func() error {
		if err := unix.Flock(file, unix.LOCK_EX); err != nil {
			return err
		}
		do()
		return unix.Flock(file, unix.LOCK_UN)
	})
	for {
		s.swap()
		select {
		case err := <-done:
			s.must(err)
			return
		default: // the new shim was the quicker one: the next swap has a gap too
		}
	}
}

// begins has a task started whose plugin does not run yet. The plugin is started by starts.
func (s *succession) begins(alloc string) (starts func() *pluginTask) {
	s.t.Helper()
	task, endpoint := s.startingPlugin(alloc, csifake.Monolith, 1, "")
	s.must(s.host.TaskStarted(s.ctx(), task.Key(), 1))
	return func() *pluginTask { return s.runPlugin(task, csifake.Monolith, endpoint) }
}

// neverServes is a plugin's task that runs, and in which nothing ever serves.
func (s *succession) neverServes(alloc string) host.AllocTask {
	s.t.Helper()
	task, _ := s.startingPlugin(alloc, csifake.Monolith, 1, "health_timeout = \"1s\"\n")
	s.must(s.host.TaskStarted(s.ctx(), task.Key(), 1))
	return task
}

// asksFor returns once the restart of the task is asked for.
func (s *succession) asksFor(task host.AllocTask) {
	s.t.Helper()
	err := s.host.Restarts(s.ctx(), func(list []host.PendingRestart) error {
		if slices.ContainsFunc(list, func(r host.PendingRestart) bool { return r.TaskKey == task.Key() && r.Attempt == task.Attempt }) {
			return io.EOF
		}
		return nil
	})
	if !errors.Is(err, io.EOF) {
		s.t.Errorf("a restart of %s is not asked for: %v", task.Key(), err)
	}
}

// What happens while nobody looks is not lost: a plugin that dies between two shims is told to be unhealthy, once; one that starts between them
// becomes healthy; one that ends on purpose, as was said before, is never told to be unhealthy; and a restart that was asked for before is
// asked for after.
func TestEventsOfTheGap(t *testing.T) {
	t.Parallel()
	s := newSuccession(t, everything...)
	dies := s.plugin("alloc-dies", csifake.Monolith)
	stops := s.plugin("alloc-stops", csifake.Monolith)
	var starts *pluginTask
	pending := s.neverServes("alloc-pending")
	s.asksFor(pending)
	begins := s.begins("alloc-starts")
	s.must(s.host.TaskStopping(s.ctx(), stops.task.Key(), 1))
	s.inTheGap(func() {
		stops.Kill()
		dies.Kill()
		starts = begins()
	})
	s.registered("alloc-starts")
	s.until(func(e host.Event) bool { return e.Kind == "unhealthy" && e.Alloc == "alloc-dies" })
	s.asksFor(pending)
	s.kill()
	s.asksFor(pending)
	s.must(s.host.TaskExited(s.ctx(), dies.task.Key(), 1, 0, 9, true))
	s.must(s.host.TaskExited(s.ctx(), stops.task.Key(), 1, 0, 9, true))
	s.must(s.host.TaskExited(s.ctx(), pending.Key(), 1, 0, 9, true))
	s.must(s.host.TaskStopping(s.ctx(), starts.task.Key(), 1))
	s.exit(starts)
	told := map[string]int{}
	for _, e := range s.history(func(e host.Event) bool { return e.Kind == "task deregistered" && e.Alloc == "alloc-starts" }) {
		told[fmt.Sprintf("%s %s", e.Kind, e.Alloc)]++
	}
	for what, times := range map[string]int{
		"unhealthy alloc-dies": 2, "deregistered alloc-dies": 2, "registered alloc-starts": 2, "unhealthy alloc-starts": 0,
		"unhealthy alloc-stops": 0, "deregistered alloc-stops": 2, "restart asked alloc-pending": 1,
	} {
		if told[what] != times {
			t.Errorf("%q is told %d times, not %d", what, told[what], times)
		}
	}
}
