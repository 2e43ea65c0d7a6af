package taskdriver

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/moby/client"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/enginetest"
	"holdfast/registry"
)

// eachEngine runs a test with a driver for each engine, which has image box.
func eachEngine(t *testing.T, test func(t *testing.T, e *enginetest.Engine, d Container)) {
	enginetest.Each(t, func(t *testing.T, e *enginetest.Engine) {
		e.Import("box", nil)
		d, err := NewContainer(e.Name, e.Host)
		must(t, err)
		test(t, e, d)
	})
}

// boxed returns a task that runs a script in image box.
func boxed(t *testing.T, d Container, script string, config ...string) Task {
	t.Helper()
	task := shell(t, script)
	task.Command, task.Args = "", nil
	task.ID = fmt.Sprintf("%s-%d", d.name, time.Now().UnixNano())
	text := fmt.Sprintf(`{"image":"box:latest","network_mode":"none","command":"sh","args":["-euc",%q]%s}`, script,
		strings.Join(append([]string{""}, config...), ","))
	warnings, err := d.Configure(&task, json.RawMessage(text))
	if err != nil || len(warnings) > 0 {
		t.Fatal(warnings, err)
	}
	return task
}

func TestContainerRunsItsTask(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *enginetest.Engine, d Container) {
		t.Run("exit status", func(t *testing.T) {
			for script, want := range map[string]Exit{"exit 0": {}, "exit 7": {Code: 7},
				"exit 137": {Code: 137, Signal: 9}} {
				h := startContainer(t, d, boxed(t, d, script))
				first := wait(t, d, h)
				if again := wait(t, d, h); again != first || first.Code != want.Code || first.Signal != want.Signal ||
					first.Err != "" {
					t.Errorf("%s: %+v, then %+v; want %+v", script, first, again, want)
				}
				wantAlive(t, d, h, false)
			}
		})
		t.Run("plan", func(t *testing.T) { checkContainerPlan(t, d) })
		t.Run("device of the plan", func(t *testing.T) { checkContainerDevice(t, d) })
		t.Run("logs", func(t *testing.T) { checkContainerLogs(t, d) })
		t.Run("load and limits", func(t *testing.T) { checkContainerLoad(t, e, d) })
		t.Run("restarted by an operator", func(t *testing.T) {
			h := startContainer(t, d, boxed(t, d, "sleep 1000"))
			e.CLI("restart", "-t", "0", h.Container)
			wantAlive(t, d, h, true) // it uses its volumes
			if exit := wait(t, d, h); !strings.Contains(exit.Err, "another program restarted the container") {
				t.Errorf("%+v", exit)
			}
			wantAlive(t, d, h, false)
		})
		t.Run("stop", func(t *testing.T) {
			h := startContainer(t, d, boxed(t, d,
				`trap 'echo stopped; exit 3' TERM; echo ready; while :; do sleep 0.1; done`))
			wantAlive(t, d, h, true)
			awaitOutput(t, d, h, "ready")
			must(t, d.Stop(t.Context(), h, 10*time.Second))
			if exit := wait(t, d, h); exit.Code != 3 {
				t.Errorf("%+v", exit)
			}
			must(t, d.Stop(t.Context(), h, 0)) // once more
		})
		if left := e.CLI("ps", "-aq"); left != "" {
			t.Errorf("containers are left: %s", left)
		}
	})
}

func startContainer(t *testing.T, d Container, task Task) Handle {
	t.Helper()
	h, err := d.Start(t.Context(), task)
	must(t, err)
	t.Cleanup(func() { must(t, d.remove(context.Background(), h)) })
	return h
}

func output(t *testing.T, d Container, h Handle, s Stream) string {
	t.Helper()
	var out bytes.Buffer
	must(t, d.Logs(t.Context(), h, s, false, &out))
	return out.String()
}

