package taskdriver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/proc"
	"holdfast/registry"
)

func TestExit(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		for script, want := range map[string]Exit{
			"exit 0": {}, "exit 7": {Code: 7}, "kill -9 $$": {Code: 137, Signal: 9}, "kill -TERM $$": {Code: 143, Signal: 15},
		} {
			h := start(t, d, shell(t, script))
			first := wait(t, d, h)
			if again := wait(t, d, h); again != first {
				t.Errorf("%s: %+v, then %+v", script, first, again)
			}
			if first.At.IsZero() || first.Err != "" || first.Code != want.Code || first.Signal != want.Signal {
				t.Errorf("%s: %+v, want %+v", script, first, want)
			}
			if alive, err := d.Adopt(t.Context(), h); alive || err != nil {
				t.Errorf("%s: alive %t, %v", script, alive, err)
			}
		}
	})
}

func TestEnvironment(t *testing.T) {
	t.Setenv("OF_THE_HOST", "not for tasks")
	both(t, func(t *testing.T, d Driver) {
		task := shell(t, `env`)
		task.Env = []string{"OWN=mine", "KEPT=mine"}
		task.Plan = hooks.Plan{Env: []hooks.Env{{Name: "OWN", Value: "plan's"}, {Name: "KEPT", Value: "plan's", Default: true}, {Name: "NEW", Value: "a b=c"}}}
		env := strings.Split(run(t, d, task), "\n")
		for _, want := range []string{"OWN=plan's", "KEPT=mine", "NEW=a b=c", "PATH=" + defaultPath, "HOLDFAST_TASK=" + task.ID} {
			if !slices.Contains(env, want) {
				t.Errorf("%s is not in %q", want, env)
			}
		}
		if strings.Contains(strings.Join(env, "\n"), "OF_THE_HOST") {
			t.Error("the task inherited the host's environment")
		}
	})
}

// A task inherits no descriptor, no ignored signal, no blocked signal; it leads its own session.
func TestTaskStartsClean(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		task := shell(t, `
			ls /proc/self/fd | tr "\n" " "; umask
			grep -E "^Sig(Ign|Blk)" /proc/self/status | cut -f 2 | tr "\n" " "
			test "$(ps -o sid= -p $$ | tr -d " ")" = $$ && echo leader`)
		out := run(t, d, task)
		// The C library ignores its own two signals, 32 and 33, in what posix_spawn(3) starts, as make does: that is inherited.
		for _, own := range []string{"0000000080000000", "0000000100000000", "0000000180000000"} {
			out = strings.Replace(out, " "+own+" ", " 0000000000000000 ", 1)
		}
		if out != "0 1 2 3 0022\n0000000000000000 0000000000000000 leader\n" {
			t.Errorf("it has descriptors, umask, signals %q", out)
		}
	})
}

func TestStartErrorsLeaveNothing(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		for what, c := range map[string]struct {
			change func(*Task)
			kind   error
		}{
			"no such program":         {func(t *Task) { t.Command = "no-such-program" }, registry.ErrNotFound},
			"no such path":            {func(t *Task) { t.Command = "/no/such/program" }, registry.ErrInvalid},
			"no such directory":       {func(t *Task) { t.WorkDir = "/no/such/dir" }, registry.ErrInvalid},
			"no such user":            {func(t *Task) { t.User = "no-such-user" }, registry.ErrInvalid},
			"an id that is a path":    {func(t *Task) { t.ID = "../x" }, registry.ErrInvalid},
			"a relative directory":    {func(t *Task) { t.Dir = "task" }, registry.ErrInvalid},
			"a program that is a dir": {func(t *Task) { t.Command = "/usr" }, registry.ErrDenied},
		} {
			task := shell(t, `exit 0`)
			c.change(&task)
			if h, err := d.Start(t.Context(), task); !errors.Is(err, c.kind) {
				t.Errorf("%s: %v, %v", what, h, err)
			}
			if pids := withMark(t, task.ID); len(pids) > 0 || exists(filepath.Join(task.Dir, handleFile)) {
				t.Errorf("%s: left %v", what, pids)
			}
			noGroups(t, task.ID)
		}
		if pids := childrenOf(t, os.Getpid()); len(pids) > 0 {
			t.Errorf("processes are left: %q", pids)
		}
	})
}

