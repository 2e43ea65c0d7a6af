package launch_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/registry"
)

// T1: a line on stderr that is no hclog line makes go-plugin panic. Here it is logged, escaped and bounded.
func TestTrapT1HostileStderr(t *testing.T) {
	t.Parallel()
	log := newLog()
	opts := options(t, "hostile")
	opts.Logger = log
	p := start(t, opts)
	if _, err := ask(t.Context(), p.Conn(), "echo"); err != nil {
		t.Fatal(err)
	}
	kill(t, p) // all that was written is read by then
	text := log.text()
	for _, want := range []string{
		`{\"@message\":5}`, `"@message":"level is an object"`, `not \\xff UTF-8 \\u001b[31mred`, "more bytes]",
		`"@level":"warn","@message":"still here"`, `"deep":"{\"a\":[\"\\u001b[2J\"]}","n":"1e999"`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the log has no %s", want)
		}
	}
	for line := range strings.Lines(text) {
		if len(line) > 3*64<<10 {
			t.Errorf("a line of %d bytes reached the log", len(line))
		}
	}
}

func TestPanicOfTheShimIsLoggedAsError(t *testing.T) {
	t.Parallel()
	log := newLog()
	opts := options(t, "plain")
	opts.Logger = log
	p := start(t, opts)
	if _, err := ask(t.Context(), p.Conn(), "panic"); err == nil {
		t.Error("a shim that panicked has answered")
	}
	awaitDone(t, p)
	kill(t, p)
	if !strings.Contains(log.text(), `"@level":"error","@message":"panic: the shim is broken"`) {
		t.Errorf("the log: %s", log.text())
	}
	if exit, ok := p.Err().(*launch.Exit); !ok || exit.Code != 2 || exit.Asked {
		t.Errorf("the exit is %v", p.Err())
	}
}

// T2: go-plugin's Kill waits for ever for a frozen plugin. The frozen shim here could not answer anything.
func TestTrapT2KillOfAFrozenShim(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	freeze(t, p.PID())
	kill(t, p)
	if alive(p.PID()) {
		t.Error("the frozen shim lives")
	}
	checkEmpty(t, opts.RunDir)
}

// A shim that freezes before its handshake, or before its first answer, is given up at the deadline of the start.
func TestTrapT2FrozenAtStart(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, 300*time.Millisecond, "kill -STOP $$")
	checkText(t, err, "sent no handshake", "nothing on stdout", "no answer within 300ms")
	checkKind(t, err, registry.ErrUnavailable)

	opts := options(t, "freezes")
	opts.StartTimeout = 5 * time.Second // its handshake has to be there by then
	_, err = launch.Start(t.Context(), opts)
	checkText(t, err, "sent a handshake, but did not answer", "no answer within 5s")
	checkKind(t, err, registry.ErrUnavailable)
	checkEmpty(t, opts.RunDir)
}

