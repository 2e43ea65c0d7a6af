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
)

// hostErrand is the environment variable that makes this test program a host: it names the file of an errand.
const hostErrand = "HOLDFAST_E2E_HOST"

// errand is what a host process of its own is to do.
type errand struct {
	StateDir, RunDir string
	Shim, Next       string // Next is swapped in
	Bake             time.Duration
	Living           host.Workload
}

// word is one line of what such a host says: what it was told, as soon as it was told it.
type word struct {
	PIDs  []int       `json:",omitempty"` // of the shims, once the swap is as it is to be
	Made  string      `json:",omitempty"` // a volume
	Event *host.Event `json:",omitempty"`
}

// hostMain is a host that swaps its shim, and then makes volumes until it is killed.
func hostMain(path string) int {
	text, err := os.ReadFile(path)
	var o errand
	if err = errors.Join(err, json.Unmarshal(text, &o)); err == nil {
		err = o.carryOut()
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func (o errand) carryOut() error {
	ctx := context.Background()
	h, err := host.Open(ctx, host.Config{
		StateDir: o.StateDir, RunDir: o.RunDir, Shim: host.Binary{Path: o.Shim}, Node: "node-1", Workload: o.Living, Bake: o.Bake, SwapBudget: patience,
	})
	if err != nil {
		return err
	}
	var mu sync.Mutex
	say := func(w word) {
		mu.Lock()
		defer mu.Unlock()
		_ = json.NewEncoder(os.Stdout).Encode(w)
	}
	go func() {
		_ = h.Watch(ctx, host.WatchOptions{}, func(e host.Event) error { e.Instance = nil; say(word{Event: &e}); return nil })
	}()
	first, err := h.Status(ctx)
	if err != nil {
		return err
	}
	if _, err := h.Swap(ctx, host.Binary{Path: o.Next}); err != nil {
		return err
	}
	second, err := h.Status(ctx)
	if err != nil {
		return err
	}
	for o.Bake < time.Second && h.Swaps()[0].Outcome != host.SwapCommitted {
		time.Sleep(time.Millisecond)
	}
	say(word{PIDs: []int{first.PID, second.PID}})
	for n := 0; ; n++ {
		id := fmt.Sprintf("late-%d", n)
		spec, _, err := h.ParseVolume(ctx, host.Source{Name: id, Text: []byte(volumeText(id))}, host.ParseOptions{})
		if err == nil {
			_, err = h.CreateVolume(ctx, spec)
		}
		if err != nil {
			return err
		}
		say(word{Made: id})
	}
}

// volumeText is a volume's file.
func volumeText(id string) string {
	return fmt.Sprintf("id = %q\nname = %q\nplugin_id = \"fake\"\ncapability {\n access_mode = %q\n attachment_mode = \"file-system\"\n}\n", id, id, oneWriter)
}

// stranger is a host process of its own, on the state of a world's host that was closed.
type stranger struct {
	*exec.Cmd
	said  *bufio.Scanner
	shims []int
	made  []string
	told  []host.Event
}

// away has a host process of its own take the world's state.
func (s *succession) away(bake time.Duration, living host.Workload) *stranger {
	s.t.Helper()
	binaries, err := twins()
	s.must(err)
	text, err := json.Marshal(errand{s.config.StateDir, s.config.RunDir, s.config.Shim.Path, binaries[0].Path, bake, living})
	s.must(err)
	path := filepath.Join(s.dir, "errand")
	s.must(os.WriteFile(path, text, 0o600))
	self, err := os.Executable()
	s.must(err)
	a := &stranger{Cmd: exec.Command(self)}
	a.Env = append(os.Environ(), hostErrand+"="+path)
	a.Stderr = os.Stderr
	out, err := a.StdoutPipe()
	s.must(err)
	s.must(a.Start())
	a.said = bufio.NewScanner(out)
	a.said.Buffer(nil, 1<<20)
	return a
}

// hears takes in what the host says, until enough was said, or it says nothing any more.
func (a *stranger) hears(enough func() bool) {
	for !enough() && a.said.Scan() {
		var w word
		if json.Unmarshal(a.said.Bytes(), &w) != nil {
			return // it was killed in the middle of the line
		}
		switch {
		case w.Event != nil:
			a.told = append(a.told, *w.Event)
		case w.Made != "":
			a.made = append(a.made, w.Made)
		default:
			a.shims = w.PIDs
		}
	}
}

// A host is killed, while a swap is young and long after: mounts, and whoever writes through them, go on; its shims end by themselves; and the next host
// of the state has all that was ever acknowledged: volumes, claims, what is mounted, plugins, restarts that are asked for, and the events.
func TestHostRestart(t *testing.T) {
	for name, bake := range map[string]time.Duration{"baking": time.Hour, "committed": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSuccession(t, everything...)
			p := s.plugin("alloc-p", csifake.Monolith)
			s.must(s.create("vol"))
			user := s.group("user", "vol", oneWriter)
			path, err := s.prepare(user)
			s.must(err)
			pending := s.neverServes("alloc-pending")
			s.asksFor(pending)
			was, _ := s.mounted(path)
			stop := s.writes(filepath.Join(path, "log"))
			living := host.Workload{Allocs: []host.AllocGroup{user}}
			for _, task := range []host.AllocTask{p.task, pending} {
				living.Tasks = append(living.Tasks, host.WorkloadTask{AllocTask: task, Running: true, Started: s.sinceBoot()})
			}
			s.must(s.host.Close())

			a := s.away(bake, living)
			a.hears(func() bool { return len(a.made) >= 5 && len(a.shims) > 0 })
			s.dies(a, bake > time.Second)
			if now, mounted := s.mounted(path); !mounted || now.ID != was.ID {
				t.Errorf("the user's mount was %+v and is %+v", was, now)
			}

			s.config.Workload = living
			s.open()
			if sockets, err := filepath.Glob(filepath.Join(s.config.RunDir, "shim-*")); err != nil || len(sockets) != 1 {
				t.Errorf("directories of sockets of shims: %v, %v", sockets, err)
			}
			s.asksFor(pending)
			s.hasAll(a, user)
			stop()
			s.must(s.release("user"))
			s.must(s.delete("vol"))
			for id := range s.states() {
				s.must(s.delete(id))
			}
			s.must(s.host.TaskExited(s.ctx(), pending.Key(), 1, 0, 9, true))
			s.must(s.host.TaskStopping(s.ctx(), p.task.Key(), 1))
			s.exit(p)
			history := s.history(func(e host.Event) bool { return e.Kind == "task deregistered" && e.Alloc == "alloc-p" })
			for _, problem := range healthOf(history, nil) {
				t.Error(problem)
			}
			if problem := s.goesOnAfter(a, history); problem != "" {
				t.Errorf("after the cursor of the killed host: %s", problem)
			}
		})
	}
}

