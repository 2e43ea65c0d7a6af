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

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// env is a supervisor over a state, plugins and sockets in memory. It lives in a synctest bubble.
type env struct {
	t       *testing.T
	log     *registrytest.Log
	fleet   *fleet
	sockets *sockets
	base    time.Time // when the machine booted
	boot    string
	random  func() float64
	served  func(context.Context, []registry.PluginTask) ([]registry.PluginTask, error)
	mu      sync.Mutex
	applied []registry.Applied
}

func newEnv(t *testing.T) *env {
	w := &env{
		t: t, fleet: &fleet{plugins: map[registry.TaskKey]*plugin{}}, sockets: &sockets{},
		base: time.Now().Add(-time.Hour), boot: "boot-1",
		random: func() float64 { return 0.5 },
	}
	w.log = registrytest.NewLog(time.Now)
	w.log.OnApplied(w.onApplied)
	return w
}

func (w *env) onApplied(a registry.Applied) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.applied = append(w.applied, a)
}

// restart starts a new process of the shim, with the durable state.
func (w *env) restart() {
	w.log = w.log.Reopen()
	w.log.OnApplied(w.onApplied)
}

func (w *env) bootTime() registry.BootTime {
	return registry.BootTime{Boot: w.boot, At: time.Since(w.base)}
}

// start records a task that starts now, with a plugin that listens.
func (w *env) start(name registry.TaskName) (registry.Task, *plugin) {
	w.t.Helper()
	task := registry.Task{
		TaskKey: registry.TaskKey{Alloc: "alloc", Task: name}, Attempt: 1, Phase: registry.TaskRunning,
		Started:  w.bootTime(),
		Endpoint: registry.Endpoint{Host: "/run/" + string(name) + "/csi.sock", Task: "/csi/csi.sock"},
		Volumes:  registry.Tree{Host: "/state/mnt", Task: "/local/csi"},
	}
	w.put(task)
	p := &plugin{up: true, ready: true, down: make(chan struct{}), version: "1"}
	w.fleet.plugins[task.TaskKey] = p
	return task, p
}

func (w *env) put(r registry.Record) {
	w.t.Helper()
	registrytest.Put(w.t, w.log, r)
	w.commits()
}

func spec(t hooks.PluginType) hooks.PluginSpec {
	return hooks.PluginSpec{
		ID: "disk", Type: t, HealthTimeout: hooks.DefaultHealthTimeout,
		Heartbeat: hooks.Heartbeat{Interval: hooks.DefaultHeartbeatInterval, Timeout: hooks.DefaultHeartbeatTimeout,
			Failures: hooks.DefaultHeartbeatFailures},
	}
}

// run supervises the task until stop or the end of the test, which end the supervision as the exit of the task does.
func (w *env) run(task registry.Task, s hooks.PluginSpec) (stop func() error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	clock := Clock{Now: time.Now, Boot: w.bootTime}
	sup := New(w.log, w.fleet, clock, func() float64 { return w.random() }, hclog.NewNullLogger())
	sup.missing, sup.Served = w.sockets.missing, w.served
	task.Restart = w.task(task.TaskKey).Restart // as an earlier shim has recorded it
	ended := make(chan error, 1)
	go func() { ended <- sup.Run(ctx, task, s) }()
	stop = sync.OnceValue(func() error {
		cancel(errStopped)
		err := <-ended
		w.fleet.Close(task.TaskKey)
		return err
	})
	w.t.Cleanup(func() { _ = stop() })
	return stop
}

var errStopped = errors.New("the test has ended")

// after waits, and then until every goroutine of the bubble is idle.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// commits describes the commits since its last call: each by the kinds of its events, with the causes of the task's
// events, and by the problem of a task that starts.
func (w *env) commits() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for _, a := range w.applied {
		var kinds []string
		for _, e := range a.Change.Events {
			kind := string(e.Kind)
			if e.Cause != "" && e.Role == "" {
				kind += " (" + string(e.Cause) + ")"
			}
			kinds = append(kinds, kind)
		}
		for _, r := range a.Change.Put {
			if task, is := r.(registry.Task); is && task.Problem != "" {
				kinds = append(kinds, "problem: "+task.Problem)
			}
		}
		out = append(out, strings.Join(kinds, ", "))
	}
	w.applied = nil
	return out
}

