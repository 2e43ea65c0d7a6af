package taskdriver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

func TestExitStatusOfTask(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		for script, want := range map[string]Exit{
			"exit 0": {}, "exit 7": {Code: 7}, "kill -9 $$": {Code: 137, Signal: 9},
			"kill -TERM $$": {Code: 143, Signal: 15},
		} {
			h := start(t, d, shell(t, script))
			first := wait(t, d, h)
			if again := wait(t, d, h); again != first {
				t.Errorf("%s: %+v, then %+v", script, first, again)
			}
			if first.At.IsZero() || first.Err != "" || first.Code != want.Code || first.Signal != want.Signal {
				t.Errorf("%s: %+v, want %+v", script, first, want)
			}
			wantAlive(t, d, h, false)
		}
	})
}

func TestTaskGetsOnlyItsOwnEnvironment(t *testing.T) {
	t.Setenv("OF_THE_HOST", "not for tasks")
	eachDriver(t, func(t *testing.T, d Driver) {
		task := shell(t, `env`)
		task.Env = []string{"OWN=mine", "KEPT=mine"}
		task.Plan = hooks.Plan{Env: []hooks.Env{
			{Name: "OWN", Value: "plan's"}, {Name: "KEPT", Value: "plan's", Default: true},
			{Name: "NEW", Value: "a b=c"},
		}}
		env := strings.Split(run(t, d, task), "\n")
		for _, want := range []string{"OWN=plan's", "KEPT=mine", "NEW=a b=c", "PATH=" + defaultPath,
			"HOLDFAST_TASK=" + task.ID} {
			if !slices.Contains(env, want) {
				t.Errorf("%s is not in %q", want, env)
			}
		}
		if strings.Contains(strings.Join(env, "\n"), "OF_THE_HOST") {
			t.Error("the task inherited the host's environment")
		}
	})
}

// A task inherits no descriptor and no ignored or blocked signal, and leads its own session.
func TestTaskStartsClean(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		out := run(t, d, shell(t, `
			ls /proc/self/fd | tr "\n" " "; umask
			grep -E "^Sig(Ign|Blk)" /proc/self/status | cut -f 2 | tr "\n" " "
			test "$(ps -o sid= -p $$ | tr -d " ")" = $$ && echo leader`))
		// Children of posix_spawn(3), which make uses, inherit that the C library's signals 32 and 33 are ignored.
		for _, own := range []string{"0000000080000000", "0000000100000000", "0000000180000000"} {
			out = strings.Replace(out, " "+own+" ", " 0000000000000000 ", 1)
		}
		if out != "0 1 2 3 0022\n0000000000000000 0000000000000000 leader\n" {
			t.Errorf("descriptors, umask, signals: %q", out)
		}
	})
}

func TestStartErrorsLeaveNothing(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		for name, c := range map[string]struct {
			change func(*Task)
			kind   error
		}{
			"no such program":      {func(t *Task) { t.Command = "no-such-program" }, registry.ErrNotFound},
			"no such path":         {func(t *Task) { t.Command = "/no/such/program" }, registry.ErrInvalid},
			"no such directory":    {func(t *Task) { t.WorkDir = "/no/such/dir" }, registry.ErrInvalid},
			"no such user":         {func(t *Task) { t.User = "no-such-user" }, registry.ErrInvalid},
			"an ID with a path":    {func(t *Task) { t.ID = "../x" }, registry.ErrInvalid},
			"a relative directory": {func(t *Task) { t.Dir = "task" }, registry.ErrInvalid},
			"a directory to run":   {func(t *Task) { t.Command = "/usr" }, registry.ErrDenied},
		} {
			task := shell(t, `exit 0`)
			c.change(&task)
			if h, err := d.Start(t.Context(), task); !errors.Is(err, c.kind) {
				t.Errorf("%s: %v, %v", name, h, err)
			}
			if exists(filepath.Join(task.Dir, handleFile)) {
				t.Errorf("%s: a handle is left", name)
			}
			wantNothingLeft(t, task.ID)
		}
		if all := children(t); len(all) > 0 {
			t.Errorf("processes are left: %q", all)
		}
	})
}

// A start that is cancelled at any point leaves no process, no cgroup and no handle.
func TestCancelledStartLeavesNothing(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		why := errors.New("why")
		for n := range 6 {
			ctx, cancel := context.WithCancelCause(t.Context())
			task := shell(t, `exec sleep 1000`)
			timer := time.AfterFunc(time.Duration(n)*4*time.Millisecond, func() { cancel(why) })
			h, err := d.Start(ctx, task)
			timer.Stop()
			cancel(nil)
			if err == nil { // the start was faster
				stopAtEnd(t, d, h)
				continue
			}
			if !errors.Is(err, why) {
				t.Errorf("got %v", err)
			}
			wantNothingLeft(t, task.ID)
		}
	})
}

