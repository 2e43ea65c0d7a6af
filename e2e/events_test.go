package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// eventList is the events that a watcher got.
type eventList struct {
	mu   sync.Mutex // guards list
	list []host.Event
}

func (l *eventList) add(event host.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, event)
}

func (l *eventList) all() []host.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.list)
}

func (l *eventList) last() host.Seq {
	if all := l.all(); len(all) > 0 {
		return all[len(all)-1].Seq
	}
	return 0
}

// eventDiff returns how a list of events differs from the wanted one.
func eventDiff(got, want []host.Event) string {
	for i, event := range want {
		if i >= len(got) {
			return fmt.Sprintf("got %d of %d events; the first that is missing is %s", len(got), len(want), event)
		}
		if got[i].String() != event.String() || got[i].Generation != event.Generation {
			return fmt.Sprintf("event %d is %s, not %s", i, got[i], event)
		}
	}
	if len(got) > len(want) {
		return fmt.Sprintf("an event that never happened: %s", got[len(want)])
	}
	return ""
}

// replayErrors adds events up and returns what does not add up to nothing.
func replayErrors(events []host.Event) (problems []string) {
	beginOf := map[host.EventKind]host.EventKind{
		"deregistered": "registered", "volume deleted": "volume created", "released": "claimed",
		"detached": "attached", "unstaged": "staged", "unpublished": "published",
		"task deregistered": "task registered",
	}
	begins := map[host.EventKind]bool{}
	for _, begin := range beginOf {
		begins[begin] = true
	}
	strict := map[host.EventKind]bool{"registered": true, "volume created": true, "claimed": true}
	open := map[string]host.Event{}
	last := host.Seq(0)
	for _, event := range events {
		if event.Kind == host.EventResync {
			problems = append(problems, "a gap: "+event.String())
		}
		if event.Seq <= last {
			problems = append(problems, fmt.Sprintf("%s comes after %d", event, last))
		}
		last = event.Seq
		subject := fmt.Sprint(event.Role, "/", event.Plugin, "/", event.Alloc, "/", event.Task, "/", event.Volume, "/",
			event.Request)
		if begins[event.Kind] {
			key := string(event.Kind) + subject
			if was, is := open[key]; is && strict[event.Kind] {
				problems = append(problems, fmt.Sprintf("%s, and before it %s", event, was))
			}
			open[key] = event
		} else if begin := beginOf[event.Kind]; begin != "" {
			key := string(begin) + subject
			if _, is := open[key]; !is && strict[begin] {
				problems = append(problems, fmt.Sprintf("%s without its beginning", event))
			}
			delete(open, key)
		}
	}
	for _, event := range open {
		problems = append(problems, fmt.Sprintf("%s has no end", event))
	}
	return problems
}

// healthErrors compares the reported health of instances with what happened: each of the killed allocs died once and
// was then stopped in order, and no other died.
func healthErrors(history []host.Event, killed []host.AllocID) (problems []string) {
	got := map[string][]string{}
	for _, event := range history {
		switch event.Kind {
		case "registered", "updated", "healthy", "unhealthy", "deregistered":
			instance := fmt.Sprintf("%s %s", event.Alloc, event.Role)
			got[instance] = append(got[instance], string(event.Kind))
		}
	}
	for instance, kinds := range got {
		alloc, _, _ := strings.Cut(instance, " ")
		want := "registered deregistered"
		if slices.Contains(killed, host.AllocID(alloc)) {
			want = "registered unhealthy deregistered registered deregistered"
		}
		if got := strings.Join(kinds, " "); got != want {
			problems = append(problems, fmt.Sprintf("events of %s: %s; want: %s", instance, got, want))
		}
	}
	return problems
}

// eventListener gets events from host to host. It continues after the last one that it got.
type eventListener struct {
	name       string
	options    host.WatchOptions
	delay      time.Duration // for each event
	leaveAfter int           // events, and come again; 0: stay
	eventList
}

func (l *eventListener) wants(event host.Event) bool {
	return registry.Filter{Role: l.options.Role, Plugin: l.options.Plugin, Kinds: l.options.Kinds}.Pass(event)
}

func (l *eventListener) listen(ctx context.Context, s *sessionsEnv) {
	got := 0
	from := func() host.WatchOptions {
		o := l.options
		o.After, got = l.last(), 0
		return o
	}
	s.watch(ctx, l.name, from, func(event host.Event) error {
		l.add(event)
		sleep(ctx, l.delay)
		if got++; got == l.leaveAfter {
			return errLeave
		}
		return nil
	})
}