// A start that is given up leaves no process, no cgroup and no handle, however far it had come.
func TestStartThatIsGivenUp(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		why := errors.New("why")
		for n := range 6 {
			ctx, cancel := context.WithCancelCause(t.Context())
			task := shell(t, `exec sleep 1000`)
			timer := time.AfterFunc(time.Duration(n)*4*time.Millisecond, func() { cancel(why) })
			h, err := d.Start(ctx, task)
			timer.Stop()
			cancel(nil)
			if err == nil { // it was quicker
				endWithTest(t, d, h)
				continue
			}
			if !errors.Is(err, why) {
				t.Errorf("got %v", err)
			}
			if pids := withMark(t, task.ID); len(pids) > 0 {
				t.Errorf("processes are left: %v", pids)
			}
			noGroups(t, task.ID)
		}
	})
}

// childrenOf lists a process's children, the dead ones too, as ps sees them.
func childrenOf(t *testing.T, pid int) []string {
	t.Helper()
	out, err := exec.Command("ps", "-e", "-o", "ppid=,pid=,stat=,comm=").Output()
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); f[0] == itoa(pid) && f[3] != "ps" {
			found = append(found, line)
		}
	}
	return found
}

func TestStopEndsTheWholeTree(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		f := newFifos(t)
		// Grandchildren: one of the group, one that ignores SIGTERM, one that has left session and group and cleared its environment.
		task := shell(t, `
			sleep 1000 &
			(trap "" TERM; sleep 1000; sleep 1000) &
			setsid env -i setsid sleep 1000 &
			trap "echo told; exit 3" TERM
			echo $! > `+f.dir+`/ready
			while true; do wait; done`)
		h := start(t, d, task)
		f.reached(t)
		below := livingBelow(t, h.PID)
		if len(below) < 4 {
			t.Fatalf("it has only %v", below)
		}
		if err := d.Stop(t.Context(), h, time.Minute); err != nil {
			t.Fatal(err)
		}
		if exit := wait(t, d, h); exit.Code != 3 || logs(t, d, h, Stdout) != "told\n" {
			t.Errorf("%+v, %q", exit, logs(t, d, h, Stdout))
		}
		for _, pid := range below {
			if livingPID(pid) {
				t.Errorf("process %d lives", pid)
			}
		}
	})
}

func TestStopKillsAfterTheGrace(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		f := newFifos(t)
		h := start(t, d, shell(t, `trap "" TERM; echo > `+f.dir+`/ready; while true; do sleep 1000; done`))
		f.reached(t)
		if err := d.Stop(t.Context(), h, 50*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		if exit := wait(t, d, h); exit.Signal != 9 {
			t.Errorf("%+v", exit)
		}
		if err := d.Stop(t.Context(), h, time.Minute); err != nil {
			t.Errorf("a second stop: %v", err)
		}
	})
}

// What the task leaves behind is ended when the task ends.
func TestEndTakesWhatIsLeft(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		h := start(t, d, shell(t, `setsid env -i sleep 1000 & echo $!`))
		if exit := wait(t, d, h); exit.Code != 0 {
			t.Errorf("%+v", exit)
		}
		if pid := atoi(strings.TrimSpace(logs(t, d, h, Stdout))); livingPID(pid) {
			t.Errorf("process %d lives", pid)
		}
	})
}

