package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
	"holdfast/internal/proc"
)

// loadedEnv is an env with a mounted volume and a light load of calls, whose shim is replaced again and again.
type loadedEnv struct {
	*env
	plugin *pluginTask
	load   *load
	count  int            // of binaries
	good   [2]host.Binary // shims without faults, used in turn
}

// shortBudget ends swaps that hang soon. A good swap may exceed it on a slow machine: swapTo repeats it.
const shortBudget = 8 * time.Second

// newLoadedEnv opens a host with short times and with what change sets.
func newLoadedEnv(t *testing.T, change func(*host.Config)) *loadedEnv {
	t.Helper()
	l := &loadedEnv{env: unopenedEnv(t, allCaps...)}
	l.config.Bake, l.config.SwapBudget = time.Millisecond, shortBudget
	change(&l.config)
	l.open()
	l.plugin = l.addPlugin("alloc-p", csifake.Monolith)
	l.must(l.create("vol"))
	path := l.use("alloc-1", request{source: "vol"})
	l.writeFile(path, "file", "text")
	for i := range l.good {
		l.good[i] = host.Binary{Path: fault.Binary(t, faulty, l.dir, fmt.Sprint("good-", i))}
	}
	l.swapTo(l.nextGood()) // from now on there is a history
	l.load = newLoad(l.host)
	t.Cleanup(func() {
		l.t = t
		l.load.end(t)
		l.wantFile(path, "file", "text")
		l.must(l.release("alloc-1"))
		l.must(l.delete("vol"))
		l.stopPlugin(l.plugin)
	})
	return l
}

// forSubtest reports failures to a subtest until it ends.
func (l *loadedEnv) forSubtest(t *testing.T) {
	whole := l.t
	l.t = t
	t.Cleanup(func() { l.t = whole })
}

// load is one goroutine that creates and deletes volumes, and one that reads.
type load struct {
	cancel        context.CancelFunc
	running       sync.WaitGroup
	writes, reads atomic.Int64
	mu            sync.Mutex // guards failures
	failures      []error
}

func newLoad(h *host.Host) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{cancel: cancel}
	l.repeat(ctx, &l.writes, func(ctx context.Context, n int) error {
		id := fmt.Sprint("load-", n)
		if err := createText(ctx, h, volumeText("fake", id, "")); err != nil {
			return fmt.Errorf("create %s: %w", id, err)
		}
		if err := h.DeleteVolume(ctx, volumeName(id)); err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
		return nil
	})
	l.repeat(ctx, &l.reads, func(ctx context.Context, _ int) error {
		_, _, err := h.Volumes(ctx, host.VolumeQuery{})
		return err
	})
	return l
}

func (l *load) repeat(ctx context.Context, count *atomic.Int64, do func(context.Context, int) error) {
	l.running.Go(func() {
		for n := 0; sleep(ctx, 10*time.Millisecond); n++ {
			limited, end := context.WithTimeout(context.WithoutCancel(ctx), waitLimit)
			err := do(limited, n)
			end()
			if err != nil {
				l.mu.Lock()
				l.failures = append(l.failures, err)
				l.mu.Unlock()
				return
			}
			count.Add(1)
		}
	})
}

// reportFailures reports failed calls, once.
func (l *load) reportFailures(t testing.TB) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, err := range l.failures {
		t.Errorf("a call of the load failed: %v", err)
	}
	l.failures = nil
}

func (l *load) end(t *testing.T) {
	t.Helper()
	l.cancel()
	l.running.Wait()
	l.reportFailures(t)
	if l.writes.Load() == 0 || l.reads.Load() == 0 {
		t.Errorf("there was no load: %d writes, %d reads", l.writes.Load(), l.reads.Load())
	}
}

// waitLoad waits until calls that begin now have ended.
func (l *loadedEnv) waitLoad() {
	l.t.Helper()
	writes, reads := l.load.writes.Load(), l.load.reads.Load()
	l.waitUntil("the load continues", func() bool {
		l.load.reportFailures(l.t)
		return l.t.Failed() || l.load.writes.Load() > writes+1 && l.load.reads.Load() > reads+1
	})
}

// faultyShim returns a binary with faults. DIR in a line is a directory of this binary, which filesOf returns, too.
func (l *loadedEnv) faultyShim(lines ...string) host.Binary {
	l.t.Helper()
	l.count++
	dir := l.filesOf(l.count)
	l.must(os.Mkdir(dir, 0o700))
	var all []string
	for _, line := range lines {
		all = append(all, strings.ReplaceAll(line, "DIR", dir))
	}
	path := fault.Binary(l.t, faulty, l.dir, fmt.Sprint("shim-", l.count), all...)
	l.t.Cleanup(func() { _ = os.Remove(path) }) // they are large
	return host.Binary{Path: path}
}

