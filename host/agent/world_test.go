package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// journal is what happened outside the agent, in order: the oracle of these tests.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, fmt.Sprintf(format, args...))
}

func (j *journal) all() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.lines)
}

func (j *journal) count(prefix string) (n int) {
	for _, l := range j.all() {
		if strings.HasPrefix(l, prefix) {
			n++
		}
	}
	return n
}

// inOrder says whether lines with these prefixes come one after another, others between them.
func (j *journal) inOrder(prefixes ...string) bool {
	for _, l := range j.all() {
		if len(prefixes) > 0 && strings.HasPrefix(l, prefixes[0]) {
			prefixes = prefixes[1:]
		}
	}
	return len(prefixes) == 0
}

// machine is a driver whose tasks are entries of a map: they outlive agents, as real ones do.
type machine struct {
	journal *journal
	mu      sync.Mutex
	tasks   map[string]*process
	refuse  error // what Start answers
	deaf    bool  // tasks use all the time that they are given to end
}

type process struct {
	task taskdriver.Task
	pid  int
	done chan struct{}
	exit taskdriver.Exit
}

func (m *machine) Name() string   { return "exec" }
func (m *machine) Isolated() bool { return true }

func (m *machine) Start(_ context.Context, t taskdriver.Task) (taskdriver.Handle, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refuse != nil {
		return taskdriver.Handle{}, m.refuse
	}
	pid := 1001 + len(m.tasks)
	m.tasks[t.ID] = &process{task: t, pid: pid, done: make(chan struct{})}
	m.journal.add("start %s", taskOf(t.Env))
	return taskdriver.Handle{ID: t.ID, Driver: "exec", Dir: t.Dir, TaskPID: pid}, nil
}

func (m *machine) fails(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refuse = err
}

func (m *machine) get(id string) *process {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tasks[id]
}

func (m *machine) Wait(ctx context.Context, h taskdriver.Handle) (taskdriver.Exit, error) {
	p := m.get(h.ID)
	select {
	case <-p.done:
		return p.exit, nil
	case <-ctx.Done():
		return taskdriver.Exit{}, context.Cause(ctx)
	}
}