func awaitOutput(t *testing.T, d Container, h Handle, text string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !strings.Contains(output(t, d, h, Stdout), text); {
		if time.Now().After(deadline) {
			t.Fatalf("no %q in the output", text)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// checkContainerPlan checks each operation of a plan: a mount that the task makes appears on the host, and a mount that
// the host makes appears in the task.
func checkContainerPlan(t *testing.T, d Container) {
	both, down, file := sharedDir(t), sharedDir(t), filepath.Join(tempDir(t), "file")
	must(t, os.WriteFile(file, []byte("of the host"), 0o600))
	task := boxed(t, d, `cat /a/file; echo; ls -d /made/by/plan; echo $OWN $GIVEN; echo x > /a/file && exit 9
		cat /local/sub/f /secrets/f /etc/f/f
		mkdir /both/m; mount -t tmpfs none /both/m; echo x > /both/m/x; echo ready; sleep 1000`,
		`"cap_add":["SYS_ADMIN"],"security_opt":["seccomp=unconfined","apparmor=unconfined"]`,
		`"volumes":["./conf/f:/etc/f/f"]`)
	task.Files = []File{{"local/sub/f", 0o644, []byte("1\n")}, {"secrets/f", 0o600, []byte("2\n")},
		{"conf/f", 0o644, []byte("3\n")}}
	task.Env = []string{"OWN=mine"}
	task.Plan = hooks.Plan{
		Dirs: []hooks.Dir{{Path: "/made/by/plan", Mode: 0o755}},
		Binds: []hooks.Bind{
			{Source: file, Target: "/a/file", ReadOnly: true, Propagation: hooks.Private},
			{Source: both, Target: "/both", Propagation: hooks.Bidirectional},
			{Source: down, Target: "/down", Propagation: hooks.HostToTask},
		},
		Env: []hooks.Env{{Name: "GIVEN", Value: "a b"}, {Name: "OWN", Value: "no", Default: true}},
	}
	task.Args = nil
	h := startContainer(t, d, task)
	awaitOutput(t, d, h, "ready")
	if got := output(t, d, h, Stdout); got != "of the host\n/made/by/plan\nmine a b\n1\n2\n3\nready\n" {
		t.Errorf("output %q; errors %q", got, output(t, d, h, Stderr))
	}
	if text, err := os.ReadFile(filepath.Join(both, "m/x")); err != nil || string(text) != "x\n" {
		t.Errorf("the task's mount is not on the host: %q, %v", text, err)
	}
	must(t, unix.Mount("none", down, "tmpfs", 0, ""))
	defer unix.Unmount(down, unix.MNT_DETACH)
	seen, err := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", h.TaskPID))
	if err != nil || !strings.Contains(string(seen), " /down tmpfs ") {
		t.Errorf("the host's mount is not in the task: %v\n%s", err, seen)
	}
	must(t, d.Stop(t.Context(), h, 0))
	wait(t, d, h)
	must(t, unix.Unmount(filepath.Join(both, "m"), unix.MNT_DETACH))
}

// checkContainerDevice checks that a task can read, but not write, a block volume whose plan allows only reading.
func checkContainerDevice(t *testing.T, d Container) {
	disk := newDisk(t, "node")
	task := boxed(t, d, `head -c 15 /dev/of-plan; echo; (echo x >/dev/of-plan) 2>/dev/null || echo denied`)
	task.Plan = hooks.Plan{Devices: []hooks.Device{{Source: disk.target, Target: "/dev/of-plan", Access: "r"}}}
	h := startContainer(t, d, task)
	wait(t, d, h)
	if got := output(t, d, h, Stdout); got != hostData[:15]+"\ndenied\n" {
		t.Errorf("output %q; errors %q", got, output(t, d, h, Stderr))
	}
	disk.wantContent(t, hostData)
}

// checkContainerLogs checks that the output of two attempts stays, in order, after the containers are gone.
func checkContainerLogs(t *testing.T, d Container) {
	task := boxed(t, d, `echo out $0; echo err >&2`)
	h := startContainer(t, d, task)
	wait(t, d, h)
	task.ID += "-2"
	h = startContainer(t, d, task)
	wait(t, d, h)
	if out, errs := output(t, d, h, Stdout), output(t, d, h, Stderr); out != "out sh\nout sh\n" ||
		errs != "err\nerr\n" {
		t.Errorf("stdout %q, stderr %q", out, errs)
	}
}

// A container outlives the agent and the engine's daemon. The next agent notices what happens to it then.
func TestContainerOutlivesItsStarters(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *enginetest.Engine, d Container) {
		h := startContainer(t, d, boxed(t, d, `echo ready; sleep 1000`))
		awaitOutput(t, d, h, "ready")
		found, ok, err := Find(t.Context(), h.Dir)
		if err != nil || !ok || found.Container != h.Container || found.Created != h.Created {
			t.Fatalf("found %+v, %v, %v", found, ok, err)
		}
		exits := make(chan Exit, 1)
		go func() {
			exit, err := d.Wait(context.Background(), found)
			if err != nil {
				t.Error(err)
			}
			exits <- exit
		}()
		e.Kill()
		wantAlive(t, d, found, true) // the state is not known, so the task's volumes must stay
		e.Start()
		if e.Name == "podman" { // dockerd ends the containers of a dockerd that was killed
			wantAlive(t, d, found, true)
			must(t, d.Stop(t.Context(), found, 0))
		}
		if exit := <-exits; exit.Code != 137 && exit.Code != 255 {
			t.Errorf("%+v", exit)
		}
		wantAlive(t, d, found, false)
	})
}

// A wait for a container costs the engine nothing. Podman's own wait takes a whole processor.
func TestEngineIsIdleWhileAContainerRuns(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *enginetest.Engine, d Container) {
		h := startContainer(t, d, boxed(t, d, `echo ready; sleep 1000`))
		awaitOutput(t, d, h, "ready")
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if exit, err := d.Wait(context.Background(), h); err != nil || exit.Signal != 9 {
				t.Errorf("%+v, %v", exit, err)
			}
		}()
		time.Sleep(time.Second) // the start is over
		began := processorTime(t, e.PID())
		time.Sleep(3 * time.Second)
		if used := processorTime(t, e.PID()) - began; used > 500*time.Millisecond {
			t.Errorf("the engine has used %v of a processor in 3s", used)
		}
		must(t, d.Stop(t.Context(), h, 0))
		<-ended
	})
}

