package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/proc"
)

// A host that comes back names what still runs. Other allocs are released without a request.
func TestHostComesBack(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("kept"))
	e.must(e.create("lost"))
	kept := e.group("alloc-kept", request{source: "kept"})
	path, err := e.prepare(kept)
	e.must(err)
	e.writeFile(path, "f", "x")
	e.use("alloc-lost", request{source: "lost"})
	e.reopen([]*pluginTask{p}, kept)
	e.waitReleased("alloc-lost")
	e.must(e.delete("lost"))
	e.wantFile(path, "f", "x")
	again, err := e.prepare(kept)
	e.must(err)
	if again != path {
		t.Errorf("prepared again, the volume is at %s, not %s", again, path)
	}
	e.must(e.release("alloc-kept"))
	e.must(e.delete("kept"))
	e.stopPlugin(p)
}

// A running task that the shim cannot take over delays neither the host nor later shims.
func TestOneOddTaskHoldsUpNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	odd := host.WorkloadTask{
		AllocTask: host.AllocTask{Alloc: "alloc-odd", Task: "plugin", Attempt: 1,
			Sealed: []byte("not sealed by a shim")}, Running: true,
	}
	e.must(e.host.Sync(e.ctx(), host.Workload{Tasks: []host.WorkloadTask{odd, e.running(p.task)}}))
	e.killShim()
	e.must(e.scenario())
	e.stopPlugin(p)
}

// Running plugins are found at the sockets that they were given, also when the host has another run directory now.
func TestAnotherRunDirectory(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	first := e.config.RunDir
	e.config.RunDir = e.dir + "/run2"
	e.reopen([]*pluginTask{p})
	e.must(e.scenario())
	e.stopPlugin(p)
	unmount(t, first)
}

// hostTaskVariable is the environment variable that makes this test program a host. It names the file of a hostTask.
const hostTaskVariable = "HOLDFAST_E2E_HOST"

// hostTask is what a host process does.
type hostTask struct {
	StateDir, RunDir string
	Shim, Next       string // Next is swapped in
	Bake             time.Duration
	Workload         host.Workload
}

// hostMessage is one line of a host process's output.
type hostMessage struct {
	PIDs    []int       `json:",omitempty"` // of the shims, after the swap
	Created string      `json:",omitempty"` // a volume
	Event   *host.Event `json:",omitempty"`
}