func (l *loadedEnv) filesOf(count int) string {
	return filepath.Join(l.dir, fmt.Sprint("of-shim-", count))
}

// nextGood returns a good shim, not the one that it returned last.
func (l *loadedEnv) nextGood() host.Binary {
	l.good[0], l.good[1] = l.good[1], l.good[0]
	return l.good[0]
}

// swapTo swaps to a shim that works and waits until the old shim has exited.
func (l *loadedEnv) swapTo(b host.Binary) {
	l.t.Helper()
	var report host.SwapReport
	l.waitUntil("a swap to a good shim", func() (done bool) {
		var err error
		if report, err = l.host.Swap(l.ctx(), b); err != nil {
			l.t.Logf("swap to a good shim: %v", err)
		}
		return err == nil
	})
	l.waitUntil("the swap is committed", func() bool { return l.host.Swaps()[0].Outcome == host.SwapCommitted })
	st := l.activeShim()
	if st.SHA256 != report.To || st.Generation != report.Generation {
		l.t.Errorf("%+v is active, and the report says %+v", st, report)
	}
}

// traces is what a shim that is gone must not have left.
type traces struct {
	mounts      string
	files       []string // of the state directory
	processes   int      // shims
	directories int      // of their sockets
	writers     int      // processes that have the state open
	descriptors int      // of this process, except for stored binaries
}

func (l *loadedEnv) traces() traces {
	l.t.Helper()
	tr := traces{mounts: l.mountTable()}
	for _, file := range openFiles(os.Getpid()) {
		if !strings.Contains(file, "/shims/") {
			tr.descriptors++
		}
	}
	entries, err := os.ReadDir(l.config.StateDir)
	l.must(err)
	for _, e := range entries {
		tr.files = append(tr.files, e.Name())
	}
	for _, pid := range shimsOf(l.config.StateDir) {
		tr.processes++
		if proc.Opens(pid, filepath.Join(l.config.StateDir, "shim.db")) {
			tr.writers++
		}
	}
	dirs, err := filepath.Glob(filepath.Join(l.config.RunDir, "shim-*"))
	l.must(err)
	tr.directories = len(dirs)
	return tr
}

func (tr traces) equal(other traces) bool {
	return slices.Equal(tr.files, other.files) && tr.mounts == other.mounts && tr.processes == other.processes &&
		tr.directories == other.directories && tr.writers == other.writers && tr.descriptors == other.descriptors
}

// checkTraces waits until there is what there was.
func (l *loadedEnv) checkTraces(before traces) {
	l.t.Helper()
	var now traces
	_ = waitFor(l.ctx(), "the traces are as before", func() bool { now = l.traces(); return now.equal(before) })
	if !now.equal(before) || now.writers != 1 || now.processes != 1 {
		l.t.Errorf("there is\n%+v\nand there was\n%+v", now, before)
	}
}

// longBudget is more than any step of a swap needs, and less than calls wait for.
const longBudget = waitLimit / 2

// Mutating calls are held for at most the budget, while their own deadlines run, and never fail because of it. A swap
// over budget is given up. Reads continue.
func TestBoundedHold(t *testing.T) {
	slow(t)
	t.Run("reads continue, deadlines run", func(t *testing.T) {
		newLoadedEnv(t, func(c *host.Config) { c.SwapBudget = longBudget }).holdInQuiesce()
	})
	t.Run("over budget", func(t *testing.T) {
		l := newLoadedEnv(t, func(*host.Config) {})
		for _, c := range []struct {
			name, old, next string
			outcome         host.SwapOutcome
		}{
			{"the new one does not activate", "", "Activate before hang", host.SwapRolledBack},
			{"the old one does not quiesce", "Quiesce before hang", "", host.SwapBaking},
			{"the old one does not release", "Release before hang", "", host.SwapBaking},
			{"neither works", "Quiesce before hang", "Activate after hang", host.SwapRolledBack},
		} {
			t.Run(c.name, func(t *testing.T) { l.holdOverBudget(t, c.old, c.next, c.outcome) })
		}
	})
}