// processorTime returns the processor time of a process, without its children: the clock of clock_getcpuclockid(3).
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	var used unix.Timespec
	must(t, unix.ClockGettime(^int32(pid)<<3|2, &used))
	return time.Duration(used.Nano())
}

// brokenEngine is an engine whose containers end at once, and whose log of their output is damaged.
type brokenEngine struct {
	mu      sync.Mutex
	fails   map[string]bool // requests, as the method and the last element of the path
	running int             // how often a container is shown as running before it has ended
	removed []string        // names of containers
	output  string          // of containers, as the engine frames it
}

func (b *brokenEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	last := path.Base(r.URL.Path)
	what := r.Method + " " + last
	if r.Method == http.MethodDelete {
		what, b.removed = r.Method, append(b.removed, last)
	}
	w.Header().Set("Api-Version", "1.44")
	w.Header().Set("Content-Type", "application/json")
	text := map[string]string{
		"POST create": `{"Id":"c"}`, "POST wait": `{"StatusCode":0}`,
		"GET json": `{"Id":"c","State":{"Status":"exited","StartedAt":"2026-01-01T00:00:00Z"},"Config":{}}`,
		"GET logs": cmp.Or(b.output, "\x03\x00\x00\x00\x00\x00\x00\x07damaged"),
	}[what]
	if what == "GET json" && b.running > 0 {
		b.running--
		text = strings.Replace(text, `"exited"`, fmt.Sprintf(`"running","Running":true,"Pid":%d`, os.Getpid()), 1)
	}
	if b.fails[what] {
		w.WriteHeader(http.StatusInternalServerError)
		text = `{"message":"broken"}`
	}
	_, _ = w.Write([]byte(text))
}

func (b *brokenEngine) driver(t *testing.T) Container {
	socket := filepath.Join(tempDir(t), "engine")
	l := listenAt(t, socket)
	go func() { _ = http.Serve(l, b) }()
	d, err := NewContainer("docker", "unix://"+socket)
	must(t, err)
	return d
}

// heal ends the failures of the engine, and forgets what it has removed.
func (b *brokenEngine) heal() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fails, b.removed = nil, nil
}

// wantRemoved checks which containers the engine was asked to remove since heal.
func (b *brokenEngine) wantRemoved(t *testing.T, names ...string) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Equal(b.removed, names) {
		t.Errorf("removed %q, want %q", b.removed, names)
	}
}

// The engine could neither start a container nor remove it. The container is removed later, and no other container.
func TestContainerOfAFailedStartIsRemovedLater(t *testing.T) {
	for name, remove := range map[string]func(Container, Task) error{
		"by RemoveFailed":   func(d Container, task Task) error { return d.RemoveFailed(t.Context(), task.Dir) },
		"by the next start": func(Container, Task) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			b := &brokenEngine{fails: map[string]bool{"POST start": true, http.MethodDelete: true}}
			d := b.driver(t)
			task := boxed(t, d, "true")
			name := containerName(task.ID)
			_, err := d.Start(t.Context(), task)
			if err == nil || !strings.Contains(err.Error(), "remove container "+name) {
				t.Fatal(err)
			}
			if err := d.RemoveFailed(t.Context(), task.Dir); err == nil ||
				!strings.Contains(err.Error(), name+", whose start failed") {
				t.Error(err)
			}
			b.heal()
			must(t, remove(d, task))
			task.ID += "-2"
			_, err = d.Start(t.Context(), task)
			must(t, err)
			must(t, d.RemoveFailed(t.Context(), task.Dir))
			b.wantRemoved(t, name)
		})
	}
}

