package launch_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

// patience bounds waits for what should happen at once.
const patience = 20 * time.Second

// shared is a store with this test binary in it, for all tests.
var shared struct {
	store  *launch.Store
	dir    string // of the store; nobody adds to it after the tests have begun
	digest launch.Digest
	self   string
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	shared.dir = dir
	if shared.self, err = os.Executable(); err != nil {
		panic(err)
	}
	if shared.store, err = launch.OpenStore(dir); err != nil {
		panic(err)
	}
	defer shared.store.Close()
	if shared.digest, err = shared.store.Add(context.Background(), shared.self, "", ""); err != nil {
		panic(err)
	}
	return m.Run()
}

// log is a logger whose lines a test reads.
type log struct {
	hclog.Logger
	gate chan struct{} // closed: lines are taken
	mu   sync.Mutex
	buf  bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	if l.gate != nil {
		<-l.gate
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *log) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// has reports whether the log has a text, without a copy of it.
func (l *log) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Contains(l.buf.Bytes(), []byte(text))
}

func newLog() *log {
	l := &log{}
	l.Logger = hclog.New(&hclog.LoggerOptions{Output: l, Level: hclog.Debug, JSONFormat: true})
	return l
}

func shortDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func options(t testing.TB, mode string) launch.Options {
	return launch.Options{
		Store: shared.store, Digest: shared.digest, RunDir: shortDir(t), Generation: 7,
		Env:          []string{shimMode + "=" + mode},
		StartTimeout: patience,
	}
}

func start(t testing.TB, opts launch.Options) *launch.Process {
	t.Helper()
	p, err := launch.Start(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(t, p) })
	return p
}

func kill(t testing.TB, p *launch.Process) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	if err := p.Kill(ctx); err != nil {
		t.Error(err)
	}
}

// startScript starts a shell script as a shim. Scripts can do what a shim that calls Serve cannot.
func startScript(t *testing.T, timeout time.Duration, lines ...string) (launch.Options, error) {
	t.Helper()
	dir := shortDir(t)
	path := filepath.Join(dir, "shim.sh")
	writeFile(t, path, "#!/bin/sh\n"+strings.Join(lines, "\n")+"\n", 0o755)
	store, err := launch.OpenStore(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	digest, err := store.Add(t.Context(), path, "", "")
	if err != nil {
		t.Fatal(err)
	}
	opts := launch.Options{Store: store, Digest: digest, RunDir: filepath.Join(dir, "run"), StartTimeout: timeout}
	p, err := launch.Start(t.Context(), opts)
	if err == nil {
		kill(t, p)
		t.Fatal("the script was taken for a shim")
	}
	checkEmpty(t, opts.RunDir)
	return opts, err
}

func writeFile(t testing.TB, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil { // whatever the umask
		t.Fatal(err)
	}
}

func checkEmpty(t testing.TB, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != 0 {
		t.Errorf("left in %s: %v", dir, left)
	}
}

func checkText(t testing.TB, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not say %q:\n%v", part, err)
		}
	}
}

func checkKind(t testing.TB, err, kind error) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("the error is not of kind %q: %v", kind, err)
	}
}

// alive asks the kernel. A zombie is dead.
func alive(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := bytes.Cut(text, []byte(") "))
	return len(rest) > 0 && rest[0] != 'Z' && rest[0] != 'X'
}

// awaitDeath waits for the death of a process that is not our child.
func awaitDeath(t testing.TB, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(poll, int(patience.Milliseconds()))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n != 1 {
			t.Fatalf("process %d lives on (%v)", pid, err)
		}
		return
	}
}

func awaitDone(t testing.TB, p *launch.Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Fatalf("the death of shim %d was not noticed", p.PID())
	}
}

func TestStartAnswersAndKillLeavesNothing(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	if got, err := ask(t.Context(), p.Conn(), "echo hello"); err != nil || got != "hello" {
		t.Fatalf("the shim answered %q, %v", got, err)
	}
	if p.Err() != nil || !alive(p.PID()) {
		t.Errorf("err %v, alive %v", p.Err(), alive(p.PID()))
	}
	if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.PID())); string(name) != "holdfast-shim\n" {
		t.Errorf("ps shows the shim as %q", name)
	}
	kill(t, p)
	if alive(p.PID()) {
		t.Error("the shim lives after Kill")
	}
	exit, ok := errors.AsType[*launch.Exit](p.Err())
	if !ok || exit.Signal != syscall.SIGKILL || !exit.Asked {
		t.Errorf("the exit is %v", p.Err())
	}
	checkEmpty(t, opts.RunDir)
	if _, err := ask(t.Context(), p.Conn(), "echo"); err == nil {
		t.Error("a dead shim answered")
	}
}

func TestStopIsGraceful(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	if err := p.Stop(t.Context(), patience); err != nil {
		t.Fatal(err)
	}
	exit, ok := errors.AsType[*launch.Exit](p.Err())
	if !ok || exit.Signal != 0 || exit.Code != 0 {
		t.Errorf("the shim did not end by itself: %v", p.Err())
	}
	checkEmpty(t, opts.RunDir)
}

