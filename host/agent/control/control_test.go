package control

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// dialEnv has this test binary be a stranger that dials the socket it names.
const dialEnv = "CONTROL_TEST_DIAL"

func TestMain(m *testing.M) {
	taskdriver.Main()
	if socket := os.Getenv(dialEnv); socket != "" {
		stranger(socket)
	}
	os.Exit(m.Run())
}

// stranger says on standard output what the agent answers.
func stranger(socket string) {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		os.Stdout.WriteString("cannot connect: " + err.Error())
		os.Exit(0)
	}
	_, _ = conn.Write([]byte("GET /v1/agent/self HTTP/1.0\r\n\r\n"))
	answer, _ := io.ReadAll(conn)
	os.Stdout.WriteString("answer: " + string(answer))
	os.Exit(0)
}

// shim is a Host in memory: what a test does not need panics.
type shim struct {
	Host
	volumes []host.VolumeStatus
	allocs  []host.AllocStatus
	refuse  error
	events  []host.Event
	lull    time.Duration // before each event, and before it is known that there is none
	early   error         // ends a watch when its events are told
	swapped []host.SwapReport
}

func (s *shim) Restarts(ctx context.Context, _ func([]host.PendingRestart) error) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func (s *shim) Fingerprints(ctx context.Context, _ host.PluginQuery,
	fn func([]host.PluginFingerprint, bool) error) error {
	if err := fn([]host.PluginFingerprint{{Role: "csi-node", Plugin: "loopfs", Healthy: 1, Expected: 2}},
		true); err != nil {
		return err
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

func (s *shim) Plugins(context.Context, host.PluginQuery) (host.PluginList, host.Seq, error) {
	i := host.Instance{InstanceKey: registry.InstanceKey{Role: "csi-node", Plugin: "loopfs", Alloc: "a", Task: "t"}}
	i.Fingerprint = registry.Fingerprint{Provider: "loopfs.example", Version: "2", NodeID: "n1",
		Capabilities: []registry.Capability{registry.StageUnstage}}
	i.Health = registry.Health{State: registry.Unhealthy, Cause: registry.CauseMissed}
	restart := &registry.RestartRequest{Attempt: 2, Cause: registry.CauseMissed}
	return host.PluginList{
		Instances: []host.Instance{i}, Active: map[registry.InstanceKey]bool{i.InstanceKey: true},
		Tasks: []host.PluginTask{{TaskKey: i.TaskKey(), Plugin: "loopfs", Type: "node", Restart: restart},
			{TaskKey: i.TaskKey(), Plugin: "other", Type: "node"}},
	}, 1, nil
}

func (s *shim) Volumes(context.Context, host.VolumeQuery) ([]host.VolumeStatus, host.Seq, error) {
	return s.volumes, 1, s.refuse
}

func (s *shim) Allocs(context.Context, host.AllocID) ([]host.AllocStatus, host.Seq, error) {
	return s.allocs, 1, s.refuse
}

func (s *shim) DeleteVolume(_ context.Context, n host.VolumeName) error { return s.refuse }

func (s *shim) ExpandVolume(_ context.Context, n host.VolumeName, want host.CapacityRange) (host.VolumeStatus, error) {
	v := registry.Volume{VolumeSpec: host.VolumeSpec{Namespace: n.Namespace, ID: n.ID, Plugin: "loopfs"},
		Capacity: want.Required}
	v.Expansion = registry.Expansion{
		Node: want, Since: noon, Refused: "FAILED_PRECONDITION", RPC: registry.NodeExpandRPC,
		Code: "FAILED_PRECONDITION", Detail: "not now",
	}
	return host.VolumeStatus{Volume: v}, s.refuse
}

func (s *shim) Parse(_ context.Context, src host.Source, o host.ParseOptions) (*host.Job, host.Diagnostics, error) {
	if len(src.Text) == 0 {
		return nil, nil, registry.Invalid("%s:1:1: error: it is empty", src.Name)
	}
	t := hooks.Task{Name: "main", Driver: "raw_exec",
		Config: []byte(`{"command":"/bin/echo","args":["` + o.Variables["words"] + `"]}`)}
	return &host.Job{ID: "echo", Namespace: "default", Type: "batch",
		Groups: []hooks.Group{{Name: "g", Count: 1, Tasks: []hooks.Task{t}}}}, nil, nil
}

func (s *shim) Watch(ctx context.Context, o host.WatchOptions, fn func(host.Event) error) error {
	for _, e := range s.events {
		if e.Seq > o.After {
			if err := s.stalls(ctx); err != nil {
				return err
			}
			if err := fn(e); err != nil {
				return err
			}
		}
	}
	if err := s.stalls(ctx); err != nil {
		return err
	}
	if o.Past || s.early != nil {
		return s.early
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

// stalls lets the lull pass.
func (s *shim) stalls(ctx context.Context) error {
	select {
	case <-time.After(s.lull):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// serve has an agent with a real driver and a shim in memory answer on a socket, until the test ends.
func serve(t *testing.T, s Host) (socket string, c *Client) {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	a, err := agent.New(agent.Config{StateDir: filepath.Join(dir, "s"),
		Drivers: []taskdriver.Driver{taskdriver.NewRawExec()}})
	if err != nil {
		t.Fatal(err)
	}
	socket = Socket(dir)
	l, err := Listen(socket, hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran, served := make(chan error, 1), make(chan error, 1)
	go func() { ran <- a.Run(ctx, s) }()
	go func() { served <- NewServer(a, s, Self{RunDir: dir}, hclog.NewNullLogger()).Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ran, <-served, a.Close()); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the socket is left: %v", err)
		}
	})
	return socket, NewClient(socket)
}

func TestStrangersAreTurnedAway(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can run a program as somebody else")
	}
	socket, c := serve(t, &shim{})
	dial := func(uid uint32) string {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = []string{dialEnv + "=" + socket}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Skipf("a program cannot be run as user %d here: %v %s", uid, err, out)
		}
		return string(out)
	}
	if got := dial(65534); !strings.Contains(got, "permission denied") {
		t.Errorf("the files let a stranger in: %s", got)
	}
	// Even where the files are open to everybody, the kernel says who calls.
	if err := errors.Join(os.Chmod(filepath.Dir(socket), 0o755), os.Chmod(socket, 0o666)); err != nil {
		t.Fatal(err)
	}
	if got := dial(65534); got != "answer: " {
		t.Errorf("a stranger is answered: %s", got)
	}
	if got := dial(0); !strings.Contains(got, `"drivers":"raw_exec"`) {
		t.Errorf("root is not answered: %s", got)
	}
	if _, err := c.Self(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestTheSocketIsPrivateAndOnlyOne(t *testing.T) {
	socket, _ := serve(t, &shim{})
	info, err := os.Lstat(socket)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := Listen(socket, hclog.NewNullLogger()); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("a second agent listens: %v", err)
	}
}

// The run directory is swept while the agent runs, once and again: it answers at the same path afterwards.
func TestRemovedControlSocketIsMadeAgain(t *testing.T) {
	for name, sweep := range map[string]func(socket string) error{
		"socket":           os.Remove,
		"directory":        func(socket string) error { return os.RemoveAll(filepath.Dir(socket)) },
		"another dead one": func(socket string) error { return errors.Join(os.Remove(socket), deadSocket(socket)) },
		"renamed directory": func(socket string) error {
			return os.Rename(filepath.Dir(socket),
				filepath.Dir(socket)+".old")
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "h-")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			path := Socket(filepath.Join(dir, "r"))
			l, err := Listen(path, hclog.NewNullLogger())
			if err != nil {
				t.Fatal(err)
			}
			web := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
			served := make(chan error, 1)
			go func() { served <- web.Serve(l) }()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for range 2 {
				before, err := os.Lstat(path)
				if err != nil {
					t.Fatal(err)
				}
				if err := sweep(path); err != nil {
					t.Fatal(err)
				}
				_ = os.RemoveAll(filepath.Dir(path) + ".old")
				tick := time.NewTicker(10 * time.Millisecond)
				for {
					now, err := os.Lstat(path)
					if err == nil && !os.SameFile(now, before) && dials(ctx, path) {
						break
					}
					select {
					case <-tick.C:
					case err := <-served:
						t.Fatalf("the server ends: %v", err)
					case <-ctx.Done():
						t.Fatal("the socket is not made again")
					}
				}
				if now, err := os.Lstat(path); err != nil || now.Mode().Perm() != 0o600 {
					t.Errorf("the new socket: %v, %v", now, err)
				}
			}
			if err := web.Close(); err != nil {
				t.Error(err)
			}
			if err := <-served; !errors.Is(err, http.ErrServerClosed) {
				t.Errorf("the server ends with %v", err)
			}
			if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a closed socket is left: %v", err)
			}
		})
	}
}