// writes has somebody write and sync a file all the time. stop ends that.
func (s *succession) writes(path string) (stop func()) {
	s.t.Helper()
	file, err := os.Create(path)
	s.must(err)
	ctx, cancel := context.WithCancel(s.t.Context())
	var writing sync.WaitGroup
	writing.Go(func() {
		for pause(ctx, 5*time.Millisecond) {
			if _, err := file.WriteString("line\n"); err != nil {
				s.t.Errorf("write: %v", err)
			}
			if err := file.Sync(); err != nil {
				s.t.Errorf("sync: %v", err)
			}
		}
	})
	return func() {
		cancel()
		writing.Wait()
		s.must(file.Close())
	}
}

// endsWithin is how long a shim may outlive its host, on a slow machine: it has a second.
const endsWithin = 5 * time.Second

// dies kills the host in the middle of what it does, and waits until its shims have ended: both, if the old one stood by.
func (s *succession) dies(a *stranger, both bool) {
	s.t.Helper()
	if alive(a.shims[0]) != both || !alive(a.shims[1]) {
		s.t.Errorf("of the shims %v the first lives: %t, the second: %t", a.shims, alive(a.shims[0]), alive(a.shims[1]))
	}
	s.must(unix.Kill(a.Process.Pid, unix.SIGKILL))
	began := time.Now()
	s.eventually("the shims end with their host", func() bool { return !alive(a.shims[0]) && !alive(a.shims[1]) })
	if took := time.Since(began); took > endsWithin {
		s.t.Errorf("the shims were gone %s after their host", took)
	}
	a.hears(func() bool { return false })
	_ = a.Wait()
}

// hasAll holds what the next host knows against what the killed one was told, and what was there before.
func (s *succession) hasAll(a *stranger, user host.AllocGroup) {
	s.t.Helper()
	states := s.states()
	for _, id := range append(a.made, "vol") {
		if states[id] != "ready" {
			s.t.Errorf("volume %s was made, and is %q", id, states[id])
		}
	}
	if c, held := s.claims()[string(user.Alloc)]; !held || c.Name.ID != "vol" {
		s.t.Errorf("the user's claim is %+v", c)
	}
	if got, err := s.prepare(user); err != nil || got == "" {
		s.t.Errorf("the user is prepared again: %q, %v", got, err)
	}
	if n := len(s.sent("NodePublishVolume", "NodeStageVolume", "ControllerPublishVolume")); n != 3 {
		s.t.Errorf("the plugin was asked for the mount in %d calls", n)
	}
	list, _, err := s.host.Plugins(s.ctx(), host.PluginQuery{})
	s.must(err)
	if len(list.Instances) != 2 || slices.ContainsFunc(list.Instances, func(i host.Instance) bool { return i.Health.State != host.Healthy }) {
		s.t.Errorf("instances: %+v", list.Instances)
	}
	var history []host.Event
	last := a.told[len(a.told)-1].Seq
	s.until(func(e host.Event) bool { history = append(history, e); return e.Seq >= last })
	if problem := other(history, a.told); problem != "" {
		s.t.Errorf("the killed host was told other events: %s", problem)
	}
}

// goesOnAfter says what is wrong with the events that who goes on with the killed host's cursor is told.
func (s *succession) goesOnAfter(a *stranger, history []host.Event) string {
	s.t.Helper()
	last := a.told[len(a.told)-1].Seq
	rest := slices.DeleteFunc(slices.Clone(history), func(e host.Event) bool { return e.Seq <= last })
	var told []host.Event
	err := s.host.Watch(s.ctx(), host.WatchOptions{After: last}, func(e host.Event) error {
		if told = append(told, e); len(told) >= len(rest) {
			return io.EOF
		}
		return nil
	})
	if !errors.Is(err, io.EOF) {
		s.t.Errorf("watch: %v", err)
	}
	return other(told, rest)
}
