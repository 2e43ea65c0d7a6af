package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// journal lists events outside of the agent, in order. The tests check it.
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

// fakeDriver runs tasks as entries of a map. Like real tasks, they outlive agents.
type fakeDriver struct {
	journal    *journal
	mu         sync.Mutex
	tasks      map[string]*fakeTask
	startErr   error
	prepare    func(ctx context.Context, progress func(string)) error
	ignoreTerm bool                      // tasks use their whole grace
	failed     func(dir string) error    // RemoveFailed; nil: succeeds
	stopErr    func(time.Duration) error // Stop, with its grace; nil: succeeds
}

type fakeTask struct {
	task taskdriver.Task
	pid  int
	done chan struct{}
	exit taskdriver.Exit
}

func (p *fakeTask) ended() bool { return isClosed(p.done) }

func (d *fakeDriver) Name() string   { return "exec" }
func (d *fakeDriver) Isolated() bool { return true }
func (d *fakeDriver) Configure(t *taskdriver.Task, config json.RawMessage) ([]string, error) {
	return taskdriver.NewExec().Configure(t, config)
}

func (d *fakeDriver) Prepare(ctx context.Context, _ taskdriver.Task, progress func(string)) error {
	if d.prepare == nil {
		return nil
	}
	return d.prepare(ctx, progress)
}

func (d *fakeDriver) Start(_ context.Context, t taskdriver.Task) (taskdriver.Handle, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.startErr != nil {
		return taskdriver.Handle{}, d.startErr
	}
	if err := os.MkdirAll(t.Dir, 0o700); err != nil {
		return taskdriver.Handle{}, err
	}
	pid := 1001 + len(d.tasks)
	d.tasks[t.ID] = &fakeTask{task: t, pid: pid, done: make(chan struct{})}
	d.journal.add("start %s", jobAndTask(t.Env))
	return taskdriver.Handle{ID: t.ID, Driver: "exec", Dir: t.Dir, TaskPID: pid}, nil
}

func (d *fakeDriver) RemoveFailed(_ context.Context, dir string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed == nil {
		return nil
	}
	return d.failed(dir)
}

func (d *fakeDriver) failStarts(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.startErr = err
}

func (d *fakeDriver) get(id string) *fakeTask {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.tasks[id]
}

func (d *fakeDriver) Wait(ctx context.Context, h taskdriver.Handle) (taskdriver.Exit, error) {
	p := d.get(h.ID)
	select {
	case <-p.done:
		return p.exit, nil
	case <-ctx.Done():
		return taskdriver.Exit{}, context.Cause(ctx)
	}
}

func (d *fakeDriver) Stop(ctx context.Context, h taskdriver.Handle, grace time.Duration) error {
	if d.stopErr != nil {
		if err := d.stopErr(grace); err != nil {
			return err
		}
	}
	if d.ignoreTerm {
		sleep(ctx, grace, nil)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	d.end(h.ID, 0, "stop")
	return nil
}

// end ends a running task. The journal gets verb.
func (d *fakeDriver) end(id string, code int, verb string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.tasks[id]; !p.ended() {
		d.journal.add("%s %s", verb, jobAndTask(p.task.Env))
		p.exit = taskdriver.Exit{Code: code}
		close(p.done)
	}
}

func (d *fakeDriver) Adopt(_ context.Context, h taskdriver.Handle) (bool, error) {
	return !d.get(h.ID).ended(), nil
}

func (d *fakeDriver) Logs(context.Context, taskdriver.Handle, taskdriver.Stream, bool, io.Writer) error {
	return nil
}

// find replaces taskdriver.Find.
func (d *fakeDriver) find(_ context.Context, dir string) (h taskdriver.Handle, found bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	last := 0
	for id, p := range d.tasks {
		if p.task.Dir == dir && p.pid > last {
			h, last = taskdriver.Handle{ID: id, Driver: "exec", Dir: dir}, p.pid
		}
	}
	return h, last > 0, nil
}

// forget removes the tasks of an alloc with their files.
func (d *fakeDriver) forget(id host.AllocID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.tasks, func(attempt string, _ *fakeTask) bool { return strings.HasPrefix(attempt, string(id)) })
}

// parents replaces taskdriver.Parents.
func (d *fakeDriver) parents(dir string) (out []taskdriver.Parent, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, p := range d.tasks {
		if strings.HasPrefix(p.task.Dir, dir+"/") && !p.ended() {
			out = append(out, taskdriver.Parent{PID: p.pid, ID: id, Dir: p.task.Dir})
		}
	}
	slices.SortFunc(out, func(x, y taskdriver.Parent) int { return x.PID - y.PID })
	return out, nil
}