// roundTrip is a transport.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Only a wait for the end of a container, and a read of its output, have no time limit.
func TestCallsOfTheEngineHaveALimit(t *testing.T) {
	engine := httptest.NewServer(&brokenEngine{})
	defer engine.Close()
	limited := map[string]bool{}
	d := Container{name: "docker", host: engine.URL}
	var err error
	d.engine, err = client.New(client.WithHost("tcp://"+engine.Listener.Addr().String()),
		client.WithHTTPClient(&http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
			_, has := r.Context().Deadline()
			call := r.Method + " " + path.Base(r.URL.Path)
			if before, known := limited[call]; known {
				has = has && before
			}
			limited[call] = has
			return http.DefaultTransport.RoundTrip(r)
		})}))
	must(t, err)
	for _, config := range []string{`"load":"/dev/null"`, `"force_pull":true`} {
		task := boxed(t, d, "true", config)
		task.Plan.Rules = []hooks.DeviceRule{{Type: "c", Major: 1, Minor: 3, Access: "r"}}
		must(t, d.Prepare(t.Context(), task, func(string) {}))
		h, err := d.Start(t.Context(), task)
		must(t, err)
		must(t, d.Stop(t.Context(), h, 0))
		wait(t, d, h)
	}
	for call, has := range limited {
		if call == "POST wait" || call == "GET logs" {
			delete(limited, call)
		} else if !has {
			t.Errorf("%s has no limit", call)
		}
	}
	if len(limited) < 9 { // ping, version, inspect, load, pull, create, start, stop, remove
		t.Errorf("the calls were %v", limited)
	}
	err = d.explain("t", d.call(t.Context(), "inspect image box", time.Millisecond, func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}))
	want := "no container engine answers at " + engine.URL + ": inspect image box: it accepts connections, but does " +
		"not answer within 1ms"
	if !errors.Is(err, registry.ErrUnavailable) || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// Podman ends a wait early if it cannot read the container's state.
func TestContainerOfAnInterruptedWaitIsNotRemoved(t *testing.T) {
	b := &brokenEngine{running: 3} // for Start, and around the first wait
	d := b.driver(t)
	h, err := d.Start(t.Context(), boxed(t, d, "true"))
	must(t, err)
	if exit := wait(t, d, h); exit.Code != 0 || exit.Err != "" {
		t.Errorf("%+v", exit)
	}
	b.wantRemoved(t, h.Container)
}

// The pid of a container is that of another process here if Podman has another pid namespace. The end of the container
// is noticed nevertheless.
func TestContainerOfAnotherPidNamespaceEnds(t *testing.T) {
	pause := recheckPause
	defer func() { recheckPause = pause }()
	recheckPause = 50 * time.Millisecond
	d := (&brokenEngine{running: 5}).driver(t)
	d.name = "podman"
	h, err := d.Start(t.Context(), boxed(t, d, "true"))
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if exit, err := d.Wait(ctx, h); err != nil || exit.Code != 0 || exit.Err != "" {
		t.Errorf("%+v, %v", exit, err)
	}
}

func TestContainerWithADamagedLogEnds(t *testing.T) {
	d := (&brokenEngine{}).driver(t)
	h, err := d.Start(t.Context(), boxed(t, d, "true"))
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if exit, err := d.Wait(ctx, h); err != nil || exit.Code != 0 || exit.Err != "" {
		t.Errorf("%+v, %v", exit, err)
	}
	if text := output(t, d, h, Stderr); strings.Count(text, "damaged") != 1 {
		t.Errorf("stderr %q", text)
	}
}