// hostMain is a host that swaps its shim, then creates volumes until it is killed.
func hostMain(path string) int {
	text, err := os.ReadFile(path)
	var task hostTask
	if err = errors.Join(err, json.Unmarshal(text, &task)); err == nil {
		err = task.run()
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func (task hostTask) run() error {
	ctx := context.Background()
	h, err := host.Open(ctx, host.Config{
		StateDir: task.StateDir, RunDir: task.RunDir, Shim: host.Binary{Path: task.Shim}, Node: "node-1",
		Workload: task.Workload,
		Bake:     task.Bake, SwapBudget: waitLimit,
	})
	if err != nil {
		return err
	}
	var mu sync.Mutex
	print := func(m hostMessage) {
		mu.Lock()
		defer mu.Unlock()
		_ = json.NewEncoder(os.Stdout).Encode(m)
	}
	go func() {
		_ = h.Watch(ctx, host.WatchOptions{}, func(event host.Event) error {
			event.Instance = nil
			print(hostMessage{Event: &event})
			return nil
		})
	}()
	first, err := h.Status(ctx)
	if err != nil {
		return err
	}
	if _, err := h.Swap(ctx, host.Binary{Path: task.Next}); err != nil {
		return err
	}
	second, err := h.Status(ctx)
	if err != nil {
		return err
	}
	for task.Bake < time.Second && h.Swaps()[0].Outcome != host.SwapCommitted {
		time.Sleep(time.Millisecond)
	}
	print(hostMessage{PIDs: []int{first.PID, second.PID}})
	for n := 0; ; n++ {
		id := fmt.Sprintf("late-%d", n)
		if err := createText(ctx, h, volumeText("fake", id, "")); err != nil {
			return err
		}
		print(hostMessage{Created: id})
	}
}

// hostProcess is a host in a process of its own, on the state of an env whose host is closed.
type hostProcess struct {
	*exec.Cmd
	output  *bufio.Scanner
	shims   []int
	created []string
	events  []host.Event
}

func (e *env) startHostProcess(bake time.Duration, workload host.Workload) *hostProcess {
	e.t.Helper()
	shims, err := alternateShims()
	e.must(err)
	text, err := json.Marshal(hostTask{e.config.StateDir, e.config.RunDir, e.config.Shim.Path, shims[0].Path, bake,
		workload})
	e.must(err)
	path := filepath.Join(e.dir, "host-task")
	e.must(os.WriteFile(path, text, 0o600))
	self, err := os.Executable()
	e.must(err)
	p := &hostProcess{Cmd: exec.Command(self)}
	p.Env = append(os.Environ(), hostTaskVariable+"="+path)
	p.Stderr = os.Stderr
	out, err := p.StdoutPipe()
	e.must(err)
	e.must(p.Start())
	p.output = bufio.NewScanner(out)
	p.output.Buffer(nil, 1<<20)
	return p
}

// read reads messages until enough returns true or the output ends.
func (p *hostProcess) read(enough func() bool) {
	for !enough() && p.output.Scan() {
		var m hostMessage
		if json.Unmarshal(p.output.Bytes(), &m) != nil {
			return // killed in the middle of the line
		}
		switch {
		case m.Event != nil:
			p.events = append(p.events, *m.Event)
		case m.Created != "":
			p.created = append(p.created, m.Created)
		default:
			p.shims = m.PIDs
		}
	}
}

// A host is killed, early after a swap and long after. Mounts and writers continue, its shims exit, and the next host
// has all that was acknowledged: volumes, claims, mounts, plugins, pending restarts and events.
func TestHostRestart(t *testing.T) {
	for name, bake := range map[string]time.Duration{"baking": time.Hour, "committed": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, allCaps...)
			p := e.addPlugin("alloc-p", csifake.Monolith)
			e.must(e.create("vol"))
			user := e.group("user", request{source: "vol"})
			path, err := e.prepare(user)
			e.must(err)
			pending := e.addUnservedPlugin("alloc-pending")
			e.waitRestartRequest(pending)
			was, _ := e.mounted(path)
			stopWriter := e.startWriter(filepath.Join(path, "log"))
			workload := host.Workload{Allocs: []host.AllocGroup{user}}
			for _, task := range []host.AllocTask{p.task, pending} {
				running := e.running(task)
				running.Started.At = proc.BootTime()
				workload.Tasks = append(workload.Tasks, running)
			}
			e.must(e.host.Close())

			other := e.startHostProcess(bake, workload)
			other.read(func() bool { return len(other.created) >= 5 && len(other.shims) > 0 })
			e.killHostProcess(other, bake > time.Second)
			if now, mounted := e.mounted(path); !mounted || now.ID != was.ID {
				t.Errorf("the user's mount was %+v and is %+v", was, now)
			}

			e.config.Workload = workload
			e.open()
			if sockets, err := filepath.Glob(filepath.Join(e.config.RunDir, "shim-*")); err != nil ||
				len(sockets) != 1 {
				t.Errorf("socket directories of shims: %v, %v", sockets, err)
			}
			e.waitRestartRequest(pending)
			e.checkRestored(other, user)
			stopWriter()
			e.must(e.release("user"))
			for id := range e.volumeStates() {
				e.must(e.delete(id))
			}
			e.must(e.host.TaskExited(e.ctx(), pending.Key(), 1, 0, 9, true))
			e.must(e.host.TaskStopping(e.ctx(), p.task.Key(), 1))
			e.stopPlugin(p)
			history := e.eventsUntil(func(event host.Event) bool {
				return event.Kind == "task deregistered" && event.Alloc == "alloc-p"
			})
			for _, problem := range healthErrors(history, nil) {
				t.Error(problem)
			}
			if problem := e.diffAfterCursor(other, history); problem != "" {
				t.Errorf("after the cursor of the killed host: %s", problem)
			}
		})
	}
}

