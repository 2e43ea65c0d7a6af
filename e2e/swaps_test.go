package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
)

// swaps is a world whose shim is replaced again and again while it is in use: by one volume that is mounted, and by a light load of calls.
type swaps struct {
	*world
	plugin *pluginTask
	load   *load
	count  int            // of the binaries made
	spares [2]host.Binary // good ones, which take turns
}

// newSwaps has a world in use. Its host is configured by what more says.
func newSwaps(t *testing.T, more func(*host.Config)) *swaps {
	t.Helper()
	s := &swaps{world: newWorld(t, everything...)}
	s.must(s.host.Close())
	s.config.Bake, s.config.SwapBudget = time.Millisecond, budget
	more(&s.config)
	s.open()
	s.plugin = s.world.plugin("alloc-p", csifake.Monolith)
	s.must(s.create("vol"))
	path, err := s.prepare(s.group("alloc-1", "vol", oneWriter))
	s.must(err)
	s.write(path, "file", "text")
	for i := range s.spares {
		s.spares[i] = host.Binary{Path: fault.Binary(t, faulty, s.dir, fmt.Sprint("good-", i))}
	}
	s.good(s.next()) // there is a history from now on
	s.load = newLoad(s.host)
	t.Cleanup(func() { // before the world is left
		s.t = t
		s.load.stops(t)
		s.reads(path, "file", "text")
		s.must(s.release("alloc-1"))
		s.must(s.delete("vol"))
		s.exit(s.plugin)
	})
	return s
}

// budget is large, as machines are slow and nothing here measures time; and yet what is in vain is waited for as long as it lasts.
const budget = 4 * time.Second

// within has the world's failures be those of a subtest.
func (s *swaps) within(t *testing.T) {
	whole := s.t
	s.t = t
	t.Cleanup(func() { s.t = whole })
}

// load is calls that come one after the other: one goroutine makes and deletes volumes, one reads.
type load struct {
	host          *host.Host
	cancel        context.CancelFunc
	wg            sync.WaitGroup
	writes, reads atomic.Int64
	mu            sync.Mutex // guards failed
	failed        []error
}

func newLoad(h *host.Host) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{host: h, cancel: cancel}
	l.repeats(ctx, &l.writes, func(ctx context.Context, n int) error {
		id := fmt.Sprint("load-", n)
		w := &world{host: h}
		if err := w.createWith(ctx, id, ""); err != nil {
			return fmt.Errorf("create %s: %w", id, err)
		}
		if err := h.DeleteVolume(ctx, host.VolumeName{Namespace: "default", ID: host.VolumeID(id)}); err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
		return nil
	})
	l.repeats(ctx, &l.reads, func(ctx context.Context, _ int) error {
		_, _, err := h.Volumes(ctx, host.VolumeQuery{})
		return err
	})
	return l
}

// pace is the time between two calls of a load.
const pace = 10 * time.Millisecond

func (l *load) repeats(ctx context.Context, count *atomic.Int64, do func(context.Context, int) error) {
	l.wg.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			limited, end := context.WithTimeout(context.WithoutCancel(ctx), patience)
			err := do(limited, n)
			end()
			if err != nil {
				l.fails(err)
				return
			}
			count.Add(1)
			time.Sleep(pace)
		}
	})
}

func (l *load) fails(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, err)
}

// hasFailed reports the calls that failed, once.
func (l *load) hasFailed(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, err := range l.failed {
		t.Errorf("a call of the load failed: %v", err)
	}
	l.failed = nil
}

func (l *load) stops(t *testing.T) {
	t.Helper()
	l.cancel()
	l.wg.Wait()
	l.hasFailed(t)
	if l.writes.Load() == 0 || l.reads.Load() == 0 {
		t.Errorf("there was no load: %d writes, %d reads", l.writes.Load(), l.reads.Load())
	}
}

