package launch_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/internal/proc"
	"holdfast/registry"
)

func endOrphans(t *testing.T, store *launch.Store, database string) string {
	t.Helper()
	log := newLog()
	if err := store.EndOrphans(t.Context(), database, log); err != nil {
		t.Error(err)
	}
	return log.text()
}

// A shim that ignores the end of its host, or is stopped, is ended by the next host. A healthy one ends by itself.
func TestOrphansAreEnded(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode   string
		frozen bool
		says   string
	}{
		"ignores": {"ignores", false, `"stopped":false`},
		"frozen":  {"ignores", true, `"stopped":true`},
		"healthy": {"plain", false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			opts, dir := stored(t, shared.self)
			none := filepath.Join(dir, "none")
			pid := killedHost(t, hostCommand(dir, opts.RunDir, c.mode, none))
			if c.frozen {
				freeze(t, pid)
			}
			text := endOrphans(t, opts.Store, none)
			if alive(pid) {
				t.Errorf("shim %d lives", pid)
			}
			if c.says != "" && !strings.Contains(text, fmt.Sprintf(`"pid":%d,%s`, pid, c.says)) {
				t.Errorf("the log says %q", text)
			}
		})
	}
}

// A process that a shim has left is ended by the next host if it executes the shim's binary.
func TestDaemonOfAnOrphanIsEnded(t *testing.T) {
	t.Parallel()
	opts, dir := stored(t, shared.self)
	note := filepath.Join(dir, "pid")
	awaitDeath(t, killedHost(t, hostCommand(dir, opts.RunDir, "leaves", note)))
	daemon := daemonIn(t, note)
	if text := endOrphans(t, opts.Store, filepath.Join(dir, "none")); alive(daemon) ||
		!strings.Contains(text, fmt.Sprintf(`"pid":%d`, daemon)) {
		t.Errorf("it lives: %t; the log says %q", alive(daemon), text)
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

// If its binary is not in the store any more, a shim is recognised by the open database. A shim that has another
// database open does no harm, and lives on.
func TestOrphanOfALostBinary(t *testing.T) {
	t.Parallel()
	opts, dir := stored(t, shared.self)
	database := filepath.Join(dir, "database")
	opts.Args = []string{"ignores", database}
	has := start(t, opts)
	opts.Args = []string{"ignores", filepath.Join(shortDir(t), "database")}
	other := start(t, opts)
	for _, p := range []*launch.Process{has, other} {
		freeze(t, p.PID())
	}
	must(t, os.Remove(filepath.Join(dir, opts.Digest.SHA256)))
	endOrphans(t, opts.Store, database)
	if alive(has.PID()) || !alive(other.PID()) {
		t.Errorf("alive: with the state %t, with another %t", alive(has.PID()), alive(other.PID()))
	}
}

// Neither a shim of another store with the same binary is ended, nor a stored binary that a person executes.
func TestOtherProcessesAreNoOrphans(t *testing.T) {
	t.Parallel()
	opts, dir := stored(t, shared.self)
	stranger := start(t, options(t, "plain"))
	freeze(t, stranger.PID())
	cmd := exec.Command(filepath.Join(dir, opts.Digest.SHA256), "by hand")
	must(t, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	freeze(t, cmd.Process.Pid)
	if text := endOrphans(t, opts.Store, filepath.Join(dir, "none")); text != "" {
		t.Errorf("the log says %q", text)
	}
	if !alive(stranger.PID()) || !alive(cmd.Process.Pid) {
		t.Error("others were ended")
	}
}

// The error names the process and tells what to do.
func TestOrphanThatMayNotBeEnded(t *testing.T) {
	t.Parallel()
	needsRoot(t)
	store, dir := openStore(t)
	database := filepath.Join(filepath.Dir(dir), "database")
	writeFile(t, database, "", 0o644)
	must(t, os.Chmod(filepath.Dir(dir), 0o755))
	cmd := exec.Command("flock", "--no-fork", database, "sleep", "1000")
	must(t, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	await(t, "the file is locked", func() bool {
		return slices.Contains(proc.FlockHolders(database), cmd.Process.Pid)
	})
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		const nobody = 65534
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			done <- errno
			return
		}
		done <- store.EndOrphans(t.Context(), database, newLog())
	}()
	checkError(t, <-done, registry.ErrDenied, fmt.Sprintf("process %d", cmd.Process.Pid),
		fmt.Sprintf("kill -9 %d", cmd.Process.Pid))
}

func needsRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("this test needs root")
	}
}
