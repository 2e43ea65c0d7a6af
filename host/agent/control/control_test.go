package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

func TestMain(m *testing.M) {
	taskdriver.Main()
	if socket := os.Getenv(dialEnv); socket != "" {
		dialAndExit(socket)
	}
	os.Exit(m.Run())
}

// fakeHost is a Host in memory. Calls without a method here panic.
type fakeHost struct {
	Host
	task    hooks.Task // task of each job; a job has the name of its file
	sealed  hooks.Sealed
	volumes func() []host.VolumeStatus
	allocs  func() []host.AllocStatus
	refuse  error // of calls about volumes, and of prepare
	events  []host.Event
	delay   time.Duration // before each event, and before the end of the past ones
	early   error         // ends a watch after its events
	swapped []host.SwapReport

	mu       sync.Mutex
	prepared host.AllocID
	nodes    []host.NodeStatus
}

func (h *fakeHost) Parse(_ context.Context, src host.Source, o host.ParseOptions) (
	*host.Job, host.Diagnostics, error) {
	if len(src.Text) == 0 {
		return nil, nil, registry.Invalid("%s:1:1: error: it is empty", src.Name)
	}
	t := h.task
	t.Name, t.Driver = "main", "raw_exec"
	t.Config = []byte(`{"command":"/bin/echo","args":["` + o.Variables["words"] + `"]}`)
	g := hooks.Group{Name: "g", Count: 1, Sealed: h.sealed, Tasks: []hooks.Task{t}}
	return &host.Job{ID: src.Name, Namespace: "default", Type: "batch", Groups: []hooks.Group{g}}, nil, nil
}

func (h *fakeHost) TaskStarting(context.Context, host.AllocTask) (host.Plan, error) {
	return host.Plan{}, registry.Invalid("its stanza is wrong")
}

func (h *fakeHost) TaskExited(context.Context, host.TaskKey, uint64, int, int, bool) error {
	return nil
}