// dials says whether a request is answered.
func dials(ctx context.Context, path string) bool {
	_, err := NewClient(path).open(ctx, http.MethodGet, "/", nil)
	return err == nil
}

// deadSocket is a socket file without a listener.
func deadSocket(path string) error {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	return l.Close()
}

func TestADeadAgentsSocketIsReplaced(t *testing.T) {
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := deadSocket(Socket(dir)); err != nil {
		t.Fatal(err)
	}
	if _, err := NewClient(Socket(dir)).Self(t.Context()); !errors.Is(err, ErrNoAgent) {
		t.Errorf("a dead agent answers: %v", err)
	}
	l, err := Listen(Socket(dir), hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}

func TestAJobRunsAndItsLogsAreRead(t *testing.T) {
	_, c := serve(t, &shim{})
	job, err := c.RunJob(t.Context(),
		Submission{Name: "echo.hcl", Text: []byte("x"), Variables: map[string]string{"words": "hello"}}, false)
	if err != nil || job.ID != "echo" || job.Version != 1 {
		t.Fatalf("%+v, %v", job, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for job.Status != "complete" {
		if job, err = c.Job(ctx, "echo"); err != nil {
			t.Fatal(err)
		}
		<-tick.C
	}
	var out strings.Builder
	if err := c.Logs(ctx, job.Allocs[0].ID[:8], "main", "stdout", true, &out); err != nil || out.String() != "hello\n" {
		t.Errorf("logs %q, %v", out.String(), err)
	}
	a, err := c.Alloc(ctx, job.Allocs[0].ID[:8])
	if err != nil || a.State != "complete" || a.Tasks[0].ExitCode == nil || *a.Tasks[0].ExitCode != 0 ||
		len(a.Notes) == 0 {
		t.Errorf("%+v, %v", a, err)
	}
	if err := c.Logs(ctx, a.ID, "nobody", "stdout", false, &out); !errors.Is(err, registry.ErrNotFound) {
		t.Errorf("logs of no task: %v", err)
	}
	if err := c.StopJob(ctx, "echo", true, false); err != nil {
		t.Error(err)
	}
	if _, err := c.Job(ctx, "echo"); !errors.Is(err, registry.ErrNotFound) {
		t.Errorf("a purged job: %v", err)
	}
}

func TestKindsOfErrorsSurvive(t *testing.T) {
	s := &shim{}
	_, c := serve(t, s)
	if _, err := c.RunJob(t.Context(), Submission{Name: "none.hcl"}, false); !errors.Is(err,
		registry.ErrInvalid) || !strings.Contains(err.Error(), "none.hcl:1:1") {
		t.Errorf("%v", err)
	}
	for _, kind := range registry.Kinds {
		s.refuse = registry.Errorf(kind, "alloc 7 holds it")
		err := c.DeleteVolume(t.Context(), host.VolumeName{ID: "v"})
		if !errors.Is(err, kind) || err.Error() != "alloc 7 holds it" {
			t.Errorf("%v: %v", kind, err)
		}
	}
	for path, want := range map[string]error{"/job/nope": registry.ErrNotFound,
		"/volume/x?namespace=y": registry.ErrInternal, "/events?after=x": registry.ErrInvalid} {
		if _, err := get[any](t.Context(), c, path); !errors.Is(err, want) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func (s *shim) VolumeStats(ctx context.Context, n host.VolumeName) ([]host.VolumeUsage, host.Seq, error) {
	if n.ID == "slow" {
		<-ctx.Done()
		return nil, 0, context.Cause(ctx)
	}
	if s.refuse != nil || n != (host.VolumeName{Namespace: "ns", ID: ".."}) {
		return nil, 0, cmp.Or(s.refuse, error(registry.Invalid("asked for %v", n)))
	}
	return []host.VolumeUsage{{Unit: "bytes", Total: 9, Used: 4, Available: 5}, {Unit: "inodes", Total: 3}}, 1, nil
}

func TestStatsOfAVolume(t *testing.T) {
	s := &shim{}
	_, c := serve(t, s)
	name := host.VolumeName{Namespace: "ns", ID: ".."} // an id may be all dots
	usage, err := c.VolumeStats(t.Context(), name)
	if err != nil || !slices.Equal(usage, []Usage{{"bytes", 9, 4, 5}, {"inodes", 3, 0, 0}}) {
		t.Errorf("%+v, %v", usage, err)
	}
	s.refuse = registry.Errorf(registry.ErrUnsupported, "the plugin cannot say")
	if _, err := c.VolumeStats(t.Context(), name); !errors.Is(err,
		registry.ErrUnsupported) || err.Error() != "the plugin cannot say" {
		t.Errorf("%v", err)
	}
	c.Wait = 50 * time.Millisecond
	_, err = c.VolumeStats(t.Context(), host.VolumeName{ID: "slow"})
	if !errors.Is(err,
		registry.ErrUnavailable) || err.Error() != "waited 50ms: no answer from the plugin (see holdfast plugin status)" {
		t.Errorf("%v", err)
	}
}

func (s *shim) Doctor(_ context.Context, repair bool, digest string) (host.Diagnosis, error) {
	if s.refuse != nil {
		return host.Diagnosis{}, s.refuse
	}
	d := host.Diagnosis{Digest: "d1", Repaired: repair, Findings: []host.Finding{
		{Kind: registry.FoundOrphan, Action: registry.ActUnmount, Path: "/mnt/x", Detail: "asked with " + digest},
	}}
	return d, nil
}

func TestDoctorLooksAndRepairs(t *testing.T) {
	s := &shim{}
	_, c := serve(t, s)
	for _, ask := range []Consultation{{}, {Repair: true, Digest: "d1"}} {
		d, err := c.Doctor(t.Context(), ask)
		if want, _ := s.Doctor(t.Context(), ask.Repair, ask.Digest); err != nil || !reflect.DeepEqual(d, want) {
			t.Errorf("%+v: %+v, %v", ask, d, err)
		}
	}
	s.refuse = registry.Errorf(registry.ErrConflict, "the plan is another one by now")
	if _, err := c.Doctor(t.Context(), Consultation{Repair: true, Digest: "d0"}); !errors.Is(err,
		registry.ErrConflict) {
		t.Errorf("%v", err)
	}
	if err := c.do(t.Context(), "POST", "/doctor", "no object", &struct{}{}); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("a body that is no object: %v", err)
	}
}

func TestPluginsArePutTogether(t *testing.T) {
	_, c := serve(t, &shim{})
	list, err := c.Plugins(t.Context())
	if err != nil || len(list) != 2 {
		t.Fatalf("%+v, %v", list, err)
	}
	p := list[0]
	if p.ID != "loopfs" || p.Provider != "loopfs.example" || p.Version != "2" || len(p.Roles) != 1 ||
		p.Roles[0] != (Role{"csi-node", 1, 2, ""}) {
		t.Errorf("%+v", p)
	}
	if i := p.Instances[0]; !i.Active || i.Health != "unhealthy" || i.Cause != "missed" || i.NodeID != "n1" ||
		len(i.Capabilities) != 1 {
		t.Errorf("%+v", i)
	}
	if r := p.Tasks[0].Restart; r == nil || r.Attempt != 2 {
		t.Errorf("the pending restart is not told: %+v", p.Tasks)
	}
}

func TestEventsEndOrFollow(t *testing.T) {
	s := &shim{}
	for i := range 5 {
		s.events = append(s.events, host.Event{Seq: host.Seq(i + 1), Kind: registry.EventHealthy})
	}
	_, c := serve(t, s)
	var seen []host.Seq
	err := c.Events(t.Context(), 2, false, func(e host.Event) error {
		seen = append(seen, e.Seq)
		return nil
	})
	if err != nil || len(seen) != 3 || seen[0] != 3 || seen[2] != 5 {
		t.Errorf("%v, %v", seen, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	err = c.Events(ctx, 0, true, func(host.Event) error {
		if n++; n == 5 {
			cancel()
		}
		return nil
	})
	if n != 5 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d events, %v", n, err)
	}
}

// However long no event comes, those that have happened are told: a stalled machine cuts nothing.
func TestEventsAreToldHoweverSlowly(t *testing.T) {
	s := &shim{lull: 400 * time.Millisecond}
	_, c := serve(t, s)
	told := 0
	count := func(host.Event) error { told++; return nil }
	if err := c.Events(t.Context(), 0, false, count); err != nil || told != 0 {
		t.Errorf("where there is none: %d, %v", told, err)
	}
	for i := range 3 {
		s.events = append(s.events, host.Event{Seq: host.Seq(i + 1), Kind: registry.EventHealthy})
	}
	if err := c.Events(t.Context(), 0, false, count); err != nil || told != 3 {
		t.Errorf("%d events of 3, %v", told, err)
	}
}

// Who is not told all events is told so, and why; what was told before that stays.
func TestEventsThatEndEarlySayWhy(t *testing.T) {
	s := &shim{early: registry.Errorf(registry.ErrUnavailable, "no shim is active"),
		events: []host.Event{{Seq: 1, Kind: registry.EventHealthy}}}
	_, c := serve(t, s)
	for _, follow := range []bool{false, true} {
		told := 0
		err := c.Events(t.Context(), 0, follow, func(host.Event) error { told++; return nil })
		if told != 1 || !errors.Is(err,
			registry.ErrUnavailable) || err.Error() != "event stream ended early: no shim is active" {
			t.Errorf("follows %v: %d events, %v", follow, told, err)
		}
	}
	s.early, s.lull = nil, time.Second
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := c.Events(ctx, 0, false, func(host.Event) error { return nil }); !errors.Is(err,
		context.DeadlineExceeded) {
		t.Errorf("beyond the caller's time: %v", err)
	}
}

// A creation that gave no volume says what its plugin said, that nothing goes on, and how to end it.
func TestUncertainVolumeSaysWhyAndWhatToDo(t *testing.T) {
	spec := registry.VolumeSpec{Namespace: "ns", ID: "v", Plugin: "p"}
	v := host.VolumeStatus{Volume: registry.Volume{VolumeSpec: spec, State: registry.VolumeUncertain}}
	for want, f := range map[string]registry.Failure{
		"CreateVolume: its capacity is -1": {RPC: registry.CreateVolumeRPC, Code: "OK", Detail: "its capacity is -1"},
		"CreateVolume: INTERNAL: no":       {RPC: registry.CreateVolumeRPC, Code: "INTERNAL", Detail: "no"},
	} {
		v.Failure = f
		got := unusable(v)
		if got == nil || got.Found != want || !commands(got.Help, "holdfast volume deregister --namespace=ns v") ||
			!commands(got.Help, "holdfast volume delete --namespace=ns v") {
			t.Errorf("%+v, want %q", got, want)
		}
	}
	v.Intent = &registry.Intent{RPC: registry.CreateVolumeRPC}
	if got := unusable(v); got != nil {
		t.Errorf("of a creation that goes on: %+v", got)
	}
	v.State, v.Intent = registry.VolumeReady, nil
	if got := unusable(v); got != nil {
		t.Errorf("of a volume that is ready: %+v", got)
	}
}

func TestExpandAVolume(t *testing.T) {
	s := &shim{}
	_, c := serve(t, s)
	v, err := c.ExpandVolume(t.Context(), host.VolumeName{Namespace: "ns", ID: "v"},
		host.CapacityRange{Required: 9, Limit: 10})
	if err != nil || v.Capacity != 9 || v.VolumeName() != (host.VolumeName{Namespace: "ns",
		ID: "v"}) || v.Expansion.Node.Limit != 10 {
		t.Errorf("%+v, %v", v, err)
	}
	if g := v.Growth; g == nil || g.Found != "NodeExpandVolume: FAILED_PRECONDITION: not now" || !commands(g.Help,
		"holdfast volume status --namespace=ns v") {
		t.Errorf("what it waits for: %+v", g)
	}
	s.refuse = registry.Errorf(registry.ErrConflict, "it is used")
	if _, err := c.ExpandVolume(t.Context(), host.VolumeName{ID: "v"}, host.CapacityRange{}); !errors.Is(err,
		registry.ErrConflict) || err.Error() != "it is used" {
		t.Errorf("%v", err)
	}
}

// What an expansion waits for is told as long as it waits, and what may be done is what its plugin's answer leaves.
func TestGrowth(t *testing.T) {
	name := registry.VolumeName{Namespace: "default", ID: "v"}
	half := registry.Expansion{Node: registry.CapacityRange{Required: 9}}
	asked := registry.Expansion{Asked: registry.CapacityRange{Required: 9}}
	again := "holdfast volume expand --size 9 v"
	refused, vague := half, asked
	refused.Refused, refused.RPC, refused.Code = "INTERNAL", registry.NodeExpandRPC, "INTERNAL"
	vague.RPC, vague.Code = registry.ControllerExpandRPC, "INTERNAL"
	untold := half // its text is not known any more
	untold.Refused = "FAILED_PRECONDITION"
	if g := growth(name, untold); g == nil || g.Found != "NodeExpandVolume: FAILED_PRECONDITION" {
		t.Errorf("%+v", g)
	}
	for what, c := range map[string]struct {
		e     registry.Expansion
		says  string // empty: nothing
		again bool
	}{
		"none": {registry.Expansion{Done: 9}, "", false}, "under way": {asked, "", false},
		"pending":                              {half, "not on this node yet", false},
		"refused":                              {refused, "not on this node yet", true},
		"refused for as long as it is mounted": {untold, "not on this node yet", false},
		"vague":                                {vague, "may or may not have been", true},
	} {
		g := growth(name, c.e)
		if (g == nil) != (c.says == "") || g != nil && (!strings.Contains(g.Help.What, c.says) || commands(g.Help,
			again) != c.again) {
			t.Errorf("%s: %+v", what, g)
		}
	}
}
