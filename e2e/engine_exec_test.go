package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"holdfast/host/agent/taskdriver"
	"holdfast/internal/proc"
)

// exec runs commands in a container: with its volume, with a terminal, and one that ends with its client.
func (e *engineEnv) exec() {
	e.t.Helper()
	run := func(ctx context.Context, term string, events chan taskdriver.ExecEvent, script string) (
		code int, stdout, stderr string, err error) {
		var out, errs bytes.Buffer
		code, err = e.client.Exec(ctx, e.alloc("writer").ID, "use", taskdriver.ExecOptions{
			Command: []string{"sh", "-c", script}, Term: term, Events: events,
			Stdin: io.NopCloser(strings.NewReader("typed\n")), Stdout: &out, Stderr: &errs})
		return code, out.String(), errs.String(), err
	}
	code, out, errs, err := run(e.ctx(), "", nil, "head -n 1 /data/lines; cat; echo oops >&2; exit 7")
	if err != nil || code != 7 || out != "line\ntyped\n" || errs != "oops\n" {
		e.t.Errorf("exit code %d, %q, %q, %v", code, out, errs, err)
	}
	events := make(chan taskdriver.ExecEvent, 1)
	events <- taskdriver.ExecEvent{Rows: 33, Cols: 101}
	code, out, _, err = run(e.ctx(), "xterm", events, "until stty size | grep '33 101'; do sleep 0.1; done; "+
		"tty; echo $TERM")
	if err != nil || !strings.Contains(out, "33 101\r\n/dev/pts/") || !strings.Contains(out, "\r\nxterm\r\n") {
		e.t.Errorf("with a terminal: exit code %d, %q, %v", code, out, err)
	}
	seconds := map[string]string{"docker": "1115", "podman": "1116"}[e.engine.Name] // both are tested at the same time
	for delay := range 8 {
		ctx, cancel := context.WithCancel(e.ctx())
		left := make(chan error, 1)
		go func() {
			_, _, _, err := run(ctx, "", nil, "exec sleep "+seconds)
			left <- err
		}()
		if delay == 0 {
			e.waitUntil("the command runs", func() bool { return sleeps(seconds) })
		}
		time.Sleep(time.Duration(delay) * 20 * time.Millisecond) // the engine may be about to start it
		cancel()
		if err := <-left; err == nil {
			e.t.Error("the client has not left")
		}
	}
	e.waitUntil("the commands are killed", func() bool { return !sleeps(seconds) })
}

func sleeps(seconds string) bool {
	pids, _ := proc.PIDs()
	for _, pid := range pids {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if string(command) == "sleep\x00"+seconds+"\x00" {
			return true
		}
	}
	return false
}