// Nodes returns no drained node. Tests can set others.
func (h *fakeHost) Nodes(ctx context.Context, q host.NodeQuery) ([]host.NodeStatus, host.Seq, error) {
	if q.MinIndex > 0 {
		<-ctx.Done()
		return nil, 0, context.Cause(ctx)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nodes, 1, nil
}

func (h *fakeHost) Plugins(ctx context.Context, q host.PluginQuery) (host.PluginList, host.Seq, error) {
	if q.MinIndex > 0 {
		<-ctx.Done()
		return host.PluginList{}, 0, context.Cause(ctx)
	}
	i := host.Instance{InstanceKey: registry.InstanceKey{Role: "csi-node", Plugin: "loopfs", Alloc: "a", Task: "t"}}
	i.Fingerprint = registry.Fingerprint{Provider: "loopfs.example", Version: "2"}
	i.Health = registry.Health{State: registry.Unhealthy, Cause: registry.CauseMissed}
	restart := &registry.RestartRequest{Attempt: 2, Cause: registry.CauseMissed}
	return host.PluginList{
		Instances: []host.Instance{i}, Active: map[registry.InstanceKey]bool{i.InstanceKey: true},
		Tasks: []host.PluginTask{{TaskKey: i.TaskKey(), Plugin: "loopfs", Type: "node", Restart: restart},
			{TaskKey: i.TaskKey(), Plugin: "other", Type: "node"}},
	}, 1, nil
}

func (h *fakeHost) PrepareAlloc(_ context.Context, g host.AllocGroup) (map[string]host.Plan, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.prepared = g.Alloc
	return nil, h.refuse
}

func (h *fakeHost) ReleaseAlloc(context.Context, host.AllocID) error { return nil }
func (h *fakeHost) ReplaceAlloc(context.Context, host.AllocID) error { return nil }

// countKey is the context key of an int that counts calls of Volumes.
type countKey struct{}

func (h *fakeHost) ShimState() host.ShimState { return host.ShimState{Serving: true} }
func (h *fakeHost) Status(context.Context) (host.ShimStatus, error) {
	return host.ShimStatus{}, nil
}

func (h *fakeHost) Volumes(
	ctx context.Context, _ host.VolumeQuery,
) (list []host.VolumeStatus, _ host.Seq, err error) {
	if n, counts := ctx.Value(countKey{}).(*int); counts {
		*n++
	}
	if h.volumes == nil {
		return nil, 1, h.refuse
	}
	return h.volumes(), 1, nil
}

func (h *fakeHost) Allocs(context.Context, host.AllocQuery) ([]host.AllocStatus, host.Seq, error) {
	if h.allocs == nil {
		return nil, 1, nil
	}
	return h.allocs(), 1, nil
}

func (h *fakeHost) DeleteVolume(context.Context, host.VolumeName) error { return h.refuse }

func (h *fakeHost) ExpandVolume(_ context.Context, n host.VolumeName, want host.CapacityRange) (
	host.VolumeStatus, error) {
	v := registry.Volume{VolumeSpec: host.VolumeSpec{Namespace: n.Namespace, ID: n.ID}, Capacity: want.Required}
	v.Expansion.Node = want
	return host.VolumeStatus{Volume: v}, h.refuse
}

func (h *fakeHost) VolumeStats(ctx context.Context, n host.VolumeName) ([]host.VolumeUsage, host.Seq, error) {
	if n.ID == "slow" {
		<-ctx.Done()
		return nil, 0, context.Cause(ctx)
	}
	return []host.VolumeUsage{{Unit: string(n.Namespace + "/" + registry.Namespace(n.ID)), Total: 9}}, 1, h.refuse
}

func (h *fakeHost) Doctor(_ context.Context, repair bool, digest string) (host.Diagnosis, error) {
	return host.Diagnosis{Digest: "answer to " + digest, Repaired: repair}, h.refuse
}

func (h *fakeHost) SwapAs(_ context.Context, b host.Binary, operator string) (host.SwapReport, error) {
	h.swapped = append(h.swapped, host.SwapReport{By: operator, Path: b.Path, To: b.SHA256})
	return h.swapped[len(h.swapped)-1], h.refuse
}

func (h *fakeHost) Swaps() []host.SwapReport { return h.swapped }

func (h *fakeHost) Watch(ctx context.Context, o host.WatchOptions, fn func(host.Event) error) error {
	if o.Snapshot { // the agent watches for lost volumes, and there are none
		<-ctx.Done()
		return context.Cause(ctx)
	}
	for _, e := range h.events {
		time.Sleep(h.delay)
		if e.Seq <= o.After {
			continue
		}
		if err := fn(e); err != nil {
			return err
		}
	}
	time.Sleep(h.delay)
	if o.Past || h.early != nil {
		return h.early
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// shortDir returns a directory whose path leaves room for the name of a socket.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// serve runs an agent with a real driver and its API until the test ends.
func serve(t *testing.T, h Host) (socket string, c *Client) {
	t.Helper()
	_, socket = serveAgent(t, h)
	return socket, NewClient(socket)
}

func serveAgent(t *testing.T, h Host) (s *Server, socket string) {
	t.Helper()
	dir := shortDir(t)
	a, err := agent.New(agent.Config{StateDir: filepath.Join(dir, "s"),
		Drivers: []taskdriver.Driver{taskdriver.NewRawExec()}})
	must(t, err)
	socket = Socket(dir)
	l, err := Listen(socket, hclog.NewNullLogger())
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ran, served := make(chan error, 1), make(chan error, 1)
	go func() { ran <- a.Run(ctx, h) }()
	s = NewServer(a, h, Self{RunDir: dir}, hclog.NewNullLogger())
	go func() { served <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ran, <-served, a.Close()); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the socket is left: %v", err)
		}
	})
	return s, socket
}

