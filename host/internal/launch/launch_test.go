package launch_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/internal/proc"
	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

// patience bounds waits for what should happen at once. No test measures it.
const patience = time.Minute

// shared is a store with this test binary in it, for all tests. No test adds to it.
var shared struct {
	store  *launch.Store
	dir    string
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
	if shared.digest, err = shared.store.Add(context.Background(), shared.self, "", ""); err != nil {
		panic(err)
	}
	return m.Run()
}

// log is a logger whose lines a test reads.
type log struct {
	hclog.Logger
	gate chan struct{} // closed: the log takes lines
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

// has reports whether the log has a text. It does not copy the log.
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

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func shortDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// options returns options for a shim of a mode (shimMain). Its log is dropped.
func options(t testing.TB, mode ...string) launch.Options {
	return launch.Options{
		Store: shared.store, Digest: shared.digest, RunDir: shortDir(t), Generation: 7, Args: mode,
		StartTimeout: patience, Logger: hclog.NewNullLogger(),
	}
}

// logged is options with a log to read.
func logged(t testing.TB, mode string) (launch.Options, *log) {
	opts, l := options(t, mode), newLog()
	opts.Logger = l
	return opts, l
}

// stored returns options for a binary from a store of its own, in dir.
func stored(t testing.TB, path string, mode ...string) (opts launch.Options, dir string) {
	t.Helper()
	opts = options(t, mode...)
	opts.Store, dir = openStore(t)
	digest, err := opts.Store.Add(t.Context(), path, "", "")
	must(t, err)
	opts.Digest = digest
	return opts, dir
}

func start(t testing.TB, opts launch.Options) *launch.Process {
	t.Helper()
	p, err := launch.Start(t.Context(), opts)
	must(t, err)
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

// sigkill kills the shim as another program would, and waits until launch has noticed its death.
func sigkill(t testing.TB, p *launch.Process) {
	t.Helper()
	must(t, unix.Kill(p.PID(), unix.SIGKILL))
	awaitDone(t, p)
}

// refused checks that a start fails with an error of that kind (nil: any) which contains all parts, and leaves nothing.
func refused(t testing.TB, opts launch.Options, kind error, parts ...string) {
	t.Helper()
	refusedOnce(t, "", opts, kind, parts...)
}

// refusedOnce is refused for a start that is given up once a file exists.
func refusedOnce(t testing.TB, file string, opts launch.Options, kind error, parts ...string) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	if file != "" {
		go func() {
			for ctx.Err() == nil {
				if _, err := os.Stat(file); err == nil {
					cancel(errors.New("given up"))
				}
				time.Sleep(time.Millisecond)
			}
		}()
	}
	p, err := launch.Start(ctx, opts)
	if err == nil {
		kill(t, p)
	}
	checkError(t, err, kind, parts...)
	checkEmpty(t, opts.RunDir)
}

// script returns options for a shell script as a shim. Scripts can do what a shim that calls Serve cannot.
func script(t testing.TB, timeout time.Duration, lines ...string) launch.Options {
	t.Helper()
	path := filepath.Join(shortDir(t), "shim.sh")
	writeFile(t, path, "#!/bin/sh\n"+strings.Join(lines, "\n")+"\n", 0o755)
	opts, _ := stored(t, path)
	opts.StartTimeout = timeout
	return opts
}

func writeFile(t testing.TB, path, text string, mode os.FileMode) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), mode))
	must(t, os.Chmod(path, mode)) // whatever the umask
}

func checkEmpty(t testing.TB, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	must(t, err)
	if len(left) != 0 {
		t.Errorf("left in %s: %v", dir, left)
	}
}

func checkError(t testing.TB, err, kind error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	if kind != nil && !errors.Is(err, kind) {
		t.Errorf("the error is not of kind %q: %v", kind, err)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not contain %q:\n%v", part, err)
		}
	}
}

func alive(pid int) bool {
	st, err := proc.ReadStat(pid)
	return err == nil && !st.Exited()
}

// await waits for a condition.
func await(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// awaitDeath waits for the death of a process that is not our child.
func awaitDeath(t testing.TB, pid int) {
	t.Helper()
	await(t, fmt.Sprintf("process %d exits", pid), func() bool { return !alive(pid) })
}

func awaitDone(t testing.TB, p *launch.Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Fatalf("the death of shim %d was not noticed", p.PID())
	}
}

// checkEcho makes a call.
func checkEcho(t testing.TB, p *launch.Process) {
	t.Helper()
	if got, err := ask(t.Context(), p.Conn(), "echo hello"); err != nil || got != "hello" {
		t.Fatalf("the shim answered %q, %v", got, err)
	}
}