func (m *machine) Stop(ctx context.Context, h taskdriver.Handle, grace time.Duration) error {
	if m.deaf {
		select {
		case <-time.After(grace):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	m.end(h.ID, 0, "stop")
	return nil
}

// end has a task end, if it has not.
func (m *machine) end(id string, code int, why string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.tasks[id]
	select {
	case <-p.done:
	default:
		m.journal.add("%s %s", why, taskOf(p.task.Env))
		p.exit = taskdriver.Exit{Code: code}
		close(p.done)
	}
}

func (m *machine) Adopt(_ context.Context, h taskdriver.Handle) (bool, error) {
	select {
	case <-m.get(h.ID).done:
		return false, nil
	default:
		return true, nil
	}
}

func (m *machine) Logs(context.Context, taskdriver.Handle, taskdriver.Stream, bool, io.Writer) error {
	return nil
}

// find is taskdriver.Find: the last task started in a directory.
func (m *machine) find(_ context.Context, dir string) (taskdriver.Handle, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, p := range m.tasks {
		if p.task.Dir == dir && !closed(p.done) {
			return taskdriver.Handle{ID: id, Driver: "exec", Dir: dir}, true, nil
		}
	}
	return taskdriver.Handle{}, false, nil
}

// parents is taskdriver.Parents.
func (m *machine) parents(dir string) (out []taskdriver.Parent, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, p := range m.tasks {
		if strings.HasPrefix(p.task.Dir, dir+"/") && !closed(p.done) {
			out = append(out, taskdriver.Parent{PID: p.pid, ID: id, Dir: p.task.Dir})
		}
	}
	slices.SortFunc(out, func(x, y taskdriver.Parent) int { return x.PID - y.PID })
	return out, nil
}

func closed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// taskOf is job/task of an environment.
func taskOf(env []string) string {
	get := func(name string) string {
		for _, e := range env {
			if v, is := strings.CutPrefix(e, name+"="); is {
				return v
			}
		}
		return ""
	}
	return get("NOMAD_JOB_ID") + "/" + get("NOMAD_TASK_NAME")
}

// shim is a Storage in memory.
type shim struct {
	journal  *journal
	mu       sync.Mutex
	prepare  func(host.AllocGroup) error // nil: at once
	release  func(host.AllocID) error
	starting func(host.AllocTask) error
	pending  []host.PendingRestart
	changed  chan struct{} // of pending; closed and replaced
	hint     chan struct{} // a plugin has changed
	volumes  []host.VolumeStatus
	waiting  []registry.Wait // of every alloc
	hang     bool            // no alloc is prepared before its caller gives up
	jobs     map[host.AllocID]string
}

func newShim(j *journal) *shim {
	return &shim{journal: j, changed: make(chan struct{}), hint: make(chan struct{}), jobs: map[host.AllocID]string{}}
}

func (s *shim) TaskStarting(_ context.Context, t host.AllocTask) (host.Plan, error) {
	s.journal.add("starting %s/%s %d", t.Job, t.Task, t.Attempt)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.jobs[t.Alloc] = t.Job
	if s.starting != nil {
		if err := s.starting(t); err != nil {
			return host.Plan{}, err
		}
	}
	return host.Plan{Env: []hooks.Env{{Name: "CSI_ENDPOINT", Value: "unix:///csi/csi.sock", Default: true}}}, nil
}

func (s *shim) TaskStarted(_ context.Context, k host.TaskKey, attempt uint64) error {
	s.journal.add("started %s/%s %d", s.job(k.Alloc), k.Task, attempt)
	return nil
}

func (s *shim) TaskStopping(_ context.Context, k host.TaskKey, attempt uint64) error {
	s.journal.add("silent %s/%s %d", s.job(k.Alloc), k.Task, attempt)
	return nil
}

func (s *shim) TaskExited(_ context.Context, k host.TaskKey, attempt uint64, code, signal int, final bool) error {
	s.journal.add("exited %s/%s %d code=%d final=%v", s.job(k.Alloc), k.Task, attempt, code, final)
	return nil
}

func (s *shim) job(id host.AllocID) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.jobs[id]
}

func (s *shim) ask(p ...host.PendingRestart) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending = p
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *shim) Restarts(ctx context.Context, fn func([]host.PendingRestart) error) error {
	for {
		s.mu.Lock()
		list, changed := s.pending, s.changed
		s.mu.Unlock()
		if err := fn(list); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *shim) PrepareAlloc(ctx context.Context, g host.AllocGroup) (map[string]host.Plan, error) {
	if s.hang {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	s.mu.Lock()
	s.jobs[g.Alloc] = g.Job
	s.mu.Unlock()
	if s.prepare != nil { // may take its time; the shim answers meanwhile
		if err := s.prepare(g); err != nil {
			s.journal.add("refused %s", g.Job)
			return nil, err
		}
	}
	s.journal.add("prepared %s", g.Job)
	plan := host.Plan{Binds: []hooks.Bind{{Source: "/vol", Target: "/data", Propagation: hooks.Private}}}
	return map[string]host.Plan{"main": plan}, nil
}

func (s *shim) ReleaseAlloc(_ context.Context, id host.AllocID) error {
	if s.release != nil { // may take its time; the shim answers meanwhile
		if err := s.release(id); err != nil {
			return err
		}
	}
	s.journal.add("released %s", s.job(id))
	return nil
}

func (s *shim) Fingerprints(ctx context.Context, _ host.PluginQuery, fn func([]host.PluginFingerprint, bool) error) error {
	for {
		select {
		case <-s.hint:
			if err := fn(nil, false); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *shim) Allocs(_ context.Context, only host.AllocID) ([]host.AllocStatus, host.Seq, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return []host.AllocStatus{{Alloc: registry.Alloc{ID: only, Waiting: s.waiting}}}, 1, nil
}

func (s *shim) Volumes(context.Context, host.VolumeQuery) ([]host.VolumeStatus, host.Seq, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.volumes, 1, nil
}

// world is a machine and a shim, on which agents come and go.
type world struct {
	*testing.T
	*journal
	dir     string
	machine *machine
	shim    *shim
	agent   *Agent
	end     context.CancelFunc
	ran     chan error
}

// inWorld runs a test in time of its own, with an agent running.
func inWorld(t *testing.T, test func(w *world)) { inWorldAt(t, t.TempDir(), test) }

func inWorldAt(t *testing.T, dir string, test func(w *world)) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal{}
		w := &world{T: t, journal: j, dir: dir, machine: &machine{journal: j, tasks: map[string]*process{}}, shim: newShim(j)}
		if err := os.WriteFile(w.shimRecords(), []byte("records"), 0o600); err != nil {
			t.Fatal(err)
		}
		w.open()
		w.run()
		defer w.kill()
		test(w)
	})
}

// shimRecords is the file of a real shim.
func (w *world) shimRecords() string { return hooks.Layout{State: w.dir}.Database() }

func (w *world) open() {
	w.Helper()
	a, err := New(Config{StateDir: w.dir, Name: "node1", Drivers: []taskdriver.Driver{w.machine}, Find: w.machine.find,
		Parents: w.machine.parents})
	if err != nil {
		w.Fatal(err)
	}
	w.agent = a
}

func (w *world) run() {
	ctx, cancel := context.WithCancel(w.Context())
	w.end, w.ran = cancel, make(chan error, 1)
	go func() { w.ran <- w.agent.Run(ctx, w.shim) }()
}

// kill ends the agent; what it has started goes on.
func (w *world) kill() {
	w.Helper()
	w.end()
	if err := errors.Join(<-w.ran, w.agent.Close()); err != nil {
		w.Error(err)
	}
}

// await waits until the condition holds; an hour of this test's time is for ever.
func (w *world) await(what string, holds func([]*AllocRecord) bool) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), time.Hour)
	defer cancel()
	if err := w.agent.Await(ctx, holds); err != nil {
		for _, r := range w.agent.Allocs() {
			w.Logf("alloc of %s: %s %s %+v", r.Job, r.State, r.Reason, r.Notes)
		}
		w.Fatalf("never: %s\n%s", what, strings.Join(w.all(), "\n"))
	}
	synctest.Wait()
}