// A task may replace a directory by a link. An engine would mount the target of the link on this machine.
func TestMountsFollowNoLinkOfTheTask(t *testing.T) {
	d, err := NewContainer("docker", "unix:///none")
	must(t, err)
	for source, refused := range map[string]bool{
		"local/out": true, "local/out/new": true, "local/up": true, "local/in": false, "local/none": false,
	} {
		for _, config := range []string{`"volumes":["%s:/x"]`, `"mount":{"source":"%s","target":"/x"}`} {
			task := boxed(t, d, "true", fmt.Sprintf(config, source))
			local := task.localDir()
			must(t, errors.Join(os.Mkdir(task.Dir, 0o700), task.makeContainerDirs(), os.Mkdir(local+"/real", 0o700),
				os.Symlink(tempDir(t), local+"/out"), os.Symlink("..", local+"/up"), os.Symlink("real", local+"/in")))
			_, h := task.containerOf()
			if err := task.checkLinks(h); errors.Is(err, registry.ErrInvalid) != refused {
				t.Errorf("%s: %v", fmt.Sprintf(config, source), err)
			}
		}
	}
}

// If an engine refuses to remove a container, its task ends nevertheless. The next attempt removes both containers.
func TestTaskEndsBesideAContainerThatStays(t *testing.T) {
	b := &brokenEngine{fails: map[string]bool{http.MethodDelete: true}}
	d := b.driver(t)
	task := boxed(t, d, "true")
	h, err := d.Start(t.Context(), task)
	must(t, err)
	if exit := wait(t, d, h); exit.Code != 0 || exit.Err != "" {
		t.Errorf("%+v", exit)
	}
	if text := output(t, d, h, Stderr); !strings.Contains(text, "does not remove the container") {
		t.Errorf("stderr %q", text)
	}
	b.heal()
	task.ID += "-2"
	next, err := d.Start(t.Context(), task)
	must(t, err)
	wait(t, d, next)
	b.wantRemoved(t, h.Container, next.Container)
}

// An engine that answers, but does not create a container in time, does not count as unavailable, so the restart policy
// counts the failure.
func TestSlowEngineIsNoSilentEngine(t *testing.T) {
	d := (&brokenEngine{}).driver(t)
	err := d.undoStart(t.Context(), Handle{ID: "t", Dir: t.TempDir(), Container: "c"}, errSilent)
	if errors.Is(err, registry.ErrUnavailable) ||
		!strings.Contains(err.Error(), "has not started the container within") {
		t.Error(err)
	}
	d, err = NewContainer("docker", "unix:///no/socket")
	must(t, err)
	err = d.undoStart(t.Context(), Handle{ID: "t", Dir: t.TempDir(), Container: "c"}, errSilent)
	if !errors.Is(err, registry.ErrUnavailable) {
		t.Error(err)
	}
}

// The limits in the job's logs block also hold for the kept output of a container.
func TestKeptOutputIsBounded(t *testing.T) {
	b := &brokenEngine{output: "\x01\x00\x00\x00\x00\x00\x00\x0a0123456789"}
	d := b.driver(t)
	task := boxed(t, d, "true")
	task.LogSize, task.LogFiles = 3, 2
	h, err := d.Start(t.Context(), task)
	must(t, err)
	wait(t, d, h)
	if text := output(t, d, h, Stdout); text != "6789" {
		t.Errorf("stdout %q", text)
	}
}

func TestContainerErrors(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *enginetest.Engine, d Container) {
		for name, c := range map[string]struct {
			change func(*Task)
			kind   error
			text   string
		}{
			"no such image": {func(task *Task) { task.container.Image = "localhost:1/none:1" }, nil,
				"pull image localhost:1/none:1"},
			"no such archive": {func(task *Task) { task.container.Load = "/no.tar" }, registry.ErrNotFound, "/no.tar"},
			"no archive":      {func(task *Task) { task.container.Load = "/etc/passwd" }, nil, "load /etc/passwd: "},
			"no such program": {func(task *Task) { task.container.Command = commandLine{"/no/program"} }, nil,
				"/no/program"},
			"no such mount": {func(task *Task) {
				task.Plan.Binds = []hooks.Bind{{Source: task.Dir + "/none", Target: "/x", Propagation: hooks.Private}}
			}, registry.ErrNotFound, "/none"},
		} {
			task := boxed(t, d, "true")
			c.change(&task)
			err := d.Prepare(t.Context(), task, func(string) {})
			if err == nil {
				_, err = d.Start(t.Context(), task)
			}
			if err == nil || c.kind != nil && !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%s: %v", name, err)
			}
			if _, found, err := Find(t.Context(), task.Dir); found || err != nil {
				t.Errorf("%s: a handle is left: %v", name, err)
			}
		}
		if left := e.CLI("ps", "-aq"); left != "" {
			t.Errorf("containers are left: %s", left)
		}
	})
}