// awaitJob waits until the job matches.
func awaitJob(t *testing.T, c *Client, id string, matches func(Job) bool) Job {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		job, err := c.Job(ctx, id)
		must(t, err)
		if matches(job) {
			return job
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestJobRunsAndItsLogsAreRead(t *testing.T) {
	_, c := serve(t, &fakeHost{})
	job, err := c.RunJob(t.Context(),
		Submission{Name: "echo", Text: []byte("x"), Variables: map[string]string{"words": "hello"}},
		agent.SubmitOptions{})
	if err != nil || job.ID != "echo" || job.Version != 1 {
		t.Fatalf("%+v, %v", job, err)
	}
	job = awaitJob(t, c, "echo", func(j Job) bool { return j.Status == "complete" })
	var out strings.Builder
	id := job.Allocs[0].ID[:8]
	if err := c.Logs(t.Context(), id, "main", agent.LogOptions{Follow: true}, &out); err != nil ||
		out.String() != "hello\n" {
		t.Errorf("logs %q, %v", out.String(), err)
	}
	if a, err := c.Alloc(t.Context(), id); err != nil || a.Tasks[0].ExitCode == nil || len(a.Notes) == 0 {
		t.Errorf("%+v, %v", a, err)
	}
	// Errors about logs reach the client.
	if err := c.Logs(t.Context(), id, "other", agent.LogOptions{}, &out); !errors.Is(err, registry.ErrNotFound) {
		t.Errorf("logs of an unknown task: %v", err)
	}
	// A stopped job starts again with the variables of its submission.
	must(t, c.StopJob(t.Context(), "echo", agent.StopOptions{}))
	if job, err := c.StartJob(t.Context(), "echo"); err != nil || job.Version != 2 {
		t.Errorf("a job that was started again: %+v, %v", job, err)
	}
	job = awaitJob(t, c, "echo", func(j Job) bool { return j.Status == "complete" && len(j.Allocs) == 2 })
	out.Reset()
	must(t, c.Logs(t.Context(), job.Allocs[1].ID, "main", agent.LogOptions{Follow: true}, &out))
	if src, err := c.JobSource(t.Context(), "echo"); err != nil || out.String() != "hello\n" || src.File != "echo" {
		t.Errorf("logs %q of %+v, %v", out.String(), src, err)
	}
	must(t, c.StopJob(t.Context(), "echo", agent.StopOptions{Purge: true}))
	for _, get := range []func(context.Context, string) (Job, error){c.Job, c.StartJob} {
		if _, err := get(t.Context(), "echo"); !errors.Is(err, registry.ErrNotFound) {
			t.Errorf("a purged job: %v", err)
		}
	}
}

func TestErrorsKeepTheirKind(t *testing.T) {
	h := &fakeHost{}
	_, c := serve(t, h)
	_, err := c.RunJob(t.Context(), Submission{Name: "none.hcl"}, agent.SubmitOptions{})
	if !errors.Is(err, registry.ErrInvalid) || !strings.Contains(err.Error(), "none.hcl:1:1") {
		t.Errorf("%v", err)
	}
	for _, kind := range registry.Kinds {
		h.refuse = registry.Errorf(kind, "alloc 7 holds it")
		err := c.DeleteVolume(t.Context(), host.VolumeName{ID: "v"})
		if !errors.Is(err, kind) || err.Error() != "alloc 7 holds it" {
			t.Errorf("%v: %v", kind, err)
		}
		if _, err := c.ExplainClaims(t.Context(), disk); !errors.Is(err, kind) {
			t.Errorf("claims of a volume that the shim cannot look up, %v: %v", kind, err)
		}
	}
	for path, want := range map[string]error{"/job/none": registry.ErrNotFound,
		"/volume/x?namespace=y": registry.ErrInternal, "/events?after=1x": registry.ErrInvalid} {
		if _, err := get[any](t.Context(), c, path); !errors.Is(err, want) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestRequestsReachTheHost(t *testing.T) {
	h := &fakeHost{}
	_, c := serve(t, h)
	name := host.VolumeName{Namespace: "ns", ID: ".."} // an ID may consist of dots
	usage, err := c.VolumeStats(t.Context(), name)
	if err != nil || !slices.Equal(usage, []host.VolumeUsage{{Unit: "ns/..", Total: 9}}) {
		t.Errorf("stats: %+v, %v", usage, err)
	}
	c.Wait = 50 * time.Millisecond
	_, err = c.VolumeStats(t.Context(), host.VolumeName{ID: "slow"})
	const late = "waited 50ms: no answer from the plugin (see holdfast plugin status)"
	if !errors.Is(err, registry.ErrUnavailable) || err.Error() != late {
		t.Errorf("stats within a time: %v", err)
	}
	c.Wait = 0
	d, err := c.Doctor(t.Context(), DoctorRequest{Repair: true, Digest: "d1"})
	if err != nil || d.Digest != "answer to d1" || !d.Repaired {
		t.Errorf("doctor: %+v, %v", d, err)
	}
	report, err := c.Swap(t.Context(), SwapRequest{Path: "/next", SHA256: "ab"})
	swaps, swapsErr := c.Swaps(t.Context())
	if errors.Join(err, swapsErr) != nil || !strings.HasPrefix(report.By, "user ") ||
		report.Path+report.To != "/nextab" ||
		!reflect.DeepEqual(swaps, []host.SwapReport{report}) {
		t.Errorf("swap: %+v, %+v, %v %v", report, swaps, err, swapsErr)
	}
	list, err := c.Plugins(t.Context())
	if err != nil || len(list) != 2 || list[0].ID+list[0].Provider+list[0].Version != "loopfsloopfs.example2" ||
		!slices.Equal(list[0].Roles, []Role{{"csi-node", 0, 1, ""}}) || !list[0].Instances[0].Active ||
		list[0].Tasks[0].Restart.Attempt != 2 {
		t.Errorf("plugins: %+v, %v", list, err)
	}
	v, err := c.ExpandVolume(t.Context(), name, host.CapacityRange{Required: 9, Limit: 10})
	if err != nil || v.VolumeName() != name || v.Capacity != 9 || v.Expansion.Node.Limit != 10 ||
		len(v.Notices) != 1 || v.Notices[0].Kind != NoticePending {
		t.Errorf("expansion: %+v, %v", v, err)
	}
}

// A query for past events returns all of them, even if they come slowly, or an error.
func TestPastEventsAreCompleteOrAnError(t *testing.T) {
	h := &fakeHost{delay: 200 * time.Millisecond}
	_, c := serve(t, h)
	events := func(ctx context.Context, after uint64, follow bool) (seen []host.Seq, err error) {
		err = c.Events(ctx, after, follow, func(e host.Event) error {
			seen = append(seen, e.Seq)
			return nil
		})
		return seen, err
	}
	if seen, err := events(t.Context(), 0, false); err != nil || len(seen) != 0 {
		t.Errorf("without events: %v, %v", seen, err)
	}
	for i := range 3 {
		h.events = append(h.events, host.Event{Seq: host.Seq(i + 1), Kind: registry.EventHealthy})
	}
	if seen, err := events(t.Context(), 1, false); err != nil || !slices.Equal(seen, []host.Seq{2, 3}) {
		t.Errorf("%v, %v", seen, err)
	}
	h.early = registry.Errorf(registry.ErrUnavailable, "no shim is active")
	for _, follow := range []bool{false, true} {
		seen, err := events(t.Context(), 0, follow)
		if len(seen) != 3 || !errors.Is(err, registry.ErrUnavailable) ||
			err.Error() != "event stream ended early: no shim is active" {
			t.Errorf("follow %v: %v, %v", follow, seen, err)
		}
	}
	h.early = nil
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	err := c.Events(ctx, 0, true, func(host.Event) error {
		if n++; n == 3 {
			cancel()
		}
		return nil
	})
	if n != 3 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d events, %v", n, err)
	}
}

func TestFailedControllerKeepsItsRow(t *testing.T) {
	node := host.PluginList{Tasks: []host.PluginTask{{Plugin: "p", Type: "node"}, {Plugin: "p", Type: "node"}}}
	node.Instances = []host.Instance{{InstanceKey: registry.InstanceKey{Role: "csi-node", Plugin: "p"}}}
	node.Instances[0].Health.State = registry.Healthy
	failed := PluginJob{Job: "j", Count: 1, Type: hooks.TypeController, Status: "failed",
		Alloc: "0123456789", State: agent.AllocFailed, Reason: "exit code 3"}
	running := PluginJob{Job: "j", Count: 1, Type: hooks.TypeNode, State: agent.AllocRunning}
	join := func(list host.PluginList, jobs ...PluginJob) []Plugin {
		return joinPlugins(list, map[host.PluginID][]PluginJob{"p": jobs})
	}
	got, want := join(node, failed, running), []Role{{"csi-controller", 0, 1, "exit code 3"}, {"csi-node", 1, 2, ""}}
	if len(got) != 1 || !slices.Equal(got[0].Roles, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	text := "plugin p is not healthy as csi-controller: its job j has status failed: exit code 3 " +
		"(see holdfast alloc status 01234567)"
	if failures := got[0].failures(); failures != text {
		t.Errorf("%q, want %q", failures, text)
	}
	if got := join(host.PluginList{}, failed, running); len(got) != 1 || len(got[0].Roles) != 2 {
		t.Errorf("without tasks: %+v", got)
	}
	failed.Count = 0
	if got := join(host.PluginList{}, failed); len(got) != 0 {
		t.Errorf("of a stopped job: %+v", got)
	}
}

func TestFailureOfAMissingRolesJobIsReported(t *testing.T) {
	disk := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "disk", Plugin: "loopfs"}}
	_, c := serve(t, &fakeHost{
		task:    hooks.Task{Plugin: "loopfs", PluginType: hooks.TypeController, Sealed: hooks.Sealed("s")},
		volumes: func() []host.VolumeStatus { return []host.VolumeStatus{{Volume: disk}} },
		refuse:  registry.Errorf(registry.ErrUnavailable, "plugin loopfs serves only csi-node here"),
	})
	_, err := c.RunJob(t.Context(), Submission{Name: "pc", Text: []byte("x")}, agent.SubmitOptions{})
	must(t, err)
	awaitJob(t, c, "pc", func(j Job) bool { return j.Status == agent.AllocFailed })
	_, err = c.ExpandVolume(t.Context(), disk.VolumeName(), host.CapacityRange{Required: 1})
	for _, text := range []string{"serves only csi-node here",
		"plugin loopfs is not healthy as csi-controller: its job pc has status failed", "its stanza is wrong"} {
		if !errors.Is(err, registry.ErrUnavailable) || !strings.Contains(err.Error(), text) {
			t.Errorf("%v does not mention %q", err, text)
		}
	}
}

func TestMetricsAreServedOnTheSocket(t *testing.T) {
	s := &Server{host: &fakeHost{}, Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "holdfast_shim_serving 1")
	})}
	w := httptest.NewRecorder()
	s.handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/v1/metrics", nil))
	if w.Body.String() != "holdfast_shim_serving 1" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