func TestStartAnswersAndKillLeavesNothing(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	checkEcho(t, p)
	if p.Err() != nil || !alive(p.PID()) {
		t.Errorf("err %v, alive %v", p.Err(), alive(p.PID()))
	}
	if name := proc.Comm(p.PID()); name != "holdfast-shim" {
		t.Errorf("ps shows the shim as %q", name)
	}
	if got, err := ask(t.Context(), p.Conn(), "stdin"); err != nil || got != "0 bytes" {
		t.Errorf("stdin: %q, %v", got, err)
	}
	if sid, err := unix.Getsid(p.PID()); err != nil || sid != p.PID() {
		t.Errorf("session %d of shim %d, %v", sid, p.PID(), err)
	}
	kill(t, p)
	exit, ok := errors.AsType[*launch.Exit](p.Err())
	if alive(p.PID()) || !ok || exit.Signal != syscall.SIGKILL || !exit.Asked {
		t.Errorf("alive: %t; the exit is %v", alive(p.PID()), p.Err())
	}
	checkEmpty(t, opts.RunDir)
	if _, err := ask(t.Context(), p.Conn(), "echo"); err == nil {
		t.Error("a dead shim answered")
	}
}

// A shim whose own work hangs ends within its grace when its life pipe ends.
func TestStubbornWorkDoesNotKeepAShim(t *testing.T) {
	t.Parallel()
	for mode, c := range map[string]struct {
		code int
		says string
	}{"plain": {0, ""}, "stubborn": {1, "did not end in time"}} {
		opts := options(t, mode)
		p := start(t, opts)
		must(t, p.Stop(t.Context(), patience))
		exit, _ := errors.AsType[*launch.Exit](p.Err())
		if exit == nil || exit.Signal != 0 || exit.Code != c.code {
			t.Errorf("%s: the exit is %v", mode, p.Err())
		}
		if lines := strings.Join(p.LastLines(), "\n"); !strings.Contains(lines, c.says) {
			t.Errorf("%s: the last lines are %s", mode, lines)
		}
		checkEmpty(t, opts.RunDir)
	}
}

func TestMessageLimits(t *testing.T) {
	t.Parallel()
	p := start(t, options(t, "plain"))
	big := strings.Repeat("b", 5<<20) // more than grpc's default of 4 MiB
	if got, err := ask(t.Context(), p.Conn(), "echo "+big); err != nil || len(got) != len(big) {
		t.Errorf("5 MiB: %d bytes came back, %v", len(got), err)
	}
	if _, err := ask(t.Context(), p.Conn(), "size "+strings.Repeat("b", bootstrap.MaxMessage)); err == nil {
		t.Error("a message over the limit was taken")
	}
}

func TestStartErrorsOfOptions(t *testing.T) {
	t.Parallel()
	long, unknown := options(t, "plain"), options(t, "plain")
	long.RunDir = filepath.Join(long.RunDir, strings.Repeat("d", 80))
	refused(t, long, registry.ErrInvalid, "the kernel takes 107: choose a run directory that is")
	unknown.Digest = launch.Digest{SHA256: strings.Repeat("0", 64)}
	refused(t, unknown, registry.ErrNotFound, "add its binary first")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the operator changed their mind"))
	_, err := launch.Start(ctx, options(t, "plain"))
	checkError(t, err, nil, "changed their mind")
}

// hostMain is a host that gets killed: it starts a shim, prints its pid, and waits. Its arguments are those of
// hostCommand.
func hostMain(store, digest, runDir string, args ...string) {
	s, err := launch.OpenStore(store)
	if err != nil {
		panic(err)
	}
	p, err := launch.Start(context.Background(), launch.Options{
		Store: s, Digest: launch.Digest{SHA256: digest}, RunDir: runDir, Args: args, StartTimeout: patience,
		Logger: hclog.NewNullLogger(),
	})
	if err != nil {
		panic(err)
	}
	fmt.Println(p.PID())
	select {}
}

// hostCommand returns the command of a host that starts a shim of a mode.
func hostCommand(store, runDir string, mode ...string) *exec.Cmd {
	cmd := exec.Command(shared.self, append([]string{"host", store, shared.digest.SHA256, runDir}, mode...)...)
	cmd.Stderr = os.Stderr
	return cmd
}

// killedHost runs a host until it has a shim, kills the host, and returns the shim's pid.
func killedHost(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	cmd.Process.Kill()
	cmd.Wait()
	must(t, err)
	return pidOf(t, line)
}

// freeze stops a process. The signal is sent, and the state follows.
func freeze(t testing.TB, pid int) {
	t.Helper()
	must(t, unix.Kill(pid, unix.SIGSTOP))
	await(t, fmt.Sprintf("process %d stops", pid), func() bool {
		st, _ := proc.ReadStat(pid)
		return st.State == 'T'
	})
}
