package e2e

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/fault"
	"holdfast/internal/proc"
)

// alternateShims are two shims with other digests than bin/holdfast-shim that do the same: bytes after a program do not
// change it.
var alternateShims = sync.OnceValues(func() (made [2]host.Binary, err error) {
	program, err := os.ReadFile(filepath.Join(bin, "holdfast-shim"))
	for i, name := range []string{"holdfast-shim-a", "holdfast-shim-b"} {
		made[i].Path = filepath.Join(os.TempDir(), name)
		if err == nil {
			err = os.WriteFile(made[i].Path, append(program[:len(program):len(program)], name...), 0o700)
		}
	}
	return made, err
})

// setFaults has swap use shims with these faults from now on.
func (e *env) setFaults(lines ...string) {
	e.t.Helper()
	for i, name := range []string{"faulty-a", "faulty-b"} {
		e.alternates[i] = host.Binary{Path: fault.Binary(e.t, faulty, e.dir, name, lines...)}
	}
}

// breakpoint is a point of package fault at which each shim waits while it is set.
type breakpoint struct{ point, reached, clear string }

// newBreakpoint returns one that is not set.
func (e *env) newBreakpoint(point string) *breakpoint {
	e.t.Helper()
	name := filepath.Join(e.dir, strings.ReplaceAll(point, " ", "-"))
	b := &breakpoint{point, name + "-reached", name + "-clear"}
	e.must(b.unset())
	return b
}

// faults are the lines of shims that stop at the breakpoint.
func (b *breakpoint) faults() []string {
	return []string{b.point + " touch " + b.reached, b.point + " wait-for " + b.clear}
}

func (b *breakpoint) unset() error { return os.WriteFile(b.clear, nil, 0o600) }

func (b *breakpoint) set() error {
	_ = os.Remove(b.reached) // left by a shim that went on
	return os.Remove(b.clear)
}

// waitReached waits until a shim is at the breakpoint.
func (e *env) waitReached(b *breakpoint) {
	e.t.Helper()
	e.waitUntil("a shim is at "+b.point, func() bool { return exists(b.reached) })
}

// activeShim returns the status of the active shim, and notes its pid.
func (e *env) activeShim() host.ShimStatus {
	e.t.Helper()
	st, err := e.host.Status(e.ctx())
	e.must(err)
	if n := len(e.pids); n == 0 || e.pids[n-1] != st.PID {
		e.pids = append(e.pids, st.PID)
	}
	return st
}

// killShim kills the active shim and waits until the process is gone.
func (e *env) killShim() {
	e.t.Helper()
	st, err := e.host.Status(e.ctx())
	e.must(err)
	e.must(syscall.Kill(st.PID, syscall.SIGKILL))
	e.waitUntil("the shim is gone", func() bool { return !alive(st.PID) })
}

// replaceShimByKill kills the shim once no other stands by, and waits until a new one is active.
func (e *env) replaceShimByKill() {
	e.t.Helper()
	e.waitCommitted()
	was := e.activeShim()
	e.killShim()
	e.waitUntil("the next shim is active", func() bool { return e.activeShim().PID != was.PID })
}

func (e *env) swap() host.SwapReport {
	e.t.Helper()
	return e.swapWhile(func() {})
}

// swapWhile replaces the shim while something is done.
func (e *env) swapWhile(do func()) (report host.SwapReport) {
	e.t.Helper()
	if e.alternates[0].Path == "" {
		var err error
		e.alternates, err = alternateShims()
		e.must(err)
	}
	ctx, next := e.ctx(), e.alternates[e.swapCount%2]
	swapped := background(func() (err error) { report, err = e.host.Swap(ctx, next); return err })
	do()
	e.must(e.result("the swap", swapped))
	e.swapCount++
	if st := e.activeShim(); st.SHA256 != report.To || st.Generation < report.Generation {
		e.t.Errorf("after the swap %+v the shim is %+v", report, st)
	}
	return report
}

// waitCommitted waits until no shim stands by.
func (e *env) waitCommitted() {
	e.t.Helper()
	e.waitUntil("the last swap is committed", func() bool {
		all := e.host.Swaps()
		return len(all) == 0 || all[0].Outcome != host.SwapBaking
	})
}

// watchLock looks all the time which processes hold the lock of shim.db. stop returns them in order.
func (e *env) watchLock() (stop func() []int) {
	e.t.Helper()
	db := filepath.Join(e.config.StateDir, "shim.db")
	ctx, cancel := context.WithCancel(e.t.Context())
	var watching sync.WaitGroup
	var holders []int
	watching.Go(func() {
		for sleep(ctx, time.Millisecond) {
			now := proc.FlockHolders(db)
			slices.Sort(now) // the table may list a lock twice while others come and go
			now = slices.Compact(now)
			if len(now) > 1 {
				e.t.Errorf("%s is locked by %v at once", db, now)
			}
			if n := len(holders); len(now) == 1 && (n == 0 || holders[n-1] != now[0]) {
				holders = append(holders, now[0])
			}
		}
	})
	return func() []int { cancel(); watching.Wait(); return holders }
}

// betweenShims does something while no shim has the state: after the old one released it, before the new one took it.
func (e *env) betweenShims(do func()) {
	e.t.Helper()
	file, err := unix.Open(filepath.Join(e.config.StateDir, "shim.db"), unix.O_RDWR|unix.O_CLOEXEC, 0)
	e.must(err)
	defer unix.Close(file)
	done := background(func() error {
		if err := unix.Flock(file, unix.LOCK_EX); err != nil {
			return err
		}
		do()
		return unix.Flock(file, unix.LOCK_UN)
	})
	for {
		e.swap()
		select {
		case err := <-done:
			e.must(err)
			return
		default: // the new shim was faster; try the next swap
		}
	}
}
