package taskdriver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// execution is a task in which commands run.
type execution struct {
	driver Driver
	task   Handle
}

// command runs a command in a task, and returns its output.
func (e execution) command(t *testing.T, args ...string) string {
	t.Helper()
	var out, errs strings.Builder
	code, err := e.driver.(Executor).Exec(t.Context(), e.task,
		ExecOptions{Command: args, Stdin: io.NopCloser(strings.NewReader("")), Stdout: &out, Stderr: &errs})
	if code != 0 || err != nil {
		t.Errorf("%q: exit code %d, %v\n%s", args, code, err, &errs)
	}
	return out.String()
}

// sleep starts a command that runs until it is killed. ended gets the error of Exec.
func (e execution) sleep(t *testing.T, ctx context.Context) (pid, helper int, ended <-chan error) {
	t.Helper()
	out, in, err := os.Pipe()
	must(t, err)
	defer out.Close()
	returned := make(chan error, 1)
	go func() {
		defer in.Close()
		_, err := e.driver.(Executor).Exec(ctx, e.task, ExecOptions{
			Command: []string{"sh", "-c", "echo $$ $PPID; exec sleep 1000 >/dev/null"},
			Stdin:   io.NopCloser(strings.NewReader("")), Stdout: in, Stderr: os.Stderr})
		returned <- err
	}()
	_, err = fmt.Fscan(out, &pid, &helper)
	must(t, err)
	return pid, helper, returned
}

// If the helper process of a command was killed, no process knows the command. The command ends with its task, even if
// it is not in the task's cgroup.
func TestCommandOfAKilledHelperEndsWithItsTask(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		h := start(t, d, shell(t, `exec sleep 1000`))
		bare := h
		bare.Cgroups = nil
		pid, helper, ended := execution{d, bare}.sleep(t, t.Context())
		must(t, unix.Kill(helper, unix.SIGKILL))
		if err := <-ended; err == nil ||
			!strings.Contains(err.Error(), "the helper process of the command was killed") {
			t.Error(err)
		}
		if !isLiving(pid) {
			t.Error("the command has ended with its helper")
		}
		must(t, unix.Kill(h.TaskPID, unix.SIGKILL))
		wait(t, d, h)
		wantDead(t, []int{pid})
	})
}

func TestWaitOutlastsTheHelpersOfCommands(t *testing.T) {
	d := NewRawExec()
	h := start(t, d, shell(t, `exit 0`))
	wait(t, d, h)
	helper, err := lockExec(h.Dir)
	must(t, err)
	defer helper.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if exit, err := d.Wait(ctx, h); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait with a helper process: %+v, %v", exit, err)
	}
	helper.Close()
	wait(t, d, h)
}

func TestExecReturnsThoughItsHelperHangs(t *testing.T) {
	d := NewRawExec()
	h := start(t, d, shell(t, `exec sleep 1000`))
	ctx, cancel := context.WithCancelCause(t.Context())
	_, helper, ended := execution{d, h}.sleep(t, ctx)
	must(t, unix.Kill(helper, unix.SIGSTOP))
	why := errors.New("why")
	cancel(why)
	if err := <-ended; !errors.Is(err, why) {
		t.Error(err)
	}
	must(t, unix.Kill(helper, unix.SIGCONT)) // stopAtEnd then waits for it
}

// A command runs as the user with which its task was started, and not as that of a setuid program that the task runs.
func TestCommandHasTheUserAndRootOfItsTask(t *testing.T) {
	if os.Getuid() != 0 || os.Getenv(roleEnv) == userNSRole {
		t.Skip("only root can change groups")
	}
	d, f := NewRawExec(), newFifos(t)
	h := start(t, d, shell(t, `exec setpriv --groups 5,6 --euid 65534 sh -pc 'echo >&3; exec 3>&-; sleep 1000' 3>`+
		f.dir+`/ready`))
	f.awaitReady(t)
	wantLines(t, execution{d, h}.command(t, "sh", "-pc", "id -ru; id -u; id -G"), "0", "0", "0 5 6")

	h = start(t, d, shell(t, `cp "$(command -v busybox)" .
		exec chroot . /busybox sh -c 'echo >&3; exec 3>&-; exec /busybox sleep 1000' 3>`+f.dir+`/ready`))
	f.awaitReady(t)
	wantLines(t, execution{d, h}.command(t, "/busybox", "ls", "/"), "busybox")
}
