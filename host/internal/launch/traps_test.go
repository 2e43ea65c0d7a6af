package launch_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
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
	opts, log := logged(t, "hostile")
	p := start(t, opts)
	checkEcho(t, p)
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
	opts, log := logged(t, "plain")
	p := start(t, opts)
	if _, err := ask(t.Context(), p.Conn(), "panic"); err == nil {
		t.Error("a shim that panicked has answered")
	}
	awaitDone(t, p)
	kill(t, p)
	if !log.has(`"@level":"error","@message":"panic: the shim is broken"`) {
		t.Errorf("the log: %s", log.text())
	}
	if exit, ok := p.Err().(*launch.Exit); !ok || exit.Code != 2 || exit.Asked {
		t.Errorf("the exit is %v", p.Err())
	}
}

// T2: go-plugin's Kill waits for ever for a frozen plugin. The frozen shim here could not answer anything.
func TestTrapT2KillOfAFrozenShim(t *testing.T) {
	t.Parallel()
	for how, end := range map[string]func(p *launch.Process) error{
		"kill": func(p *launch.Process) error { return p.Kill(t.Context()) },
		"stop": func(p *launch.Process) error { return p.Stop(t.Context(), time.Millisecond) },
	} {
		opts := options(t, "plain")
		p := start(t, opts)
		freeze(t, p.PID())
		must(t, end(p))
		if exit, _ := p.Err().(*launch.Exit); exit == nil || exit.Signal != unix.SIGKILL || alive(p.PID()) {
			t.Errorf("%s: the exit of the frozen shim is %v", how, p.Err())
		}
		checkEmpty(t, opts.RunDir)
	}
}

// A shim that freezes before its handshake, or before its first answer, is given up at the deadline of the start.
func TestTrapT2FrozenAtStart(t *testing.T) {
	t.Parallel()
	refused(t, script(t, 300*time.Millisecond, "kill -STOP $$"), registry.ErrUnavailable,
		"sent no handshake", "nothing on stdout", "no answer within 300ms")
	file := filepath.Join(shortDir(t), "frozen")
	refusedOnce(t, file, options(t, "freezes", file), registry.ErrUnavailable, "sent a handshake, but did not answer",
		"given up")
}

// T3: a grandchild that holds the pipes delays go-plugin's Kill and its notice of a death until it ends. A daemon that
// has left the shim's process group also has the lock of its state. The death is seen at once, a call under way ends,
// the host keeps nothing of it, and the next shim starts.
func TestTrapT3DaemonKeepsEverything(t *testing.T) {
	run := func() {
		opts := options(t, "plain")
		p := start(t, opts)
		text, err := ask(t.Context(), p.Conn(), "daemon "+filepath.Join(shortDir(t), "shim.db"))
		must(t, err)
		daemon := daemonOf(t, text)
		hangs := make(chan error, 1)
		go func() { _, err := ask(t.Context(), p.Conn(), "hang"); hangs <- err }()
		sigkill(t, p)
		if err := <-hangs; err == nil {
			t.Error("the dead shim has answered")
		}
		kill(t, p)
		checkEmpty(t, opts.RunDir)
		kill(t, start(t, opts))
		if !alive(daemon) {
			t.Error("the daemon was to outlive the shim: this test has proved nothing")
		}
		must(t, unix.Kill(daemon, unix.SIGKILL))
	}
	idle := runtime.NumGoroutine()
	run()
	before := taken(t, idle)
	run()
	before.compare(t)
}

// The rest of the shim's process group ends with it. A daemon that has left the group does not delay the error of a
// start that fails, though it has the shim's stdout.
func TestTrapT3DaemonOfAShimThatDoesNotStart(t *testing.T) {
	t.Parallel()
	for how, says := range map[string]string{"exit 3": "exited with code 3", "exec sleep 1000": "gave up starting it"} {
		dir := shortDir(t)
		refusedOnce(t, dir+"/given-up", script(t, patience, "sleep 1000 & echo $! >"+dir+"/helper",
			"setsid sh -c 'sleep 1000 & echo $! >"+dir+"/daemon'", "[ '"+how+"' = 'exit 3' ] || : >"+dir+"/given-up",
			how),
			nil, says)
		text, err := os.ReadFile(dir + "/helper")
		must(t, err)
		awaitDeath(t, pidOf(t, string(text)))
		daemonIn(t, dir+"/daemon")
	}
}

// T4: a shim freezes when nothing reads its output.
func TestTrapT4OutputNeverBlocksTheShim(t *testing.T) {
	t.Parallel()
	p := start(t, options(t, "plain"))
	if _, err := ask(t.Context(), p.Conn(), "stdout done"); err != nil {
		t.Fatal(err)
	}
	checkEcho(t, p)
}

// The shim does not freeze if the host's logger blocks.
func TestTrapT4LogNeverBlocksTheShim(t *testing.T) {
	t.Parallel()
	opts, log := logged(t, "plain")
	log.gate = make(chan struct{})
	p := start(t, opts)
	if got, err := ask(t.Context(), p.Conn(), "log done"); err != nil || got != "done" {
		t.Fatalf("while nothing reads the log: %q, %v", got, err)
	}
	close(log.gate)
	if got, err := ask(t.Context(), p.Conn(), "flush"); err != nil || got != "true" {
		t.Fatalf("the log was not written: %q, %v", got, err)
	}
	kill(t, p)
	if n := strings.Count(log.text(), `"@message":"many words`); n < 1000 || !log.has("log lines dropped") {
		t.Errorf("the log has %d lines and no count of the dropped", n)
	}
}