func TestTaskSurvivesItsStarter(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		f := newFifos(t)
		h := startElsewhere(t, d, shell(t, `echo before; echo > `+f.dir+`/ready; cat `+f.dir+`/go > /dev/null; echo after; exit 9`), f)
		if found, ok, err := Find(t.Context(), h.Dir); err != nil || !ok || found.PID != h.PID || found.StartTime != h.StartTime {
			t.Errorf("Find = %+v, %t, %v, want %+v", found, ok, err, h)
		}
		if alive, err := d.Adopt(t.Context(), h); !alive || err != nil {
			t.Fatalf("alive %t, %v", alive, err)
		}
		f.goOn(t)
		if exit := wait(t, d, h); exit.Code != 9 || exit.Err != "" {
			t.Errorf("%+v", exit)
		}
		if out := logs(t, d, h, Stdout); out != "before\nafter\n" {
			t.Errorf("it wrote %q", out)
		}
	})
}

// startElsewhere starts a task from another process, waits until the task is at its fifo, and kills the starter.
func startElsewhere(t *testing.T, d Driver, task Task, f fifos) Handle {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"="+starter)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := json.NewEncoder(in).Encode(request{Driver: d.Name(), Task: task}); err != nil {
		t.Fatal(err)
	}
	var h Handle
	if err := json.NewDecoder(out).Decode(&h); err != nil {
		_ = cmd.Wait()
		t.Fatalf("%v: %s", err, stderr.String())
	}
	endWithTest(t, d, h)
	f.reached(t)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	return h
}