func (w *world) awaitState(job string, state AllocState) *AllocRecord {
	w.Helper()
	var found *AllocRecord
	w.await(job+" is "+string(state), func(all []*AllocRecord) bool {
		for _, r := range all {
			if r.Job == job && r.State == state {
				found = r
			}
		}
		return found != nil
	})
	return found
}

// awaitRunning waits until all tasks of the job's newest alloc run, and returns it.
func (w *world) awaitRunning(job string) *AllocRecord {
	w.Helper()
	var found *AllocRecord
	w.await(job+" runs", func(all []*AllocRecord) bool {
		found = nil
		for _, r := range all {
			if r.Job != job || r.State != AllocRunning {
				continue
			}
			found = r
			for _, t := range r.Tasks {
				if t.State != TaskRunning {
					found = nil
				}
			}
		}
		return found != nil
	})
	return found
}

func (w *world) submit(j *hooks.Job) {
	w.Helper()
	if _, err := w.agent.Submit(w.Context(), j, Source{Name: j.ID + ".hcl"}, w.shim, SubmitOptions{}); err != nil {
		w.Fatal(err)
	}
}

func (w *world) takeDown() {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), time.Hour)
	defer cancel()
	if err := w.agent.TakeDown(ctx); err != nil {
		w.Error(err)
	}
}

func (w *world) has(prefixes ...string) {
	w.Helper()
	if !w.inOrder(prefixes...) {
		w.Errorf("want in this order:\n  %s\ngot:\n  %s", strings.Join(prefixes, "\n  "), strings.Join(w.all(), "\n  "))
	}
}

// Jobs.

func job(id, kind string, groups ...hooks.Group) *hooks.Job {
	return &hooks.Job{ID: id, Namespace: "default", Type: kind, Groups: groups, Digest: "d-" + id}
}

func tasks(name string, list ...hooks.Task) hooks.Group {
	return hooks.Group{Name: name, Count: 1, Tasks: list}
}

func withVolumes(g hooks.Group) hooks.Group {
	g.Volumes, g.Sealed = []string{"data"}, hooks.Sealed("volumes")
	return g
}

func task(name string, rest string) hooks.Task {
	return hooks.Task{Name: host.TaskName(name), Driver: "exec", Config: json.RawMessage(`{"command":"/bin/true"}`), Rest: json.RawMessage(rest)}
}

func plugin(id string) hooks.Task {
	t := task("plugin", `{"restart":[{"attempts":1,"interval":"1h","delay":"1s","mode":"fail"}]}`)
	t.Plugin, t.Sealed = host.PluginID(id), hooks.Sealed("plugin")
	return t
}