// T3: a grandchild that holds the pipes delays go-plugin's Kill and its notice of a death until it ends.
func TestTrapT3GrandchildHoldsThePipes(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	text, err := ask(t.Context(), p.Conn(), "fork")
	if err != nil {
		t.Fatal(err)
	}
	holder, _ := strconv.Atoi(text)
	defer awaitDeath(t, holder)
	defer unix.Kill(holder, unix.SIGKILL)
	if err := unix.Kill(p.PID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaitDone(t, p)
	kill(t, p)
	if !alive(holder) {
		t.Fatal("the holder was to outlive the shim: this test has proved nothing")
	}
	checkEmpty(t, opts.RunDir)
}

// The rest of the shim's process group ends with it.
func TestTrapT3HelpersEndWithTheShim(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	_, err := startScript(t, patience, "sleep 1000 & echo $! >"+dir+"/pid", "exit 3")
	checkText(t, err, "exited with code 3")
	text, rerr := os.ReadFile(dir + "/pid")
	if rerr != nil {
		t.Fatal(rerr)
	}
	helper, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	awaitDeath(t, helper)
}

// A daemon has left the shim's process group, and has its pipes and the lock of its state. The death is seen at once, a
// call under way ends, the host keeps nothing of it, and the next shim starts.
func TestTrapT3DaemonKeepsEverything(t *testing.T) {
	run := func() {
		opts := options(t, "plain")
		p := start(t, opts)
		text, err := ask(t.Context(), p.Conn(), "daemon "+filepath.Join(shortDir(t), "shim.db"))
		if err != nil {
			t.Fatal(err)
		}
		daemon, _ := strconv.Atoi(text)
		if !alive(daemon) {
			t.Fatalf("there is no daemon: %q", text)
		}
		defer unix.Kill(daemon, unix.SIGKILL)
		hangs := make(chan error, 1)
		go func() { _, err := ask(t.Context(), p.Conn(), "hang"); hangs <- err }()
		if err := unix.Kill(p.PID(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		awaitDone(t, p)
		if err := <-hangs; err == nil {
			t.Error("the dead shim has answered")
		}
		kill(t, p)
		checkEmpty(t, opts.RunDir)
		kill(t, start(t, opts))
		if !alive(daemon) {
			t.Error("the daemon was to outlive the shim: this test has proved nothing")
		}
	}
	idle := runtime.NumGoroutine()
	run()
	before := taken(t, idle)
	run()
	before.compare(t)
}

// The same while a shim starts. Its daemon has its stdout, too.
func TestTrapT3DaemonOfAShimThatDoesNotStart(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	for how, c := range map[string]struct {
		limit time.Duration
		says  string
	}{"exit 3": {patience, "exited with code 3"}, "exec sleep 1000": {3 * time.Second, "gave up starting it"}} {
		began := time.Now()
		_, err := startScript(t, c.limit, "setsid sh -c 'sleep 1000 & echo $! >"+dir+"/pid'", how)
		checkText(t, err, c.says)
		if took := time.Since(began); took > patience {
			t.Errorf("its end took %v", took)
		}
		text, err := os.ReadFile(dir + "/pid")
		if err != nil {
			t.Fatal(err)
		}
		daemon, _ := strconv.Atoi(strings.TrimSpace(string(text)))
		if !alive(daemon) {
			t.Fatal("the daemon was to outlive the shim: this test has proved nothing")
		}
		unix.Kill(daemon, unix.SIGKILL)
	}
}

// T4: a shim freezes when nothing reads its output.
func TestTrapT4OutputNeverBlocksTheShim(t *testing.T) {
	t.Parallel()
	p := start(t, options(t, "plain"))
	if _, err := ask(t.Context(), p.Conn(), "stdout done"); err != nil {
		t.Fatal(err)
	}
	if got, err := ask(t.Context(), p.Conn(), "echo after"); err != nil || got != "after" {
		t.Errorf("after 8 MiB of output: %q, %v", got, err)
	}
}

// The same for its log. The host's logger blocks here.
func TestTrapT4LogNeverBlocksTheShim(t *testing.T) {
	t.Parallel()
	log := newLog()
	log.gate = make(chan struct{})
	opts := options(t, "plain")
	opts.Logger = log
	p := start(t, opts)
	if got, err := ask(t.Context(), p.Conn(), "log done"); err != nil || got != "done" {
		t.Fatalf("while nobody reads the log: %q, %v", got, err)
	}
	close(log.gate)
	if got, err := ask(t.Context(), p.Conn(), "flush"); err != nil || got != "true" {
		t.Fatalf("the log was not written: %q, %v", got, err)
	}
	kill(t, p)
	if text := log.text(); !strings.Contains(text, "log lines dropped") ||
		strings.Count(text, `"@message":"many words`) < 1000 {
		t.Errorf("the log has %d lines and no count of the dropped", strings.Count(text, `"@message":"many words`))
	}
}

// T5: output before the handshake breaks it. A shim with package bootstrap cannot break it; another gets a clear
// error.
func TestTrapT5PrintsBeforeTheHandshake(t *testing.T) {
	t.Parallel()
	p := start(t, options(t, "prints"))
	if got, err := ask(t.Context(), p.Conn(), "echo hello"); err != nil || got != "hello" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestTrapT5RubbishInPlaceOfTheHandshake(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, patience, `printf 'hel\033lo\377 %0300d\n' 1`, "sleep 1000")
	checkText(t, err, "no handshake", `"hel\x1blo\xff 000`, "and 108 more bytes", "bootstrap.Serve")
	checkKind(t, err, registry.ErrInternal)
}

func TestTrapT5RubbishWithoutANewline(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, 3*time.Second, "printf 'Password: '", "exec sleep 1000")
	checkText(t, err, "sent no handshake", `on stdout "Password: "`)
}

func TestTrapT5StdoutClosed(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, 3*time.Second, "exec >&-", "exec sleep 1000")
	checkText(t, err, "closed its stdout without a handshake")
}

// T6: a line over 64 KiB on stdout makes go-plugin stop reading.
func TestTrapT6EndlessFirstLine(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, patience, "cat /dev/zero")
	checkText(t, err, "stdout has no handshake", `\x00\x00`, "more bytes")
}