// startWriter writes and syncs lines to a file until stop is called.
func (e *env) startWriter(path string) (stop func()) {
	e.t.Helper()
	file, err := os.Create(path)
	e.must(err)
	ctx, cancel := context.WithCancel(e.t.Context())
	var writing sync.WaitGroup
	writing.Go(func() {
		for sleep(ctx, 5*time.Millisecond) {
			_, err := file.WriteString("line\n")
			if err := errors.Join(err, file.Sync()); err != nil {
				e.t.Errorf("write: %v", err)
			}
		}
	})
	return func() {
		cancel()
		writing.Wait()
		e.must(file.Close())
	}
}

// killHostProcess kills the host and waits until its shims are gone. both says whether the old shim stands by.
func (e *env) killHostProcess(p *hostProcess, both bool) {
	e.t.Helper()
	e.waitUntil("the old shim stands by or is gone", func() bool { return alive(p.shims[0]) == both })
	if !alive(p.shims[1]) {
		e.t.Error("the new shim is dead")
	}
	e.must(unix.Kill(p.Process.Pid, unix.SIGKILL))
	e.waitUntil("the shims exit with their host", func() bool { return !alive(p.shims[0]) && !alive(p.shims[1]) })
	p.read(func() bool { return false })
	_ = p.Wait()
}

// checkRestored compares what the next host knows with what the killed one reported, and with what was there before.
func (e *env) checkRestored(p *hostProcess, user host.AllocGroup) {
	e.t.Helper()
	states := e.volumeStates()
	for _, id := range append(p.created, "vol") {
		if states[id] != "ready" {
			e.t.Errorf("volume %s was created and is %q", id, states[id])
		}
	}
	if c, held := e.claims()[string(user.Alloc)]; !held || c.Name.ID != "vol" {
		e.t.Errorf("the user's claim is %+v", c)
	}
	e.must(errOf(e.prepare(user)))
	if n := len(e.calls("NodePublishVolume", "NodeStageVolume", "ControllerPublishVolume")); n != 3 {
		e.t.Errorf("the plugin got %d calls for the mount", n)
	}
	list, _, err := e.host.Plugins(e.ctx(), host.PluginQuery{})
	e.must(err)
	unhealthy := func(i host.Instance) bool { return i.Health.State != host.Healthy }
	if len(list.Instances) != 2 || slices.ContainsFunc(list.Instances, unhealthy) {
		e.t.Errorf("instances: %+v", list.Instances)
	}
	last := p.events[len(p.events)-1].Seq
	history := e.eventsUntil(func(event host.Event) bool { return event.Seq >= last })
	if problem := eventDiff(history, p.events); problem != "" {
		e.t.Errorf("the killed host got other events: %s", problem)
	}
}

// diffAfterCursor compares the events after the killed host's cursor with the history.
func (e *env) diffAfterCursor(p *hostProcess, history []host.Event) string {
	e.t.Helper()
	last := p.events[len(p.events)-1].Seq
	want := slices.DeleteFunc(slices.Clone(history), func(event host.Event) bool { return event.Seq <= last })
	var got []host.Event
	err := e.host.Watch(e.ctx(), host.WatchOptions{After: last}, func(event host.Event) error {
		if got = append(got, event); len(got) >= len(want) {
			return io.EOF
		}
		return nil
	})
	if !errors.Is(err, io.EOF) {
		e.t.Errorf("watch: %v", err)
	}
	return eventDiff(got, want)
}