func TestStopKillsAfterGrace(t *testing.T) {
	t.Parallel()
	p := start(t, options(t, "plain"))
	freeze(t, p.PID())
	if err := p.Stop(t.Context(), time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if exit, _ := errors.AsType[*launch.Exit](p.Err()); exit == nil || exit.Signal != syscall.SIGKILL {
		t.Errorf("the exit is %v", p.Err())
	}
}

// A shim whose own work hangs ends within its grace when its life pipe ends.
func TestStubbornWorkDoesNotKeepAShim(t *testing.T) {
	t.Parallel()
	p := start(t, options(t, "stubborn"))
	if err := p.Stop(t.Context(), patience); err != nil {
		t.Fatal(err)
	}
	exit, _ := errors.AsType[*launch.Exit](p.Err())
	if exit == nil || exit.Signal != 0 || exit.Code != 1 {
		t.Errorf("the exit is %v", p.Err())
	}
	if lines := strings.Join(p.LastLines(), "\n"); !strings.Contains(lines, "did not end in time") {
		t.Errorf("the shim did not say why: %s", lines)
	}
}

func TestMessageLimits(t *testing.T) {
	t.Parallel()
	p := start(t, options(t, "plain"))
	big := strings.Repeat("b", 5<<20) // more than grpc's default of 4 MiB
	if got, err := ask(t.Context(), p.Conn(), "size "+big); err != nil || got != strconv.Itoa(len(big)) {
		t.Errorf("5 MiB: %q, %v", got, err)
	}
	if got, err := ask(t.Context(), p.Conn(), "echo "+big); err != nil || len(got) != len(big) {
		t.Errorf("5 MiB back: %d bytes, %v", len(got), err)
	}
	if _, err := ask(t.Context(), p.Conn(), "size "+strings.Repeat("b", bootstrap.MaxMessage)); err == nil {
		t.Error("a message over the limit was taken")
	}
}

func TestShimHasNoTerminal(t *testing.T) {
	t.Parallel()
	p := start(t, options(t, "plain"))
	if got, err := ask(t.Context(), p.Conn(), "stdin"); err != nil || got != "0 bytes" {
		t.Errorf("stdin: %q, %v", got, err)
	}
	if sid, err := unix.Getsid(p.PID()); err != nil || sid != p.PID() {
		t.Errorf("session %d of shim %d, %v", sid, p.PID(), err)
	}
}

func TestStartErrorsOfOptions(t *testing.T) {
	t.Parallel()
	long := options(t, "plain")
	long.RunDir = filepath.Join(long.RunDir, strings.Repeat("d", 80))
	relative := options(t, "plain")
	relative.RunDir = "run"
	unknown := options(t, "plain")
	unknown.Digest = launch.Digest{SHA256: strings.Repeat("0", 64)}
	protocol := options(t, "plain")
	protocol.Env = []string{"PLUGIN_CLIENT_CERT="}
	for _, c := range []struct {
		opts launch.Options
		kind error
		text string
	}{
		{long, registry.ErrInvalid, "the kernel takes 107: choose a run directory that is"},
		{relative, registry.ErrInvalid, "not an absolute path"},
		{unknown, registry.ErrNotFound, "add its binary first"},
		{protocol, registry.ErrInvalid, "is reserved"},
	} {
		_, err := launch.Start(t.Context(), c.opts)
		checkText(t, err, c.text)
		checkKind(t, err, c.kind)
	}
}

func TestStartEndsWithItsContext(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the operator changed their mind"))
	_, err := launch.Start(ctx, opts)
	checkText(t, err, "changed their mind")
}

// hostMain is a host that gets killed: it starts a shim, prints its pid, and waits.
func hostMain() {
	var opts launch.Options
	var dirs [2]string
	if err := json.Unmarshal([]byte(os.Getenv("LAUNCH_TEST_DIRS")), &dirs); err != nil {
		panic(err)
	}
	store, err := launch.OpenStore(dirs[0])
	if err != nil {
		panic(err)
	}
	opts = launch.Options{
		Store: store, Digest: launch.Digest{SHA256: os.Getenv("LAUNCH_TEST_DIGEST")}, RunDir: dirs[1],
		Env: []string{
			shimMode + "=" + os.Getenv("LAUNCH_TEST_SHIM"),
			livesFile + "=" + os.Getenv(livesFile),
		}, StartTimeout: patience,
	}
	p, err := launch.Start(context.Background(), opts)
	if err != nil {
		panic(err)
	}
	fmt.Println(p.PID())
	select {}
}

// killedHost runs a host with a shim, kills the host, and returns the shim's pid.
func killedHost(t *testing.T, store, runDir, shim string) int {
	t.Helper()
	return runHost(t, hostCommand(store, runDir, shim))
}

func hostCommand(store, runDir, shim string) *exec.Cmd {
	dirs, _ := json.Marshal([2]string{store, runDir})
	cmd := exec.Command(shared.self)
	cmd.Env = append(os.Environ(), shimMode+"=host", "LAUNCH_TEST_SHIM="+shim, "LAUNCH_TEST_DIRS="+string(dirs),
		"LAUNCH_TEST_DIGEST="+shared.digest.SHA256)
	cmd.Stderr = os.Stderr
	return cmd
}

// runHost runs a host until it has a shim, kills it, and returns the shim's pid.
func runHost(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	cmd.Process.Kill()
	cmd.Wait()
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func freeze(t testing.TB, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for { // the signal is sent, the state follows
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(text, []byte(") T ")) {
			return
		}
	}
}