// A parent that is killed cannot say how its task ended; the task is not left alone either.
func TestKilledParent(t *testing.T) {
	ends := map[string]func(*testing.T, Driver, Handle){
		"wait": func(t *testing.T, d Driver, h Handle) { wait(t, d, h) },
		"stop": func(t *testing.T, d Driver, h Handle) {
			if err := d.Stop(t.Context(), h, 50*time.Millisecond); err != nil {
				t.Fatal(err)
			}
		},
	}
	both(t, func(t *testing.T, d Driver) {
		for what, end := range ends {
			f := newFifos(t)
			h := start(t, d, shell(t, `trap "" TERM; setsid sleep 1000 & echo > `+f.dir+`/ready; while true; do sleep 1000; done`))
			f.reached(t)
			below := livingBelow(t, h.PID)
			if err := unix.Kill(h.PID, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			reaped(t, h)
			if alive, err := d.Adopt(t.Context(), h); !alive || err != nil {
				t.Errorf("%s: alive %t, %v", what, alive, err)
			}
			end(t, d, h)
			for _, pid := range below {
				if livingPID(pid) {
					t.Errorf("%s: process %d lives", what, pid)
				}
			}
			if exit := wait(t, d, h); exit.Err == "" || exit.Code != -1 {
				t.Errorf("%s: %+v", what, exit)
			}
		}
	})
}

// A parent that is stopped does not keep Stop from ending the task; the test does not wait for its patience.
func TestStuckParentDoesNotHoldTheCaller(t *testing.T) {
	d := NewRawExec()
	f := newFifos(t)
	h := start(t, d, shell(t, `echo > `+f.dir+`/ready; sleep 1000`))
	f.reached(t)
	if err := unix.Kill(h.PID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := d.Stop(ctx, h, 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if err := unix.Kill(h.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// reaped waits until a parent that was killed is gone: init would take it.
func reaped(t *testing.T, h Handle) {
	t.Helper()
	for {
		_, err := unix.Wait4(h.PID, nil, 0, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// A handle names processes by their start as well: what has the pid now is not touched.
func TestRecycledPidsAreNotTouched(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		h := start(t, d, shell(t, `exit 4`))
		wait(t, d, h)
		s := startAfter(t, h.StartTime)
		other := h
		other.PID, other.TaskPID, other.Dir = s.pid, s.pid, mkdir(t, tempDir(t), "other")
		if alive, err := d.Adopt(t.Context(), other); alive || err != nil {
			t.Errorf("alive %t, %v", alive, err)
		}
		if err := d.Stop(t.Context(), other, 0); err != nil {
			t.Error(err)
		}
		if exit := wait(t, d, other); exit.Err == "" {
			t.Errorf("%+v", exit)
		}
		if !livingPID(s.pid) {
			t.Error("an unrelated process was killed")
		}
		// The control: its own start time identifies it.
		other.StartTime = s.start
		if alive, _ := d.Adopt(t.Context(), other); !alive {
			t.Error("the start time is ignored")
		}
		other.Boot = "another boot"
		if alive, err := d.Adopt(t.Context(), other); alive || err != nil {
			t.Errorf("after a boot: alive %t, %v", alive, err)
		}
	})
}

// startAfter starts a process with a later start time. Start times count in hundredths of a second.
func startAfter(t *testing.T, start uint64) process {
	t.Helper()
	for {
		cmd := exec.Command("sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		s, err := proc.ReadStat(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		if s.Start != start {
			return processOf(s)
		}
	}
}

func TestOneTaskPerDirectory(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		f := newFifos(t)
		task := shell(t, `echo first; echo > `+f.dir+`/ready; cat `+f.dir+`/go > /dev/null`)
		h := start(t, d, task)
		f.reached(t)
		again := task
		again.ID, again.Args = task.ID+"-2", []string{"-c", "echo second; exit 5"}
		if _, err := d.Start(t.Context(), again); !errors.Is(err, registry.ErrConflict) {
			t.Errorf("a second start: %v", err)
		}
		f.goOn(t)
		wait(t, d, h)
		second := start(t, d, again)
		if exit := wait(t, d, second); exit.Code != 5 {
			t.Errorf("%+v", exit)
		}
		if out := logs(t, d, second, Stdout); out != "first\nsecond\n" {
			t.Errorf("the logs of both attempts are %q", out)
		}
		if exit := wait(t, d, h); exit.Err == "" {
			t.Errorf("the first attempt's end was overwritten, and now it is %+v", exit)
		}
		if exit := wait(t, d, second); exit.Code != 5 {
			t.Errorf("asking for the first attempt changed the second's: %+v", exit)
		}
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	d := NewRawExec()
	h := start(t, d, shell(t, `sleep 1000`))
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	cancel(why)
	if _, err := d.Wait(ctx, h); !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
	if alive, _ := d.Adopt(t.Context(), h); !alive {
		t.Error("the task did not survive it")
	}
}

func TestNothingIsLeakedOverManyTasks(t *testing.T) {
	both(t, func(t *testing.T, d Driver) {
		dir := tempDir(t)
		cycle := func(n int) {
			task := shell(t, `sleep 1000 & exit 0`)
			if n%4 == 0 {
				task.Args = []string{"-c", "sleep 1000"}
			}
			task.Dir = filepath.Join(dir, "task")
			h, err := d.Start(t.Context(), task)
			if err == nil && n%4 == 0 {
				err = d.Stop(t.Context(), h, time.Minute)
			}
			if err == nil {
				_, err = d.Wait(t.Context(), h)
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, group := range h.Cgroups {
				if exists(group) {
					t.Fatalf("cgroup %s is left", group)
				}
			}
		}
		cycle(0)
		fds, mounts, threads := count(t, "/proc/self/fd"), mountLines(t, dir), len(childrenOf(t, os.Getpid()))
		cycles := map[string]int{"exec": 60, "raw_exec": 40}[d.Name()]
		if os.Getenv(roleEnv) == inside {
			cycles = 10
		}
		for n := range cycles {
			cycle(n)
		}
		if now := count(t, "/proc/self/fd"); now > fds {
			t.Errorf("%d descriptors, were %d", now, fds)
		}
		if now := mountLines(t, dir); len(now) != len(mounts) {
			t.Errorf("mounts: %q", now)
		}
		if now := len(childrenOf(t, os.Getpid())); now != threads {
			t.Errorf("children: %q", childrenOf(t, os.Getpid()))
		}
	})
}

func count(t *testing.T, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