func (w *env) wantCommits(what string, want ...string) {
	w.t.Helper()
	if got := w.commits(); !slices.Equal(got, want) {
		w.t.Errorf("%s: commits are\n\t%s\nwant\n\t%s", what, strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

func (w *env) instances() (all []registry.Instance) {
	_ = w.log.View(context.Background(), func(v registry.View) error { all = v.AllInstances(); return nil })
	return all
}

func (w *env) task(k registry.TaskKey) (task registry.Task) {
	_ = w.log.View(context.Background(), func(v registry.View) error { task, _ = v.Task(k); return nil })
	return task
}

// wantHealth checks the state and cause of every instance.
func (w *env) wantHealth(what string, state registry.HealthState, cause registry.Cause) {
	w.t.Helper()
	all := w.instances()
	if len(all) == 0 {
		w.t.Errorf("%s: no instance", what)
	}
	for _, in := range all {
		if in.Health.State != state || in.Health.Cause != cause {
			w.t.Errorf("%s: %s is %s (%s: %s), want %s (%s)", what, in.InstanceKey, in.Health.State, in.Health.Cause,
				in.Health.Detail, state, cause)
		}
	}
}

// Commits of a plugin task with one role, and of a monolith.
const (
	nodeStarts     = "registered, activated, task healthy (probed), task registered"
	monolithStarts = "registered, registered, activated, activated, task healthy (probed), task registered"
	asksRestart    = "task unhealthy (start timeout), restart asked (start timeout)"
	nodeRecovers   = "healthy, task healthy (probed)"
)

func nodeUnhealthy(cause registry.Cause) string {
	return fmt.Sprintf("unhealthy, task unhealthy (%s)", cause)
}

// fleet holds connections to plugins in memory.
type fleet struct {
	mu      sync.Mutex
	plugins map[registry.TaskKey]*plugin
	open    int
}

func (f *fleet) Connect(_ registry.PluginID, t registry.TaskKey, _ registry.Endpoint) (Plugin, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open++
	return f.plugins[t], nil
}

func (f *fleet) Close(registry.TaskKey) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open--
}

// plugin is a plugin and the connection to it.
type plugin struct {
	mu        sync.Mutex
	up        bool // it listens
	ready     bool
	hangs     bool
	broken    error         // of Probe
	version   string        //
	unknown   error         // of Describe
	down      chan struct{} // closed as it ends
	outdated  bool
	probes    []time.Time
	described int
	running   int // running probes
	atOnce    int // largest number of running probes
}

var errRefused = errors.New("connection refused")

// set changes the behaviour of the plugin from now on.
func (p *plugin) set(f func(*plugin)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.up
	f(p)
	switch {
	case was && !p.up:
		close(p.down)
	case !was && p.up:
		p.down, p.outdated = make(chan struct{}), true
	}
}

func (p *plugin) Probe(ctx context.Context) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.probes = append(p.probes, time.Now())
	p.running++
	p.atOnce = max(p.atOnce, p.running)
	defer func() { p.running-- }()
	if p.up && p.hangs {
		p.mu.Unlock()
		<-ctx.Done()
		p.mu.Lock()
		return false, ctx.Err()
	}
	switch {
	case ctx.Err() != nil:
		return false, ctx.Err()
	case !p.up:
		return false, errRefused
	}
	return p.ready && p.broken == nil, p.broken
}

func (p *plugin) Describe(_ context.Context, roles []registry.Role) (map[registry.Role]registry.Fingerprint, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.described++
	switch {
	case !p.up:
		return nil, errRefused
	case p.unknown != nil:
		return nil, p.unknown
	}
	p.outdated = false
	out := map[registry.Role]registry.Fingerprint{}
	for _, role := range roles {
		out[role] = registry.Fingerprint{Provider: "disk.example.org", Version: p.version,
			NodeID: registry.NodeID("node of " + role)}
	}
	return out, nil
}

func (p *plugin) Outdated() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.outdated
}

func (p *plugin) Lost(ctx context.Context) error {
	p.mu.Lock()
	down := p.down
	p.mu.Unlock()
	select {
	case <-down:
		return errRefused
	case <-ctx.Done():
		return nil
	}
}

func (p *plugin) seen() (probes []time.Time, described int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.probes), p.described
}

// sockets simulates the directory of a socket.
type sockets struct {
	mu   sync.Mutex
	file bool // the socket's file is missing
	dir  bool // the directory is missing too
}

func (s *sockets) missing(string) (file, dir bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.file, s.dir
}

func (s *sockets) remove(file, dir bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.file, s.dir = file, dir
}

// runInBubble runs a subtest in a synctest bubble.
func runInBubble(t *testing.T, name string, f func(*testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}
