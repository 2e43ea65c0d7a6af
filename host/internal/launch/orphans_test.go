package launch_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// A shim that has the state and ignores the end of its host, or is stopped, is ended by the next host. A healthy one
// ends by itself. Other shims are left alone.
func TestOrphansAreEnded(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode   string
		frozen bool
		says   string
	}{
		"ignores": {"ignores", false, `"state":"`},
		"frozen":  {"ignores", true, `"state":"T"`},
		"healthy": {"locks", false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := shortDir(t)
			database := filepath.Join(dir, "database")
			other := start(t, options(t, "locks", filepath.Join(dir, "another")))
			freeze(t, other.PID())
			pid := killedHost(t, hostCommand(shared.dir, dir, c.mode, database))
			if c.frozen {
				freeze(t, pid)
			}
			log := newLog()
			must(t, launch.EndOrphans(t.Context(), database, log))
			if alive(pid) || !alive(other.PID()) {
				t.Errorf("alive: the orphan %t, the shim with another state %t", alive(pid), alive(other.PID()))
			}
			if text := log.text(); c.says != "" && !strings.Contains(text, fmt.Sprintf(`"pid":%d,%s`, pid, c.says)) {
				t.Errorf("the log says %q", text)
			}
		})
	}
}

// daemonIn returns the pid in a file, of a process that has to outlive its shim.
func daemonIn(t *testing.T, file string) int {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	return daemonOf(t, string(text))
}

func pidOf(t *testing.T, text string) int {
	t.Helper()
	pid, err := strconv.Atoi(strings.TrimSpace(text))
	must(t, err)
	return pid
}

func daemonOf(t *testing.T, text string) int {
	t.Helper()
	pid := pidOf(t, text)
	t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGKILL) })
	if !alive(pid) {
		t.Fatal("the daemon was to outlive the shim: this test has proved nothing")
	}
	return pid
}

// The error names the process and tells what to do. A program that is no shim is left to the error of the next shim.
func TestOrphanThatMayNotBeEnded(t *testing.T) {
	t.Parallel()
	needsRoot(t)
	dir := shortDir(t)
	must(t, os.Chmod(dir, 0o755))
	database, other := filepath.Join(dir, "database"), filepath.Join(dir, "other")
	writeFile(t, other, "", 0o644)
	cmd := exec.Command("flock", "--no-fork", other, "sleep", "1000")
	must(t, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	await(t, "the file is locked", func() bool { return len(proc.FlockHolders(other)) > 0 })
	must(t, launch.EndOrphans(t.Context(), other, newLog()))
	p := start(t, options(t, "locks", database))
	freeze(t, p.PID())
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		const nobody = 65534
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			done <- errno
			return
		}
		done <- launch.EndOrphans(t.Context(), database, newLog())
	}()
	checkError(t, <-done, registry.ErrDenied, fmt.Sprintf("shim %d", p.PID()), fmt.Sprintf("kill -9 %d", p.PID()))
}

func needsRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("this test needs root")
	}
}
