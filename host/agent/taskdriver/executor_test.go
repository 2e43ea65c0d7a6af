package taskdriver

import (
	"io"
	"os"
	"strings"
	"testing"
)

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

// execution is a place for commands.
type execution struct {
	driver Driver
	task   Handle
}

// A command has the user that its task was started with, rather than that of a setuid program that it runs.
func TestCommandHasTheUserAndRootOfItsTask(t *testing.T) {
	if os.Getuid() != 0 || os.Getenv(roleEnv) == userNSRole {
		t.Skip("only root can change groups")
	}
	d, f := NewRawExec(), newFifos(t)
	h := start(t, d, shell(t, `exec setpriv --groups 5,6 --euid 65534 sh -pc 'echo >&3; exec 3>&-; sleep 1000' 3>`+
		f.dir+`/ready`))
	f.awaitReady(t)
	wantLines(t, execution{d, h}.command(t, "sh", "-pc", "id -ru; id -u; id -G"), "0", "0", "0 5 6")

	h = start(t, d, shell(t, `cp "$(command -v busybox)" .; exec chroot . /busybox sh -c 'echo >&3; exec 3>&-; exec /busybox sleep 1000' 3>`+
		f.dir+`/ready`))
	f.awaitReady(t)
	wantLines(t, execution{d, h}.command(t, "/busybox", "ls", "/"), "busybox")
}