// A serving shim writes lines of 1 MiB to both outputs without an end. Calls are answered, the log is bounded, Kill
// works.
func TestTrapT6EndlessOutputOfAServingShim(t *testing.T) {
	t.Parallel()
	log := newLog()
	opts := options(t, "babbles")
	opts.Logger = log
	p := start(t, opts)
	// a busy machine writes too little for the rate to be exceeded
	bounded := func() bool { return log.has("more bytes]") }
	for end := time.Now().Add(patience); !bounded(); time.Sleep(50 * time.Millisecond) {
		if got, err := ask(t.Context(), p.Conn(), "echo hello"); err != nil || got != "hello" {
			t.Fatalf("%q, %v", got, err)
		}
		if time.Now().After(end) {
			t.Fatalf("the log of %d bytes has no line that was cut", len(log.text()))
		}
	}
	kill(t, p)
	checkEmpty(t, opts.RunDir)
}

// T7: a shim outlives its host. The host is killed with SIGKILL.
func TestTrapT7ShimDiesWithItsHost(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"plain", "stubborn"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			runDir := shortDir(t)
			awaitDeath(t, killedHost(t, shared.dir, runDir, mode))
			checkOrphansAreRemoved(t, runDir)
		})
	}
}

// checkOrphansAreRemoved is the other half of T8: the next start removes what a killed host has left, and nothing
// else.
func checkOrphansAreRemoved(t *testing.T, runDir string) {
	left, err := filepath.Glob(filepath.Join(runDir, "shim-*"))
	if err != nil || len(left) != 1 {
		t.Fatalf("the killed host has left %v, %v: this test proves nothing", left, err)
	}
	foreign := filepath.Join(runDir, "shim-of-somebody-else", "keep")
	if err := os.MkdirAll(filepath.Dir(foreign), 0o700); err != nil {
		t.Fatal(err)
	}
	writeFile(t, foreign, "", 0o600)
	opts := options(t, "plain")
	opts.RunDir = runDir
	first := start(t, opts)
	sockets, _ := filepath.Glob(filepath.Join(runDir, "shim-7-*", "plugin*"))
	second := start(t, opts) // whose collection must spare the first
	for _, path := range sockets {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("the first shim, which lives, lost %v", err)
		}
	}
	if _, err := os.Stat(left[0]); !os.IsNotExist(err) {
		t.Errorf("%s is still there (%v)", left[0], err)
	}
	kill(t, second)
	if got, err := ask(t.Context(), first.Conn(), "echo hello"); err != nil || got != "hello" {
		t.Errorf("the first shim: %q, %v", got, err)
	}
	kill(t, first)
	if _, err := os.Stat(foreign); err != nil {
		t.Error(err)
	}
}