// holdInQuiesce stops a swap that has just begun to hold calls.
func (l *loadedEnv) holdInQuiesce() {
	l.swapTo(l.faultyShim("Quiesce before touch DIR/reached times 1", "Quiesce before wait-for DIR/go times 1"))
	files := l.filesOf(l.count)
	var report host.SwapReport
	next := l.nextGood()
	swapped := background(func() (err error) {
		report, err = l.host.SwapAs(l.ctx(), next, "tester")
		return err
	})
	l.waitUntil("calls are held", func() bool { return exists(filepath.Join(files, "reached")) })
	if is := l.host.ShimState(); is.Swap == nil || is.Swap.Step != host.SwapQuiesce ||
		is.Swap.By != "tester" || !is.Serving {
		l.t.Errorf("while calls are held: %+v, %+v", is, is.Swap)
	}
	for range 20 {
		if _, _, err := l.host.Volumes(l.ctx(), host.VolumeQuery{}); err != nil {
			l.t.Errorf("a read: %v", err)
		}
	}
	held := background(func() error { return l.host.ReleaseAlloc(context.WithoutCancel(l.ctx()), "nobody") })
	limited, cancel := context.WithTimeout(l.ctx(), 2*time.Second)
	defer cancel()
	err := l.host.ReleaseAlloc(limited, "nobody-else")
	if !errors.Is(err, context.DeadlineExceeded) || limited.Err() == nil ||
		!strings.Contains(err.Error(), "the shim is being replaced") {
		l.t.Errorf("a call with a deadline: %v; its deadline: %v", err, limited.Err())
	}
	select {
	case err := <-held:
		l.t.Errorf("a call was not held: %v", err)
	case err := <-swapped:
		l.t.Fatalf("the swap did not wait: %v", err)
	default:
	}
	l.must(os.WriteFile(filepath.Join(files, "go"), nil, 0o600))
	l.must(l.result("the held call", held))
	l.must(l.result("the swap", swapped))
	if report.Held < 2 || report.Hold >= longBudget || report.Outcome != host.SwapBaking {
		l.t.Errorf("%+v", report)
	}
	l.waitLoad()
}

// holdOverBudget swaps where a step takes all the time that it has. Calls without a deadline succeed.
func (l *loadedEnv) holdOverBudget(t *testing.T, old, next string, outcome host.SwapOutcome) {
	l.forSubtest(t)
	if old != "" {
		l.swapTo(l.faultyShim(old + " times 1"))
	}
	candidate := l.nextGood()
	if next != "" {
		candidate = l.faultyShim(next)
	}
	report, err := l.host.Swap(l.ctx(), candidate)
	if report.Outcome != outcome || (err != nil) != (outcome == host.SwapRolledBack) || report.Hold >= 2*shortBudget {
		t.Errorf("%v; %+v", err, report)
	}
	if report.Hold < shortBudget/4 {
		t.Errorf("calls were held for %s only: the test proves nothing", report.Hold)
	}
	l.waitLoad()
}

// TestWhatASwapLeavesIsFound is a negative control of traces and of the load.
func TestWhatASwapLeavesIsFound(t *testing.T) {
	l := newLoadedEnv(t, func(*host.Config) {})
	l.waitLoad()
	l.load.end(t)
	before := l.traces()
	wantFound := func(what string, undo func()) {
		t.Helper()
		if now := l.traces(); now.equal(before) {
			t.Errorf("%s is not found", what)
		}
		undo()
		l.waitUntil(what+" is gone", func() bool { return l.traces().equal(before) })
	}
	file := filepath.Join(l.config.StateDir, "rehearsal.db")
	l.must(os.WriteFile(file, nil, 0o600))
	wantFound("a file", func() { l.must(os.Remove(file)) })
	dir := filepath.Join(l.config.RunDir, "shim-9")
	l.must(os.Mkdir(dir, 0o700))
	wantFound("a directory of sockets", func() { l.must(os.Remove(dir)) })
	open, err := os.Open(l.dir)
	l.must(err)
	wantFound("a descriptor", func() { l.must(open.Close()) })
	wantFound("a process", l.startSleeper(nil))
	db, err := os.Open(filepath.Join(l.config.StateDir, "shim.db"))
	l.must(err)
	end := l.startSleeper(db)
	l.must(db.Close())
	wantFound("a second process with the state", end)

	second := newLoad(l.host)
	l.plugin.On("CreateVolume").Times(1).Code(codes.InvalidArgument, "no")
	l.waitUntil("a failed call is found", func() bool {
		second.mu.Lock()
		defer second.mu.Unlock()
		return len(second.failures) > 0
	})
	second.cancel()
	second.running.Wait()
}

// startSleeper runs a process that looks like a shim of this env, with a file as its input.
func (l *loadedEnv) startSleeper(input *os.File) (end func()) {
	l.t.Helper()
	program, err := os.ReadFile("/bin/sleep")
	l.must(err)
	path := filepath.Join(l.config.StateDir, "shims", "sleeper")
	l.must(os.WriteFile(path, program, 0o700))
	cmd := exec.Command(path, "600")
	if input != nil {
		cmd.Stdin = input
	}
	l.must(cmd.Start())
	return func() {
		l.must(cmd.Process.Kill())
		_ = cmd.Wait() // it was killed
		l.must(os.Remove(path))
	}
}