// goesOn waits until calls that begin now have ended.
func (s *swaps) goesOn() {
	s.t.Helper()
	writes, reads := s.load.writes.Load(), s.load.reads.Load()
	s.eventually("the load goes on", func() bool {
		s.load.hasFailed(s.t)
		return s.t.Failed() || s.load.writes.Load() > writes+1 && s.load.reads.Load() > reads+1
	})
}

// faulty is a binary with these faults; DIR in them is a directory for the files of this binary.
func (s *swaps) faulty(lines ...string) host.Binary {
	s.t.Helper()
	s.count++
	name := fmt.Sprint("shim-", s.count)
	dir := filepath.Join(s.dir, "of-"+name)
	s.must(os.Mkdir(dir, 0o700))
	var all []string
	for _, l := range lines {
		all = append(all, strings.ReplaceAll(l, "DIR", dir))
	}
	path := fault.Binary(s.t, faulty, s.dir, name, all...)
	s.t.Cleanup(func() { _ = os.Remove(path) }) // they are large
	return host.Binary{Path: path}
}

// next is a good shim, and another one than last time.
func (s *swaps) next() host.Binary {
	s.spares[0], s.spares[1] = s.spares[1], s.spares[0]
	return s.spares[0]
}

// good replaces the running shim and waits until the old one has ended.
func (s *swaps) good(b host.Binary) host.ShimStatus {
	s.t.Helper()
	report, err := s.host.Swap(s.ctx(), b)
	if err != nil {
		s.t.Fatalf("a good shim: %v", err)
	}
	s.eventually("the swap is committed", func() bool { return s.host.Swaps()[0].Outcome == host.SwapCommitted })
	st := s.serves()
	if st.SHA256 != report.To || st.Generation != report.Generation {
		s.t.Errorf("%+v serves, and the report says %+v", st, report)
	}
	return st
}

func (s *swaps) serves() host.ShimStatus {
	s.t.Helper()
	st, err := s.host.Status(s.ctx())
	s.must(err)
	return st
}

// traces is what a shim that is gone must not have left.
type traces struct {
	mounts      string
	files       []string // of the state directory
	processes   int      // shims
	directories int      // of their sockets
	writers     int      // processes that have the state open
	descriptors int      // of this process, but for stored binaries, of which there may be up to three
}

func (s *swaps) traces() traces {
	s.t.Helper()
	tr := traces{mounts: s.mountTable(), descriptors: descriptors(s.t)}
	entries, err := os.ReadDir(s.config.StateDir)
	s.must(err)
	for _, e := range entries {
		tr.files = append(tr.files, e.Name())
	}
	for _, pid := range s.shims() {
		tr.processes++
		if slices.ContainsFunc(opened(pid), func(to string) bool { return to == filepath.Join(s.config.StateDir, "shim.db") }) {
			tr.writers++
		}
	}
	dirs, err := filepath.Glob(filepath.Join(s.config.RunDir, "shim-*"))
	s.must(err)
	tr.directories = len(dirs)
	return tr
}

// is compares what can be compared: a host that has never swapped has no history.
func (a traces) is(b traces) bool {
	return slices.Equal(a.files, b.files) && a.mounts == b.mounts && a.processes == b.processes && a.directories == b.directories && a.writers == b.writers &&
		a.descriptors == b.descriptors
}

// shims are the processes that this world's host has started.
func (s *swaps) shims() (pids []int) {
	lists, _ := filepath.Glob("/proc/self/task/*/children")
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for field := range strings.FieldsSeq(string(text)) {
			pid, _ := strconv.Atoi(field)
			program, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
			if strings.HasPrefix(program, s.config.StateDir) && alive(pid) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// opened are the files that a process has open.
func opened(pid int) (files []string) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			files = append(files, to)
		}
	}
	return files
}

func descriptors(t *testing.T) int {
	t.Helper()
	files := opened(os.Getpid())
	return len(slices.DeleteFunc(files, func(to string) bool { return strings.Contains(to, "/shims/") }))
}