func jobAndTask(env []string) string {
	values := map[string]string{}
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		values[name] = value
	}
	return values["NOMAD_JOB_ID"] + "/" + values["NOMAD_TASK_NAME"]
}

// fakeShim is a Storage in memory.
type fakeShim struct {
	journal  *journal
	prepare  func(host.AllocGroup) error // nil: succeeds at once
	release  func(host.AllocID) error
	starting func(host.AllocTask) error
	hang     bool                 // PrepareAlloc hangs
	stuck    atomic.Bool          // ReleaseAlloc hangs
	hint     chan struct{}        // a plugin has changed
	restarts chan host.PluginTask // with a restart request
	nodes    chan host.NodeStatus
	events   chan host.Event

	mu      sync.Mutex
	volumes []host.VolumeStatus
	plugins []fakePlugin
	sick    bool                   // plugins that start from now on are not healthy
	use     func(*host.PluginTask) // sets what is needed of a plugin task; may be nil
	waiting []registry.Wait        // of every alloc
	lost    host.AllocID           // the shim releases its volumes; empty: none
	node    host.NodeStatus        // the last of nodes
	slow    time.Duration          // Nodes takes that long
	jobs    map[host.AllocID]string
}

func (s *fakeShim) TaskStarting(_ context.Context, t host.AllocTask) (host.Plan, error) {
	s.journal.add("starting %s/%s %d", t.Job, t.Task, t.Attempt)
	s.setJob(t.Alloc, t.Job)
	if s.starting != nil {
		if err := s.starting(t); err != nil {
			return host.Plan{}, err
		}
	}
	return host.Plan{Env: []hooks.Env{{Name: "CSI_ENDPOINT", Value: "unix:///csi/csi.sock", Default: true}}}, nil
}

// PreferTask makes the plugin task the newest.
func (s *fakeShim) PreferTask(_ context.Context, k host.TaskKey, _ uint64) error {
	s.journal.add("prefer %s/%s", s.job(k.Alloc), k.Task)
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.plugins, func(p fakePlugin) bool { return p.key == k })
	s.plugins = append(slices.Delete(slices.Clone(s.plugins), i, i+1), s.plugins[i])
	return nil
}

// fakePlugin is a running plugin task, as the shim sees it. The newest healthy task is active.
type fakePlugin struct {
	key  host.TaskKey
	sick bool
}