func TestStopEndsTheWholeTree(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		f := newFifos(t)
		// Three children: of the same group, one that ignores SIGTERM, one without session, group and environment
		// of the task.
		h := start(t, d, shell(t, `
			sleep 1000 &
			(trap "" TERM; sleep 1000; sleep 1000) &
			setsid env -i setsid sleep 1000 &
			trap "echo stopped; exit 3" TERM
			`+f.ready+` while true; do wait; done`))
		f.awaitReady(t)
		below := livingBelow(t, h.PID)
		if len(below) < 4 {
			t.Fatalf("only %v run", below)
		}
		must(t, d.Stop(t.Context(), h, time.Minute))
		if exit := wait(t, d, h); exit.Code != 3 || logs(t, d, h, Stdout) != "stopped\n" {
			t.Errorf("%+v, %q", exit, logs(t, d, h, Stdout))
		}
		wantDead(t, below)
	})
}

func TestStopKillsAfterTheGrace(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		f := newFifos(t)
		h := start(t, d, shell(t, `trap "" TERM; `+f.ready+` while true; do sleep 1000; done`))
		f.awaitReady(t)
		must(t, d.Stop(t.Context(), h, 50*time.Millisecond))
		if exit := wait(t, d, h); exit.Signal != 9 {
			t.Errorf("%+v", exit)
		}
		must(t, d.Stop(t.Context(), h, time.Minute)) // again
	})
}

func TestRemainingProcessesAreKilledWhenTheTaskExits(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		wantDead(t, []int{atoi(run(t, d, shell(t, `setsid env -i sleep 1000 & echo $!`)))})
	})
}

func TestTaskSurvivesItsStarter(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		f := newFifos(t)
		h := startElsewhere(t, d, shell(t, `echo before; `+f.ready+f.wait+` echo after; exit 9`), f)
		if found, ok, err := Find(t.Context(), h.Dir); err != nil || !ok || found.parent() != h.parent() {
			t.Errorf("Find = %+v, %t, %v, want %+v", found, ok, err, h)
		}
		wantAlive(t, d, h, true)
		f.release(t)
		if exit := wait(t, d, h); exit.Code != 9 || exit.Err != "" {
			t.Errorf("%+v", exit)
		}
		wantLines(t, logs(t, d, h, Stdout), "before", "after")
	})
}

// startElsewhere starts a task from another process, which it kills when the task is ready.
func startElsewhere(t *testing.T, d Driver, task Task, f fifos) (h Handle) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"="+starterRole)
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	must(t, cmd.Start())
	must(t, json.NewEncoder(in).Encode(request{Driver: d.Name(), Task: task}))
	if err := json.NewDecoder(out).Decode(&h); err != nil {
		_ = cmd.Wait()
		t.Fatalf("%v: %s", err, stderr.String())
	}
	stopAtEnd(t, d, h)
	f.awaitReady(t)
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	return h
}

// killParent kills the parent of a task, and reaps it as init would.
func killParent(t *testing.T, h Handle) {
	t.Helper()
	must(t, unix.Kill(h.PID, unix.SIGKILL))
	for {
		if _, err := unix.Wait4(h.PID, nil, 0, nil); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

func TestKilledParentTakesItsTaskAlong(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		for name, end := range map[string]func(Handle){
			"wait": func(h Handle) { wait(t, d, h) },
			"stop": func(h Handle) { must(t, d.Stop(t.Context(), h, 50*time.Millisecond)) },
		} {
			f := newFifos(t)
			h := start(t, d, shell(t, `trap "" TERM; setsid sleep 1000 & `+f.ready+` while true; do sleep 1000; done`))
			f.awaitReady(t)
			below := livingBelow(t, h.PID)
			killParent(t, h)
			wantAlive(t, d, h, true)
			end(h)
			wantDead(t, below)
			if exit := wait(t, d, h); exit.Err == "" || exit.Code != -1 {
				t.Errorf("%s: %+v", name, exit)
			}
		}
	})
}

// A killed process may hold files until it has exited. Before, the kernel has freed its memory, and its environment
// with that.
func TestKilledProcessesHaveExited(t *testing.T) {
	const size = 256 << 20
	var last int
	for _, command := range [][]string{
		{"sleep", "1000"}, {"dd", "if=/dev/zero", "of=/dev/null", fmt.Sprint("bs=", size), "count=1000000"},
	} {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Env = []string{taskEnv + "=big"}
		must(t, cmd.Start())
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		last = cmd.Process.Pid
	}
	must(t, poll(t.Context(), time.Millisecond, func() (bool, error) {
		var total, resident int
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", last))
		_, _ = fmt.Sscan(string(text), &total, &resident)
		return resident*os.Getpagesize() > size/10*9, err
	}))
	s, err := proc.ReadStat(last)
	must(t, err)
	must(t, Handle{ID: "big"}.killRemaining(t.Context(), 0))
	if processOf(s).alive() {
		t.Error("the process has not exited yet")
	}
}

