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
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/registry"
)

// ownStore returns a store from which only this test's shims are executed.
func ownStore(t *testing.T) (*launch.Store, string, launch.Digest) {
	t.Helper()
	store, dir := openStore(t)
	digest, err := store.Add(t.Context(), shared.self, shared.digest.SHA256, "")
	if err != nil {
		t.Fatal(err)
	}
	return store, dir, digest
}

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
			store, dir, _ := ownStore(t)
			pid := killedHost(t, dir, shortDir(t), c.mode)
			if c.frozen {
				freeze(t, pid)
			}
			text := endOrphans(t, store, filepath.Join(dir, "none"))
			if alive(pid) {
				t.Errorf("shim %d lives", pid)
			}
			if c.says == "" && text != "" ||
				c.says != "" && !strings.Contains(text, fmt.Sprintf(`"pid":%d,%s`, pid, c.says)) {
				t.Errorf("the log says %q", text)
			}
		})
	}
}

// A process that a shim has left is ended by the next host if it executes the shim's binary.
func TestDaemonOfAnOrphanIsEnded(t *testing.T) {
	t.Parallel()
	store, dir, _ := ownStore(t)
	cmd, note := hostCommand(dir, shortDir(t), "leaves"), filepath.Join(dir, "pid")
	cmd.Env = append(cmd.Env, livesFile+"="+note)
	awaitDeath(t, runHost(t, cmd))
	text, err := os.ReadFile(note)
	if err != nil {
		t.Fatal(err)
	}
	daemon, _ := strconv.Atoi(string(text))
	if !alive(daemon) {
		t.Fatal("the daemon was to outlive the shim: this test has proved nothing")
	}
	defer unix.Kill(daemon, unix.SIGKILL)
	if text := endOrphans(t, store, filepath.Join(dir, "none")); !strings.Contains(text,
		fmt.Sprintf(`"pid":%d`, daemon)) {
		t.Errorf("the log says %q", text)
	}
	if alive(daemon) {
		t.Error("the daemon lives")
	}
}

// If its binary is not in the store any more, a shim is recognised by the open state. Without that it does no harm.
func TestOrphanOfALostBinary(t *testing.T) {
	t.Parallel()
	store, dir, digest := ownStore(t)
	database := filepath.Join(dir, "database")
	opts := options(t, "ignores")
	opts.Store, opts.Digest, opts.Env = store, digest, append(opts.Env, livesFile+"="+database)
	has := start(t, opts)
	opts.Env[1] = livesFile + "=" + filepath.Join(shortDir(t), "database")
	other := start(t, opts)
	for _, p := range []*launch.Process{has, other} {
		freeze(t, p.PID())
	}
	if err := os.Remove(filepath.Join(dir, digest.SHA256)); err != nil {
		t.Fatal(err)
	}
	endOrphans(t, store, database)
	if alive(has.PID()) || !alive(other.PID()) {
		t.Errorf("who has the state lives: %t; who has another: %t", alive(has.PID()), alive(other.PID()))
	}
}

// Neither a shim of another store with the same binary is ended, nor a stored binary that a person executes.
func TestOthersAreNoOrphans(t *testing.T) {
	t.Parallel()
	store, dir, digest := ownStore(t)
	stranger := start(t, options(t, "plain"))
	freeze(t, stranger.PID())
	cmd := exec.Command(filepath.Join(dir, digest.SHA256))
	cmd.Env = []string{shimMode + "=by hand"}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	freeze(t, cmd.Process.Pid)
	if text := endOrphans(t, store, filepath.Join(dir, "none")); text != "" {
		t.Errorf("the log says %q", text)
	}
	if !alive(stranger.PID()) || !alive(cmd.Process.Pid) {
		t.Error("others were ended")
	}
}

// The error names the process and tells what to do.
func TestOrphanThatMayNotBeEnded(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("to be another user needs root")
	}
	store, dir := openStore(t)
	database := filepath.Join(filepath.Dir(dir), "database")
	writeFile(t, database, "", 0o644)
	os.Chmod(filepath.Dir(dir), 0o755)
	cmd := exec.Command("flock", "--no-fork", database, "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	locked := fmt.Sprintf(" WRITE %d ", cmd.Process.Pid)
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if text, _ := os.ReadFile("/proc/locks"); strings.Contains(string(text), locked) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the file is not locked")
		}
	}
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
	err := <-done
	checkText(t, err, fmt.Sprintf("process %d", cmd.Process.Pid), fmt.Sprintf("kill -9 %d", cmd.Process.Pid))
	checkKind(t, err, registry.ErrDenied)
}