// T8: sockets and directories stay behind after a SIGKILL, after a failed start, and go-plugin's own after both.
func TestTrapT8NothingLeftBehind(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	sockets, _ := filepath.Glob(filepath.Join(opts.RunDir, "*", "plugin*"))
	if len(sockets) != 1 {
		t.Fatalf("the socket is elsewhere, or not alone (%v): this test proves nothing", sockets)
	}
	if err := unix.Kill(p.PID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaitDone(t, p)
	kill(t, p)
	checkEmpty(t, opts.RunDir)

	opts.Env = []string{shimMode + "=dies"}
	_, err := launch.Start(t.Context(), opts)
	checkText(t, err, "exited with code 7", "cannot open the state: no such luck", "generation 7")
	checkKind(t, err, registry.ErrUnavailable)
	checkEmpty(t, opts.RunDir)
}

func TestDeathBySignalAtStart(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, patience, "echo 'going down' >&2", "kill -SEGV $$")
	checkText(t, err, "killed by signal 11", "going down")
}

// T12: memory, descriptors and goroutines of the host grow with each plugin. Not parallel, as it counts those of this
// process.
func TestTrapT12LivesLeaveNothing(t *testing.T) {
	opts := options(t, "plain")
	leavesNothing(t, 6, func() {
		for _, p := range startTwo(t, opts) {
			if _, err := ask(t.Context(), p.Conn(), "echo"); err != nil {
				t.Fatal(err)
			}
			kill(t, p)
		}
	})
}

// The same for starts that fail, in every way of these tests.
func TestTrapT12FailedStartsLeaveNothing(t *testing.T) {
	leavesNothing(t, 2, func() {
		for _, mode := range []string{"dies", "version", "nocert", "cookie"} {
			if p, err := launch.Start(t.Context(), options(t, mode)); err == nil {
				kill(t, p)
				t.Fatalf("%s was taken for a shim", mode)
			}
		}
		opts := options(t, "freezes")
		opts.StartTimeout = time.Second
		if _, err := launch.Start(t.Context(), opts); err == nil {
			t.Fatal("a frozen one was taken for a shim")
		}
	})
}

// leavesNothing calls do once to warm up, then 2*half times. Nothing may grow, and the heap by at most a tenth in the
// second half.
func leavesNothing(t *testing.T, half int, do func()) {
	t.Helper()
	idle := runtime.NumGoroutine()
	do()
	before := taken(t, idle)
	for range half {
		do()
	}
	middle := before.compare(t)
	for range half {
		do()
	}
	after := before.compare(t)
	if after.heap > middle.heap+middle.heap/10 {
		t.Errorf("the heap grows: from %d to %d, and to %d", before.heap, middle.heap, after.heap)
	}
}

// holdings are resources of this process.
type holdings struct {
	descriptors, goroutines, children int
	heap                              uint64 // in bytes, of what is reachable
}

// taken returns the holdings once there are about so many goroutines.
func taken(t *testing.T, goroutines int) holdings {
	var m runtime.MemStats
	n := settled(goroutines + 2)
	for range 2 { // what has a finalizer goes with the second
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return holdings{descriptors(t), n, offspring(t), m.HeapAlloc}
}

// compare reports what has grown, except the heap, and returns the new holdings.
func (h holdings) compare(t *testing.T) holdings {
	t.Helper()
	now := taken(t, h.goroutines)
	if now.descriptors > h.descriptors+2 || now.goroutines > h.goroutines+2 || now.children > h.children {
		t.Errorf("there were %+v, and are %+v", h, now)
	}
	return now
}

// offspring counts the children of this process, zombies too.
func offspring(t *testing.T) (n int) {
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil || len(tasks) == 0 {
		t.Fatal("this kernel does not say who our children are", err)
	}
	for _, path := range tasks {
		text, _ := os.ReadFile(path)
		n += len(strings.Fields(string(text)))
	}
	return n
}

// startTwo starts two shims at once, as a swap may.
func startTwo(t *testing.T, opts launch.Options) (both [2]*launch.Process) {
	var wg sync.WaitGroup
	var errs [2]error
	for i := range both {
		wg.Go(func() { both[i], errs[i] = launch.Start(t.Context(), opts) })
	}
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
	return both
}

func descriptors(t *testing.T) int {
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(open)
}

// settled counts goroutines once they are no more than limit, or patience is over: some of gRPC end late.
func settled(limit int) int {
	for end := time.Now().Add(time.Second); ; runtime.Gosched() {
		if n := runtime.NumGoroutine(); n <= limit || time.Now().After(end) {
			return n
		}
	}
}
