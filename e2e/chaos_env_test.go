package e2e

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// chaosEnv is an env whose host is reopened while others call it. It keeps the workload that the next host gets.
type chaosEnv struct {
	*env
	seed       uint64
	services   []*pluginService
	workers    []*worker
	volumes    []volumeSlot
	recorded   *eventList // by a watcher, over the death of shims and hosts
	watching   sync.WaitGroup
	restarting sync.WaitGroup // workers, which run until done is closed
	done       chan struct{}
	plugins    sync.WaitGroup

	mu         sync.Mutex // guards what follows
	session    *hostSession
	allocs     map[host.AllocID]host.AllocGroup
	tasks      map[host.TaskKey]host.WorkloadTask
	unreleased map[string]bool // allocs that are still to be released
}

func newChaosEnv(t *testing.T, seed uint64) *chaosEnv {
	e := newEnv(t, allCaps...)
	return &chaosEnv{
		env: e, seed: seed, recorded: &eventList{}, done: make(chan struct{}), session: newHostSession(e.host),
		allocs: map[host.AllocID]host.AllocGroup{}, tasks: map[host.TaskKey]host.WorkloadTask{},
		unreleased: map[string]bool{},
	}
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

func (c *chaosEnv) current() *hostSession {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.session
}

func (c *chaosEnv) locked(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

// call repeats a call at the next host if this one was closed meanwhile.
func (c *chaosEnv) call(f func(*host.Host) error) error {
	for {
		s := c.current()
		err := f(s.Host)
		if err == nil || !isClosed(s.closing) {
			return err
		}
		<-s.replaced
	}
}

// reopenHost closes the host and opens the next one with the workload.
func (c *chaosEnv) reopenHost() {
	s := c.current()
	close(s.closing)
	if err := s.Close(); err != nil {
		c.t.Errorf("close: %v", err)
	}
	c.locked(func() {
		c.config.Workload = host.Workload{Allocs: slices.Collect(maps.Values(c.allocs)),
			Tasks: slices.Collect(maps.Values(c.tasks))}
	})
	h, err := host.Open(c.ctx(), c.config)
	if err != nil {
		c.t.Errorf("open: %v", err)
		h = s.Host
	}
	c.locked(func() { c.host, c.session = h, newHostSession(h) })
	close(s.replaced)
}

// random returns the random numbers of one actor: they depend on the seed, not on other actors.
func (c *chaosEnv) random(actor string) *rand.Rand {
	h := fnv.New64a()
	_, _ = h.Write([]byte(actor))
	return rand.New(rand.NewPCG(c.seed, h.Sum64()))
}

// upTo is a random time of at most so many milliseconds.
func upTo(rng *rand.Rand, ms int) time.Duration {
	return time.Duration(rng.IntN(ms)+1) * time.Millisecond
}

// pluginService is one plugin with one storage system, served by several workers.
type pluginService struct {
	id      string
	caps    []string
	backend *csifake.Backend
}

// worker runs one task of a plugin after the other: attempts of an alloc, then the next alloc.
type worker struct {
	c       *chaosEnv
	service *pluginService
	role    csifake.Role
	name    string
	rng     *rand.Rand
	allocs  int
	task    host.AllocTask
	exited  chan struct{} // closed when the plugin has exited

	mu      sync.Mutex // guards running
	running *csifake.Plugin
}

func (c *chaosEnv) newWorker(s *pluginService, role csifake.Role, n int) *worker {
	w := &worker{c: c, service: s, role: role, name: fmt.Sprintf("%s-%s-%d", s.id, role, n)}
	w.rng = c.random(w.name)
	return w
}

// plugin returns the plugin that runs, or nil.
func (w *worker) plugin() *csifake.Plugin {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.running
}

// newAlloc prepares the first attempt of a new alloc.
func (w *worker) newAlloc() {
	w.allocs++
	job := w.c.parse(pluginText(w.service.id, w.role, "heartbeat {\n interval = \"1s\"\n }\n"))
	w.task = host.AllocTask{
		Alloc: host.AllocID(fmt.Sprintf("%s-%d", w.name, w.allocs)), Task: "plugin",
		Sealed: job.Groups[0].Tasks[0].Sealed,
	}
}

// start starts the next attempt as an orchestrator does.
func (w *worker) start() {
	w.task.Attempt++
	task := w.task
	w.setTask(host.WorkloadTask{AllocTask: task})
	var plan host.Plan
	w.report("starting", func(h *host.Host) (err error) { plan, err = h.TaskStarting(w.c.ctx(), task); return err })
	p, err := csifake.New(csifake.Config{
		Name: w.service.id + ".example.org", Role: w.role, Caps: w.service.caps, Journal: w.c.journal,
		Backend: w.service.backend,
		Socket:  csifake.SocketPath(planEnv(plan, "CSI_ENDPOINT")), Mounts: true, Instance: string(task.Alloc),
		DataDir:       filepath.Join(w.c.dir, "data", w.service.id),
		VolumeContext: map[string]string{"pool": "p"}, PublishContext: map[string]string{"lun": "7"},
	})
	if err != nil {
		w.c.t.Errorf("start %s: %v", task.Key(), err)
		return
	}
	exited := make(chan struct{})
	w.c.plugins.Go(func() {
		defer close(exited)
		if err := p.Run(context.WithoutCancel(w.c.t.Context())); err != nil {
			w.c.t.Errorf("%s: %v", task.Key(), err)
		}
	})
	w.exited = exited
	w.mu.Lock()
	w.running = p
	w.mu.Unlock()
	running := w.c.running(task)
	running.Started.At = proc.BootTime()
	w.setTask(running)
	w.report("started", func(h *host.Host) error { return h.TaskStarted(w.c.ctx(), task.Key(), task.Attempt) })
}

func (w *worker) setTask(t host.WorkloadTask) { w.c.locked(func() { w.c.tasks[t.Key()] = t }) }

// end ends the attempt and reports it.
func (w *worker) end(kill, final bool) {
	w.mu.Lock()
	p := w.running
	w.running = nil
	w.mu.Unlock()
	if kill {
		p.Kill()
	} else {
		p.Stop()
	}
	<-w.exited
	task := w.task
	w.setTask(host.WorkloadTask{AllocTask: task})
	if final {
		w.c.locked(func() { delete(w.c.tasks, task.Key()) })
	}
	w.report("exited", func(h *host.Host) error {
		return h.TaskExited(w.c.ctx(), task.Key(), task.Attempt, 0, 9, final)
	})
}

// restartIfDead starts a task again that has died.
func (w *worker) restartIfDead() {
	if isClosed(w.exited) {
		w.end(true, false)
		w.start()
	}
}

// report makes a call that must not fail, whatever happens to the shim meanwhile.
func (w *worker) report(what string, f func(*host.Host) error) {
	if err := w.c.call(f); err != nil {
		w.c.t.Errorf("task %s %s, attempt %d: %v", w.task.Key(), what, w.task.Attempt, err)
	}
}

// waitHealth waits until instances of the attempt have this health.
func (w *worker) waitHealth(health registry.HealthState) error {
	return waitFor(w.c.ctx(), fmt.Sprintf("%s attempt %d is %s", w.task.Alloc, w.task.Attempt, health), func() bool {
		var list host.PluginList
		err := w.c.call(func(h *host.Host) (err error) {
			list, _, err = h.Plugins(w.c.ctx(), host.PluginQuery{Plugin: host.PluginID(w.service.id)})
			return err
		})
		return err == nil && slices.ContainsFunc(list.Instances, func(i host.Instance) bool {
			return i.Alloc == w.task.Alloc && i.Attempt == w.task.Attempt && i.Health.State == health
		})
	})
}

func (c *chaosEnv) parse(text string) *host.Job {
	var job *host.Job
	err := c.call(func(h *host.Host) (err error) {
		job, _, err = h.Parse(c.ctx(), host.Source{Name: "job.hcl", Text: []byte(text)}, host.ParseOptions{})
		return err
	})
	if err != nil {
		c.t.Errorf("parse: %v", err)
		return &host.Job{Groups: []host.Group{{Tasks: []host.Task{{}}}}}
	}
	return job
}

// volumeSlot is a volume that may exist or not.
type volumeSlot struct {
	id   string
	spec host.VolumeSpec
}

func (c *chaosEnv) newVolumeSlot(plugin string, n int) volumeSlot {
	id := fmt.Sprintf("%s-%d", plugin, n)
	spec, err := parseVolume(c.ctx(), c.host, volumeText(plugin, id, ""))
	c.must(err)
	return volumeSlot{id, spec}
}

// within makes a call with a time limit.
func (c *chaosEnv) within(limit time.Duration, f func(context.Context, *host.Host) error) error {
	ctx, cancel := context.WithTimeout(c.ctx(), limit)
	defer cancel()
	return c.call(func(h *host.Host) error { return f(ctx, h) })
}

func (c *chaosEnv) createVolume(v volumeSlot, limit time.Duration) error {
	return c.within(limit, func(ctx context.Context, h *host.Host) error { return errOf(h.CreateVolume(ctx, v.spec)) })
}

func (c *chaosEnv) deleteVolume(v volumeSlot, limit time.Duration) error {
	return c.within(limit, func(ctx context.Context, h *host.Host) error {
		return h.DeleteVolume(ctx, volumeName(v.id))
	})
}

// watch follows events from host to host until ctx ends. If on returns errLeave, it continues only if again returns
// true.
func (c *chaosEnv) watch(
	ctx context.Context, name string, o func() host.WatchOptions, on func(host.Event) error, again func() bool,
) {
	for ctx.Err() == nil {
		s := c.current()
		err := s.Watch(ctx, o(), on)
		switch {
		case ctx.Err() != nil:
		case err == nil || errors.Is(err, errLeave):
			if !again() {
				return
			}
		case isClosed(s.closing), errors.Is(err, host.ErrUnavailable): // the host is being closed
			<-s.replaced
		default:
			c.t.Errorf("watcher %s: %v", name, err)
			return
		}
	}
}

// errLeave ends a watch.
var errLeave = errors.New("the watcher leaves")
