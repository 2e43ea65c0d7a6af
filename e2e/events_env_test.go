package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// sessionsEnv is an env whose host is closed and opened again while other goroutines call it. It keeps the workload
// that the next host gets.
type sessionsEnv struct {
	*env
	mu      sync.Mutex // guards what follows
	session *hostSession
	tasks   map[host.TaskKey]host.WorkloadTask
}

// hostSession is one host from Open to Close.
type hostSession struct {
	*host.Host
	closing  chan struct{} // closed before Close
	replaced chan struct{} // closed once the next one is open
}

func newHostSession(h *host.Host) *hostSession {
	return &hostSession{h, make(chan struct{}), make(chan struct{})}
}

func newSessionsEnv(t *testing.T) *sessionsEnv {
	e := newEnv(t, allCaps...)
	return &sessionsEnv{env: e, session: newHostSession(e.host), tasks: map[host.TaskKey]host.WorkloadTask{}}
}

func (s *sessionsEnv) current() *hostSession {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.session
}

// call makes a call, and makes it again at the next host if this one was closed meanwhile. It must succeed.
func (s *sessionsEnv) call(what string, f func(context.Context, *host.Host) error) {
	for {
		session := s.current()
		err := f(s.ctx(), session.Host)
		if err != nil && isClosed(session.closing) {
			<-session.replaced
			continue
		}
		if err != nil {
			s.t.Errorf("%s: %v", what, err)
		}
		return
	}
}

// reopenHost closes the host and opens the next one with the workload.
func (s *sessionsEnv) reopenHost() {
	session := s.current()
	close(session.closing)
	s.must(session.Close())
	s.mu.Lock()
	s.config.Workload = host.Workload{Tasks: slices.Collect(maps.Values(s.tasks))}
	s.mu.Unlock()
	s.open()
	s.mu.Lock()
	s.session = newHostSession(s.host)
	s.mu.Unlock()
	close(session.replaced)
}

// setTask sets how the next host finds a task.
func (s *sessionsEnv) setTask(task host.AllocTask, running bool) {
	next := host.WorkloadTask{AllocTask: task}
	if running {
		next = s.running(task)
		next.Started.At = proc.BootTime()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tasks[task.Key()] = next
}

// churnPlugins has plugins start, die, start again and stop, one after the other.
func (s *sessionsEnv) churnPlugins(ctx context.Context) (killed []host.AllocID) {
	for n := 0; ctx.Err() == nil; n++ {
		w := &worker{s: s, task: host.AllocTask{Alloc: host.AllocID(fmt.Sprint("churn-", n)), Task: "plugin"}}
		s.call("parse", func(ctx context.Context, h *host.Host) error {
			text := pluginText("churn", csifake.Monolith, "heartbeat {\n interval = \"1s\"\n }\n")
			job, _, err := h.Parse(ctx, host.Source{Name: "job.hcl", Text: []byte(text)}, host.ParseOptions{})
			if err == nil {
				w.task.Sealed = job.Groups[0].Tasks[0].Sealed
			}
			return err
		})
		w.start()
		w.waitHealth(host.Healthy)
		w.plugin.Kill()
		w.waitHealth(host.Unhealthy)
		w.exit(false)
		w.start()
		w.waitHealth(host.Healthy)
		s.call("stopping", func(ctx context.Context, h *host.Host) error {
			return h.TaskStopping(ctx, w.task.Key(), w.task.Attempt)
		})
		w.plugin.Stop()
		w.exit(true)
		killed = append(killed, w.task.Alloc)
	}
	return killed
}

// worker runs the attempts of a plugin's task.
type worker struct {
	s      *sessionsEnv
	task   host.AllocTask
	plugin *csifake.Plugin
	exited <-chan error
}

// start starts the next attempt as an orchestrator does.
func (w *worker) start() {
	w.task.Attempt++
	w.s.setTask(w.task, false)
	var plan host.Plan
	w.s.call("starting", func(ctx context.Context, h *host.Host) (err error) {
		plan, err = h.TaskStarting(ctx, w.task)
		return err
	})
	p, err := csifake.New(csifake.Config{
		Name: "churn.example.org", Journal: w.s.journal, Socket: csifake.SocketPath(planEnv(plan, "CSI_ENDPOINT")),
		Blind: true, Instance: string(w.task.Alloc),
	})
	if err != nil {
		w.s.t.Errorf("start %s: %v", w.task.Key(), err)
		return
	}
	w.plugin, w.exited = p, background(func() error { return p.Run(context.WithoutCancel(w.s.t.Context())) })
	w.s.setTask(w.task, true)
	w.s.call("started", func(ctx context.Context, h *host.Host) error {
		return h.TaskStarted(ctx, w.task.Key(), w.task.Attempt)
	})
}

// exit reports that the attempt has ended.
func (w *worker) exit(final bool) {
	if err := <-w.exited; err != nil {
		w.s.t.Errorf("%s: %v", w.task.Key(), err)
	}
	w.s.setTask(w.task, false)
	if final {
		w.s.mu.Lock()
		delete(w.s.tasks, w.task.Key())
		w.s.mu.Unlock()
	}
	w.s.call("exited", func(ctx context.Context, h *host.Host) error {
		return h.TaskExited(ctx, w.task.Key(), w.task.Attempt, 0, 9, final)
	})
}

// waitHealth waits until instances of the attempt have this health.
func (w *worker) waitHealth(health registry.HealthState) {
	err := waitFor(w.s.ctx(), fmt.Sprintf("%s attempt %d is %s", w.task.Alloc, w.task.Attempt, health), func() bool {
		var list host.PluginList
		w.s.call("plugins", func(ctx context.Context, h *host.Host) (err error) {
			list, _, err = h.Plugins(ctx, host.PluginQuery{Plugin: "churn"})
			return err
		})
		return slices.ContainsFunc(list.Instances, func(i host.Instance) bool {
			return i.Alloc == w.task.Alloc && i.Attempt == w.task.Attempt && i.Health.State == health
		})
	})
	if err != nil {
		w.s.t.Error(err)
	}
}

// watch follows events from host to host until ctx ends. It continues if on returns errLeave.
func (s *sessionsEnv) watch(
	ctx context.Context, name string, o func() host.WatchOptions, on func(host.Event) error,
) {
	for ctx.Err() == nil {
		session := s.current()
		err := session.Watch(ctx, o(), on)
		switch {
		case ctx.Err() != nil, errors.Is(err, errLeave):
		case isClosed(session.closing), errors.Is(err, host.ErrUnavailable): // the host is being closed
			<-session.replaced
		default:
			s.t.Errorf("watcher %s: %v", name, err)
			return
		}
	}
}

// errLeave ends a watch.
var errLeave = errors.New("the watcher leaves")