// The environment of a process reads as empty while the process is in execve.
func TestProcessInExecveBelongsToItsTask(t *testing.T) {
	const again = `exec /bin/sh -c "$again"`
	cmd := exec.Command("/bin/sh", "-c", again)
	cmd.Env = []string{"again=" + again, taskEnv + "=x"}
	must(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for n := range 2000 {
		if !hasTaskID(cmd.Process.Pid, "x") {
			t.Fatalf("missed at attempt %d", n)
		}
	}
}

func TestRecycledPidsAreNotTouched(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		h := start(t, d, shell(t, `exit 4`))
		wait(t, d, h)
		p := startAfter(t, h.StartTime)
		other := h
		other.PID, other.TaskPID, other.Dir = p.pid, p.pid, mkdir(t, tempDir(t), "other")
		wantAlive(t, d, other, false)
		must(t, d.Stop(t.Context(), other, 0))
		if exit := wait(t, d, other); exit.Err == "" {
			t.Errorf("%+v", exit)
		}
		if !isLiving(p.pid) {
			t.Error("an unrelated process was killed")
		}
		other.StartTime = p.start // the control: this is the process
		wantAlive(t, d, other, true)
		other.Boot = "another boot"
		wantAlive(t, d, other, false)
	})
}

// startAfter starts a process with a later start time. Start times count in hundredths of a second.
func startAfter(t *testing.T, start uint64) process {
	t.Helper()
	for {
		cmd := exec.Command("sleep", "1000")
		must(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		s, err := proc.ReadStat(cmd.Process.Pid)
		must(t, err)
		if s.Start != start {
			return processOf(s)
		}
	}
}

func TestOneTaskPerDirectory(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		f := newFifos(t)
		task := shell(t, `echo first; `+f.ready+f.wait)
		h := start(t, d, task)
		f.awaitReady(t)
		task.ID, task.Args = task.ID+"-2", []string{"-c", "echo second; exit 5"}
		if _, err := d.Start(t.Context(), task); !errors.Is(err, registry.ErrConflict) {
			t.Errorf("a second start: %v", err)
		}
		f.release(t)
		wait(t, d, h)
		second := start(t, d, task)
		if exit := wait(t, d, second); exit.Code != 5 {
			t.Errorf("%+v", exit)
		}
		wantLines(t, logs(t, d, second, Stdout), "first", "second")
		if exit := wait(t, d, h); exit.Err == "" {
			t.Errorf("the record of the first exit was replaced, but is %+v", exit)
		}
		if exit := wait(t, d, second); exit.Code != 5 {
			t.Errorf("waiting for the first attempt changed the exit of the second: %+v", exit)
		}
	})
}

func TestNothingIsLeakedOverManyTasks(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		cycle := func() {
			h, err := d.Start(t.Context(), shell(t, `sleep 1000 & exit 0`))
			must(t, err)
			wait(t, d, h)
			wantNothingLeft(t, h.ID)
		}
		count := func() (fds, processes int) {
			entries, err := os.ReadDir("/proc/self/fd")
			must(t, err)
			return len(entries), len(children(t))
		}
		cycle()
		fds, processes := count()
		for range 10 {
			cycle()
		}
		if f, p := count(); f > fds || p != processes {
			t.Errorf("descriptors %d, were %d; children %d, were %d", f, fds, p, processes)
		}
	})
}

func TestParentsAreFoundWithoutTheirDirectories(t *testing.T) {
	d, f := NewRawExec(), newFifos(t)
	task := shell(t, f.ready+f.wait)
	h := start(t, d, task)
	f.awaitReady(t)
	wantParents := func(dir string, want ...Parent) {
		t.Helper()
		if got, err := Parents(dir); err != nil || !slices.Equal(got, want) {
			t.Errorf("%+v: %v, want %+v", got, err, want)
		}
	}
	must(t, os.Rename(task.Dir, task.Dir+"-away"))
	wantParents(filepath.Dir(task.Dir), Parent{PID: h.PID, ID: task.ID, Dir: task.Dir})
	wantParents(t.TempDir())
	must(t, os.Rename(task.Dir+"-away", task.Dir))
	f.release(t)
	wait(t, d, h)
	wantParents(filepath.Dir(task.Dir))
}

// A power cut may leave the space of an unsynced record, without its content.
func TestBlankRecordIsNone(t *testing.T) {
	dir := t.TempDir()
	for _, content := range []string{"", strings.Repeat(" ", reserveSize), strings.Repeat("\x00", 100)} {
		if err := os.WriteFile(filepath.Join(dir, handleFile), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if h, found, err := Find(t.Context(), dir); found || err != nil {
			t.Errorf("%d blank bytes: found %t, %+v, %v", len(content), found, h, err)
		}
	}
}

// A power cut may leave the record of an exit, which is synced, without the handle, which is not synced.
func TestExitWithoutItsHandleIsFound(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		h := start(t, d, shell(t, "exit 3"))
		want := wait(t, d, h)
		must(t, os.Remove(filepath.Join(h.Dir, handleFile)))
		lost, found, err := Find(t.Context(), h.Dir)
		if err != nil || !found || lost.ID != h.ID || lost.Driver != d.Name() {
			t.Fatalf("Find = %+v, %t, %v", lost, found, err)
		}
		wantAlive(t, d, lost, false)
		if exit := wait(t, d, lost); exit != want || exit.Code != 3 {
			t.Errorf("%+v, want %+v", exit, want)
		}
	})
}