// Plugins lists the running plugin tasks of all plugins. If it has to wait, it waits until the test sends something.
func (s *fakeShim) Plugins(ctx context.Context, q host.PluginQuery) (host.PluginList, host.Seq, error) {
	if q.MinIndex > 0 {
		select {
		case asked := <-s.restarts:
			return host.PluginList{Tasks: []host.PluginTask{asked}}, 1, nil
		case <-s.hint:
		case <-ctx.Done():
			return host.PluginList{}, 0, context.Cause(ctx)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var out host.PluginList
	active := -1
	for i, p := range s.plugins {
		if !p.sick {
			active = i
		}
		t := host.PluginTask{TaskKey: p.key, Healthy: !p.sick}
		if s.use != nil {
			s.use(&t)
		}
		out.Tasks = append(out.Tasks, t)
	}
	if active >= 0 {
		out.Tasks[active].Active = true
	}
	return out, 1, nil
}

func (s *fakeShim) TaskStarted(_ context.Context, k host.TaskKey, attempt uint64) error {
	s.mu.Lock()
	s.plugins = append(s.plugins, fakePlugin{k, s.sick})
	s.mu.Unlock()
	s.journal.add("started %s/%s %d", s.job(k.Alloc), k.Task, attempt)
	return nil
}

func (s *fakeShim) TaskStopping(_ context.Context, k host.TaskKey, attempt uint64) error {
	s.journal.add("stopping %s/%s %d", s.job(k.Alloc), k.Task, attempt)
	return nil
}

func (s *fakeShim) TaskExited(_ context.Context, k host.TaskKey, attempt uint64, code, signal int, final bool) error {
	s.journal.add("exited %s/%s %d code=%d final=%v", s.job(k.Alloc), k.Task, attempt, code, final)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.plugins = slices.DeleteFunc(s.plugins, func(p fakePlugin) bool { return p.key == k })
	return nil
}

func (s *fakeShim) setJob(id host.AllocID, job string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.jobs[id] = job
}

func (s *fakeShim) job(id host.AllocID) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.jobs[id]
}

// follow passes on what the test sends, until ctx ends.
func follow[T any](ctx context.Context, sent <-chan T, fn func(T) error) error {
	for {
		select {
		case v := <-sent:
			if err := fn(v); err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *fakeShim) PrepareAlloc(ctx context.Context, g host.AllocGroup) (map[string]host.Plan, error) {
	s.setJob(g.Alloc, g.Job)
	if s.hang {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	if s.prepare != nil {
		if err := s.prepare(g); err != nil {
			s.journal.add("refused %s", g.Job)
			return nil, err
		}
	}
	s.journal.add("prepared %s", g.Job)
	plan := host.Plan{Binds: []hooks.Bind{{Source: "/vol", Target: "/data", Propagation: hooks.Private}}}
	return map[string]host.Plan{"main": plan, engineTask: plan}, nil
}

func (s *fakeShim) ReplaceAlloc(ctx context.Context, id host.AllocID) error {
	s.journal.add("kept volumes of %s", s.job(id))
	return s.ReleaseAlloc(ctx, id)
}

func (s *fakeShim) ReleaseAlloc(ctx context.Context, id host.AllocID) error {
	if s.stuck.Load() {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	if s.release != nil {
		if err := s.release(id); err != nil {
			return err
		}
	}
	s.journal.add("released %s", s.job(id))
	return nil
}

func (s *fakeShim) Allocs(_ context.Context, q host.AllocQuery) ([]host.AllocStatus, host.Seq, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.ID == "" {
		return []host.AllocStatus{{Alloc: registry.Alloc{ID: s.lost, State: registry.AllocReleasing}}}, 1, nil
	}
	al := host.AllocStatus{Alloc: registry.Alloc{ID: q.ID, Waiting: s.waiting},
		Volumes: make([]registry.AllocVolume, 1)}
	if s.lost == q.ID {
		al.State, al.Volumes = registry.AllocReleasing, nil
	}
	return []host.AllocStatus{al}, 1, nil
}

func (s *fakeShim) Watch(ctx context.Context, o host.WatchOptions, fn func(host.Event) error) error {
	if o.Snapshot {
		if err := fn(host.Event{Kind: host.EventResync}); err != nil {
			return err
		}
	}
	return follow(ctx, s.events, fn)
}

// Nodes returns this node. If it has to wait, it waits until the test changes the node.
func (s *fakeShim) Nodes(ctx context.Context, q host.NodeQuery) ([]host.NodeStatus, host.Seq, error) {
	sleep(ctx, s.slow, nil)
	if q.MinIndex > 0 {
		select {
		case changed := <-s.nodes:
			s.mu.Lock()
			s.node = changed
			s.mu.Unlock()
		case <-ctx.Done():
			return nil, 0, context.Cause(ctx)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return []host.NodeStatus{s.node}, q.MinIndex + 1, nil
}

func (s *fakeShim) Volumes(context.Context, host.VolumeQuery) ([]host.VolumeStatus, host.Seq, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.volumes, 1, nil
}

// env has a driver and a shim that outlive agents, and the current agent.
type env struct {
	*testing.T
	*journal
	dir    string
	driver *fakeDriver
	shim   *fakeShim
	agent  *Agent
	end    context.CancelFunc
	ran    chan error

	mountUsers atomic.Int32 // of the mount for container engines
	unmounted  atomic.Bool  // that mount is gone
}

// withAgent runs a test with a running agent, in a synctest bubble.
func withAgent(t *testing.T, test func(e *env)) { withAgentAt(t, t.TempDir(), test) }

func withAgentAt(t *testing.T, dir string, test func(e *env)) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal{}
		e := &env{
			T: t, journal: j, dir: dir, driver: &fakeDriver{journal: j, tasks: map[string]*fakeTask{}},
			shim: &fakeShim{journal: j, hint: make(chan struct{}), restarts: make(chan host.PluginTask),
				jobs: map[host.AllocID]string{}, nodes: make(chan host.NodeStatus), events: make(chan host.Event)},
		}
		e.must(os.WriteFile(e.shimDB(), []byte("records"), 0o600))
		e.open()
		e.run()
		defer e.kill()
		test(e)
	})
}

func (e *env) must(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

func (e *env) shimDB() string { return hooks.Layout{State: e.dir}.Database() }

func (e *env) config() Config {
	return Config{
		StateDir: e.dir, Name: "node1", Drivers: []taskdriver.Driver{e.driver}, Find: e.driver.find,
		Parents: e.driver.parents,
	}
}

func (e *env) open() {
	e.Helper()
	a, err := New(e.config())
	e.must(err)
	a.engine.users = func(paths []string) (map[string][]mount.User, error) {
		return map[string][]mount.User{paths[0]: make([]mount.User, e.mountUsers.Load())}, nil
	}
	a.engine.isMount = func(string) (bool, error) { return !e.unmounted.Load(), nil }
	e.agent = a
}

func (e *env) run() {
	ctx, cancel := context.WithCancel(e.Context())
	e.end, e.ran = cancel, make(chan error, 1)
	go func() { e.ran <- e.agent.Run(ctx, e.shim) }()
}

// kill ends the agent. Its tasks keep running.
func (e *env) kill() {
	e.Helper()
	e.end()
	if err := errors.Join(<-e.ran, e.agent.Close()); err != nil {
		e.Error(err)
	}
}

// restart replaces the agent. between runs while there is no agent.
func (e *env) restart(between func()) host.Workload {
	e.Helper()
	e.kill()
	if between != nil {
		between()
	}
	e.open()
	workload, err := e.agent.Workload(e.Context())
	e.must(err)
	e.run()
	synctest.Wait()
	return workload
}

// setShim changes the answers of the shim.
func (e *env) setShim(change func(*fakeShim)) {
	e.shim.mu.Lock()
	defer e.shim.mu.Unlock()
	change(e.shim)
}

// edit changes a record in the ledger while no agent runs.
func (e *env) edit(id host.AllocID, change func(*AllocRecord)) {
	e.Helper()
	l, err := openLedger(ledgerPath(e.dir))
	e.must(err)
	content, err := l.load()
	e.must(err)
	change(content.allocs[id])
	e.must(errors.Join(l.write(entry{allocsBucket, string(id), content.allocs[id]}), l.close()))
}

// timeout returns a context that ends after a minute of the bubble's time.
func (e *env) timeout() context.Context {
	ctx, cancel := context.WithTimeout(e.Context(), time.Minute)
	e.Cleanup(cancel)
	return ctx
}

// await waits until the condition holds, for up to an hour of the bubble's time.
func (e *env) await(what string, holds func([]*AllocRecord) bool) {
	e.Helper()
	ctx, cancel := context.WithTimeout(e.Context(), time.Hour)
	defer cancel()
	if err := e.agent.Await(ctx, holds); err != nil {
		for _, r := range e.agent.Allocs() {
			e.Logf("alloc of %s: %s %s %+v", r.Job, r.State, r.Reason, r.Notes)
		}
		e.Fatalf("timeout: %s\n%s", what, strings.Join(e.all(), "\n"))
	}
	synctest.Wait()
}

// awaitAlloc waits for an alloc of the job that matches, and returns it.
func (e *env) awaitAlloc(job, what string, matches func(*AllocRecord) bool) (found *AllocRecord) {
	e.Helper()
	e.await(job+" "+what, func(all []*AllocRecord) bool {
		found = nil
		for _, r := range all {
			if r.Job == job && matches(r) {
				found = r
			}
		}
		return found != nil
	})
	return found
}

func (e *env) awaitState(job string, state AllocState) *AllocRecord {
	e.Helper()
	return e.awaitAlloc(job, string(state), func(r *AllocRecord) bool { return r.State == state })
}

// awaitReason waits until the job's alloc is pending for the reason.
func (e *env) awaitReason(job, reason string) *AllocRecord {
	e.Helper()
	return e.awaitAlloc(job, reason, func(r *AllocRecord) bool {
		return r.State == AllocPending && strings.Contains(r.Reason, reason)
	})
}

// awaitRunning waits until all tasks of the job's newest alloc run.
func (e *env) awaitRunning(job string) *AllocRecord {
	e.Helper()
	return e.awaitAlloc(job, "running", func(r *AllocRecord) bool {
		for _, t := range r.Tasks {
			if t.State != TaskRunning {
				return false
			}
		}
		return r.State == AllocRunning
	})
}

func (e *env) awaitAttempt(job string, task host.TaskName, attempt uint64) *AllocRecord {
	e.Helper()
	return e.awaitAlloc(job, fmt.Sprintf("attempt %d", attempt), func(r *AllocRecord) bool {
		return r.Tasks[task].Attempt == attempt && r.Tasks[task].State == TaskRunning
	})
}

// awaitCount waits until the journal has n lines with the prefix.
func (e *env) awaitCount(prefix string, n int) {
	e.Helper()
	e.await(fmt.Sprintf("%d times %s", n, prefix), func([]*AllocRecord) bool { return e.count(prefix) == n })
}

func (e *env) awaitAllEnded() {
	e.Helper()
	e.await("all ended", func(all []*AllocRecord) bool { return len(unended(all, lastRank)) == 0 })
}

func (e *env) submit(j *hooks.Job) {
	e.Helper()
	e.must(e.trySubmit(j, SubmitOptions{}))
}

func (e *env) trySubmit(j *hooks.Job, o SubmitOptions) error {
	_, err := e.agent.Submit(e.Context(), j, Source{Name: j.ID + ".hcl"}, e.shim, o)
	return err
}

// runPluginAndUser submits a plugin and a job with a volume, and waits until both run.
func (e *env) runPluginAndUser() (plugins, users *AllocRecord) {
	e.Helper()
	e.submit(pluginJob("disk"))
	e.submit(userJob("user", ""))
	return e.awaitRunning("disk"), e.awaitRunning("user")
}

func (e *env) stopJob(id string, o StopOptions) {
	e.Helper()
	e.must(e.agent.StopJob(e.Context(), id, e.shim, o))
}

func (e *env) stopAll() {
	e.Helper()
	ctx, cancel := context.WithTimeout(e.Context(), time.Hour)
	defer cancel()
	if err := e.agent.StopAll(ctx); err != nil {
		e.Error(err)
	}
}

// exit ends a task of an alloc, as if by itself.
func (e *env) exit(r *AllocRecord, task host.TaskName, code int) {
	attempt := uint64(1)
	if now := e.agent.record(r.ID); now != nil {
		attempt = now.Tasks[task].Attempt
	}
	e.driver.end(attemptID(r.ID, task, attempt), code, "end")
}

// releaseSlowly makes each release take a minute, and checks that the plugin's task runs until then.
func (e *env) releaseSlowly(pluginTask string) {
	e.shim.release = func(host.AllocID) error {
		time.Sleep(time.Minute)
		if e.count("stop "+pluginTask) > 0 {
			e.Error("the plugin was stopped before its volumes were released")
		}
		return nil
	}
}

// has checks that the journal has lines with these prefixes, in this order.
func (e *env) has(prefixes ...string) {
	e.Helper()
	rest := prefixes
	for _, l := range e.all() {
		if len(rest) > 0 && strings.HasPrefix(l, rest[0]) {
			rest = rest[1:]
		}
	}
	if len(rest) > 0 {
		e.Errorf("want in this order:\n  %s\ngot:\n  %s", strings.Join(prefixes, "\n  "), strings.Join(e.all(), "\n  "))
	}
}

// hasCount checks the number of journal lines with a prefix.
func (e *env) hasCount(prefix string, want int) {
	e.Helper()
	if n := e.count(prefix); n != want {
		e.Errorf("%d times %q, want %d: %s", n, prefix, want, strings.Join(e.all(), "; "))
	}
}

func (e *env) hasError(err, kind error, texts ...string) {
	e.Helper()
	if err == nil || kind != nil && !errors.Is(err, kind) {
		e.Fatalf("error %v, want %v", err, kind)
	}
	for _, want := range texts {
		if !strings.Contains(err.Error(), want) {
			e.Errorf("the error does not mention %s: %v", want, err)
		}
	}
}

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

// task returns a task with attributes in JSON.
func task(name string, rest string) hooks.Task {
	return hooks.Task{
		Name: host.TaskName(name), Driver: "exec", Config: json.RawMessage(`{"command":"/bin/true"}`),
		Rest: json.RawMessage(rest),
	}
}

func plugin(id string) hooks.Task {
	t := task("plugin", `{"restart":[{"attempts":1,"interval":"1h","delay":"1s","mode":"fail"}]}`)
	t.Plugin, t.Sealed = host.PluginID(id), hooks.Sealed("plugin")
	return t
}

func pluginJob(id string) *hooks.Job { return job(id, "system", tasks("g", plugin("disk"))) }

func serviceJob(id, rest string) *hooks.Job {
	return job(id, "service", tasks("g", task("main", rest)))
}

func userJob(id, rest string) *hooks.Job {
	return job(id, "service", withVolumes(tasks("g", task("main", rest))))
}

// batchJob has count allocs with one task.
func batchJob(id string, count int, rest string) *hooks.Job {
	g := tasks("g", task("main", rest))
	g.Count = count
	return job(id, "batch", g)
}