// Each watcher gets exactly the events after its cursor, in order, while shims are replaced and killed, hosts are
// reopened and plugins start, fail and stop. A plugin's death is reported once; a plugin that stays healthy is
// reported as such.
func TestEventContinuity(t *testing.T) {
	t.Parallel()
	s := newSessionsEnv(t)
	p := s.addPlugin("alloc-p", csifake.Monolith)
	s.setTask(p.task, true)
	listeners := []*eventListener{
		{name: "of all"},
		{name: "slow", delay: 3 * time.Millisecond},
		{name: "that comes and goes", leaveAfter: 3},
		{name: "of nodes, that comes and goes", leaveAfter: 1, options: host.WatchOptions{Role: host.RoleNode}},
		{name: "of the plugin that stays", options: host.WatchOptions{Plugin: "fake"}},
		{name: "of volumes", options: host.WatchOptions{Kinds: []host.EventKind{"volume created", "volume deleted"}}},
		{name: "of health", leaveAfter: 2, options: host.WatchOptions{Kinds: []host.EventKind{"unhealthy", "healthy"}}},
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var listening, churning sync.WaitGroup
	for _, l := range listeners {
		listening.Go(func() { l.listen(ctx, s) })
	}
	healthy, stopHealthy := context.WithCancel(ctx)
	defer stopHealthy()
	listening.Go(func() { s.wantHealthy(healthy, "fake") })
	churn, stopChurn := context.WithCancel(ctx)
	defer stopChurn()
	var killed []host.AllocID
	churning.Go(func() { killed = s.churnPlugins(churn) })
	churning.Go(func() { s.churnVolume(churn) })
	swap := func() { s.swap() }
	for _, disturb := range []func(){swap, s.replaceShimByKill, swap, s.reopenHost, swap, s.reopenHost,
		s.replaceShimByKill} {
		got := len(listeners[0].all())
		s.waitUntil("more events", func() bool { return len(listeners[0].all()) > got+10 })
		disturb()
	}
	stopChurn()
	churning.Wait()
	stopHealthy()
	s.must(s.host.TaskStopping(s.ctx(), p.task.Key(), 1))
	s.stopPlugin(p)
	history := s.eventsUntil(func(event host.Event) bool {
		return event.Kind == "task deregistered" && event.Alloc == "alloc-p"
	})
	for _, l := range listeners {
		want := slices.DeleteFunc(slices.Clone(history), func(event host.Event) bool { return !l.wants(event) })
		s.waitUntil("the watcher "+l.name+" has all events", func() bool { return len(l.all()) >= len(want) })
		if problem := eventDiff(l.all(), want); problem != "" {
			t.Errorf("the watcher %s: %s", l.name, problem)
		}
	}
	stop()
	listening.Wait()
	for _, problem := range append(replayErrors(history), healthErrors(history, killed)...) {
		t.Error(problem)
	}
	t.Logf("%d events, %d plugins, %d shims", len(history), len(killed), len(s.pids))
}

// churnVolume creates and deletes a volume until ctx ends.
func (s *sessionsEnv) churnVolume(ctx context.Context) {
	for ctx.Err() == nil {
		s.call("create", func(ctx context.Context, h *host.Host) error {
			return createText(ctx, h, volumeText("fake", "churned", ""))
		})
		s.call("delete", func(ctx context.Context, h *host.Host) error {
			err := h.DeleteVolume(ctx, volumeName("churned"))
			if errors.Is(err, host.ErrNotFound) {
				return nil // the host was closed before it answered
			}
			return err
		})
	}
}

// wantHealthy follows a plugin that stays healthy, over swaps. Each list has to report both of its instances.
func (s *sessionsEnv) wantHealthy(ctx context.Context, id host.PluginID) {
	q := host.PluginQuery{Plugin: id}
	for ctx.Err() == nil {
		session := s.current()
		list, at, err := session.Plugins(ctx, q)
		if q.MinIndex = at; ctx.Err() != nil {
			return
		}
		if errors.Is(err, host.ErrUnavailable) {
			<-session.replaced
			continue
		}
		unhealthy := func(i host.Instance) bool { return i.Health.State != host.Healthy }
		if len(list.Instances) != 2 || slices.ContainsFunc(list.Instances, unhealthy) {
			s.t.Errorf("the instances of plugin %s are %+v, %v", id, list.Instances, err)
		}
	}
}

// Events between two shims are not lost. A plugin that dies then is reported unhealthy once, one that starts then
// becomes healthy, one that was being stopped is never reported unhealthy, and a pending restart request stays.
func TestEventsOfTheGap(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	dies := e.addPlugin("alloc-dies", csifake.Monolith)
	stops := e.addPlugin("alloc-stops", csifake.Monolith)
	pending := e.addUnservedPlugin("alloc-pending")
	e.waitRestartRequest(pending)
	task, endpoint := e.preparePlugin("alloc-starts", csifake.Monolith, 1, "")
	e.must(e.host.TaskStarted(e.ctx(), task.Key(), 1))
	e.must(e.host.TaskStopping(e.ctx(), stops.task.Key(), 1))
	var starts *pluginTask
	e.betweenShims(func() {
		stops.Kill()
		dies.Kill()
		starts = e.servePlugin(task, csifake.Monolith, endpoint)
	})
	e.waitRegistered("alloc-starts")
	e.waitEvent(func(event host.Event) bool { return event.Kind == "unhealthy" && event.Alloc == "alloc-dies" })
	e.waitRestartRequest(pending)
	e.replaceShimByKill()
	e.waitRestartRequest(pending)
	for _, key := range []host.TaskKey{dies.task.Key(), stops.task.Key(), pending.Key()} {
		e.must(e.host.TaskExited(e.ctx(), key, 1, 0, 9, true))
	}
	e.must(e.host.TaskStopping(e.ctx(), starts.task.Key(), 1))
	e.stopPlugin(starts)
	got := map[string]int{}
	for _, event := range e.eventsUntil(func(event host.Event) bool {
		return event.Kind == "task deregistered" && event.Alloc == "alloc-starts"
	}) {
		got[fmt.Sprintf("%s %s", event.Kind, event.Alloc)]++
	}
	for what, times := range map[string]int{
		"unhealthy alloc-dies": 2, "deregistered alloc-dies": 2, "registered alloc-starts": 2,
		"unhealthy alloc-starts": 0,
		"unhealthy alloc-stops":  0, "deregistered alloc-stops": 2, "restart asked alloc-pending": 1,
	} {
		if got[what] != times {
			t.Errorf("%q is reported %d times, not %d", what, got[what], times)
		}
	}
}