// A logger that blocks does not hide the death of the shim.
func TestTrapT3BlockedLoggerDoesNotHideADeath(t *testing.T) {
	t.Parallel()
	opts, log := logged(t, "plain")
	log.gate = make(chan struct{})
	defer close(log.gate)
	p := start(t, opts)
	_, err := ask(t.Context(), p.Conn(), "log done")
	must(t, err)
	kill(t, p)
	checkEmpty(t, opts.RunDir)
}

// T5: output before the handshake breaks it. A shim with package bootstrap cannot break it.
func TestTrapT5PrintsBeforeTheHandshake(t *testing.T) {
	t.Parallel()
	checkEcho(t, start(t, options(t, "prints")))
}

// A program without package bootstrap gets an error that quotes its output. T6: a line over 64 KiB makes go-plugin stop
// reading.
func TestTrapT5RubbishInPlaceOfTheHandshake(t *testing.T) {
	t.Parallel()
	const slow = 10 * time.Second // enough for a script to print
	for _, c := range []struct {
		prints string
		limit  time.Duration
		kind   error
		parts  []string
	}{
		{`printf 'hel\033lo\377 %0300d\n' 1`, patience, registry.ErrInternal,
			[]string{"no handshake", `"hel\x1blo\xff 000`, "and 108 more bytes", "bootstrap.Serve"}},
		{"printf 'Password: '", slow, registry.ErrUnavailable,
			[]string{"sent no handshake", `on stdout "Password: "`}},
		{"exec cat /dev/zero", patience, registry.ErrInternal,
			[]string{"no handshake", `\x00\x00`, "more bytes"}},
	} {
		t.Run(c.prints, func(t *testing.T) {
			t.Parallel()
			refused(t, script(t, c.limit, c.prints, "exec sleep 1000"), c.kind, c.parts...)
		})
	}
}

// A serving shim writes lines of 1 MiB to both outputs without an end. Calls are answered, the log is bounded, Kill
// works.
func TestTrapT6EndlessOutputOfAServingShim(t *testing.T) {
	t.Parallel()
	opts, log := logged(t, "babbles")
	p := start(t, opts)
	await(t, "the log has a line that was cut", func() bool {
		checkEcho(t, p)
		return log.has("more bytes]")
	})
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
			awaitDeath(t, killedHost(t, hostCommand(shared.dir, runDir, mode)))
			checkOrphansAreRemoved(t, runDir)
		})
	}
}

// checkOrphansAreRemoved is the other half of T8: the next start removes what a killed host has left, and nothing
// else.
func checkOrphansAreRemoved(t *testing.T, runDir string) {
	left := privateDir(t, runDir)
	foreign := filepath.Join(runDir, "shim-of-another", "keep")
	must(t, os.MkdirAll(filepath.Dir(foreign), 0o700))
	writeFile(t, foreign, "", 0o600)
	opts := options(t, "plain")
	opts.RunDir = runDir
	first := start(t, opts)
	sockets, _ := filepath.Glob(filepath.Join(runDir, "shim-7-*", "plugin*"))
	kill(t, start(t, opts)) // it must spare the first
	for _, path := range append(sockets, foreign) {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("the first shim lives, and a file is gone: %v", err)
		}
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("%s is still there (%v)", left, err)
	}
	checkEcho(t, first)
}

// T8: sockets and directories stay behind after a SIGKILL, after a failed start, and go-plugin's own after both.
func TestTrapT8NothingLeftBehind(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	if sockets, _ := filepath.Glob(filepath.Join(opts.RunDir, "*", "plugin*")); len(sockets) != 1 {
		t.Fatalf("the socket is elsewhere, or not alone (%v): this test proves nothing", sockets)
	}
	sigkill(t, p)
	kill(t, p)
	checkEmpty(t, opts.RunDir)
	refused(t, options(t, "dies"), registry.ErrUnavailable, "exited with code 7",
		"cannot open the state: no such luck", "generation 7")
	refused(t, script(t, patience, "echo 'going down' >&2", "kill -SEGV $$"), nil, "killed by signal 11", "going down")
}

// T12: memory, descriptors and goroutines of the host grow with each plugin. Not parallel, as it counts those of this
// process.
func TestTrapT12LivesLeaveNothing(t *testing.T) {
	opts := options(t, "plain")
	leavesNothing(t, 6, func() {
		for _, p := range startTwo(t, opts) {
			checkEcho(t, p)
			kill(t, p)
		}
	})
}

// T12, for starts that fail in each of the ways that these tests know.
func TestTrapT12FailedStartsLeaveNothing(t *testing.T) {
	leavesNothing(t, 2, func() {
		for _, mode := range []string{"dies", "version", "nocert", "cookie"} {
			refused(t, options(t, mode), nil)
		}
		file := filepath.Join(shortDir(t), "frozen")
		refusedOnce(t, file, options(t, "freezes", file), nil)
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

// holdings counts resources of this process.
type holdings struct {
	descriptors, goroutines, children int
	heap                              uint64 // in bytes, of what is reachable
}

// taken returns the holdings once there are about so many goroutines: some of gRPC end late.
func taken(t *testing.T, goroutines int) holdings {
	for end := time.Now().Add(patience); runtime.NumGoroutine() > goroutines+2 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	for range 2 { // the second collection frees what has a finalizer
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	open, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return holdings{len(open), runtime.NumGoroutine(), children(t), m.HeapAlloc}
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

// children counts the children of this process, zombies too.
func children(t *testing.T) (n int) {
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil || len(tasks) == 0 {
		t.Fatal("this kernel does not list our children", err)
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
	must(t, errors.Join(errs[:]...))
	return both
}
