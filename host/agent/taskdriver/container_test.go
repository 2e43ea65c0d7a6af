package taskdriver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
			for script, want := range map[string]Exit{"exit 0": {}, "exit 7": {Code: 7}, "exit 137": {Code: 137, Signal: 9}} {
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
		t.Run("logs", func(t *testing.T) { checkContainerLogs(t, d) })
		t.Run("stop", func(t *testing.T) {
			h := startContainer(t, d, boxed(t, d, `trap 'echo stopped; exit 3' TERM; echo ready; while :; do sleep 0.1; done`))
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

// checkContainerPlan checks each operation of a plan: a mount that the task makes reaches the host, and one of the host
// reaches the task.
func checkContainerPlan(t *testing.T, d Container) {
	both, down, file := sharedDir(t), sharedDir(t), filepath.Join(tempDir(t), "file")
	must(t, os.WriteFile(file, []byte("of the host"), 0o600))
	task := boxed(t, d, `cat /a/file; echo; ls -d /made/by/plan; echo $OWN $GIVEN; echo x > /a/file && exit 9
		mkdir /both/m; mount -t tmpfs none /both/m; echo x > /both/m/x; echo ready; sleep 1000`,
		`"cap_add":["SYS_ADMIN"],"security_opt":["seccomp=unconfined","apparmor=unconfined"]`)
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
	if got := output(t, d, h, Stdout); got != "of the host\n/made/by/plan\nmine a b\nready\n" {
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

// checkContainerLogs checks that the output of two attempts stays, in order, after the containers have gone.
func checkContainerLogs(t *testing.T, d Container) {
	task := boxed(t, d, `echo out $0; echo err >&2`)
	h := startContainer(t, d, task)
	wait(t, d, h)
	task.ID += "-2"
	h = startContainer(t, d, task)
	wait(t, d, h)
	if out, errs := output(t, d, h, Stdout), output(t, d, h, Stderr); out != "out sh\nout sh\n" || errs != "err\nerr\n" {
		t.Errorf("stdout %q, stderr %q", out, errs)
	}
}

// A container outlives the agent and the engine's daemon, and what follows is noticed.
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
		wantAlive(t, d, found, true) // nobody knows: its volumes must stay
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
			"no such program": {func(task *Task) { task.container.Command = commandLine{"/no/program"} }, nil, "/no/program"},
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
