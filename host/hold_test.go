package host_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"holdfast/host"
)

// No call fails while the shim keeps dying.
func TestShimThatKeepsDyingIsStartedMoreRarely(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	ctx, stop := context.WithCancel(w.ctx())
	var calls sync.WaitGroup
	for range 3 {
		calls.Go(func() {
			for ctx.Err() == nil {
				if err := w.host.ReleaseAlloc(w.ctx(), "a"); err != nil {
					t.Errorf("a call failed: %v", err)
					return
				}
			}
		})
	}
	const deaths = 6
	var pauses [deaths]time.Duration
	for i := range pauses {
		was := w.host.ShimState()
		must(t, syscall.Kill(was.PID, syscall.SIGKILL))
		now := w.until("started again", func(s host.ShimState) bool {
			if !s.Serving && !s.Next.IsZero() {
				pauses[i] = max(pauses[i], s.Next.Sub(s.Since))
			}
			return s.Serving && s.PID != was.PID
		})
		if now.Failures != i+1 || !strings.Contains(now.Reason, "killed") {
			t.Errorf("after %d deaths: %+v", i+1, now)
		}
	}
	stop()
	calls.Wait()
	if pauses[deaths-1] < 80*time.Millisecond {
		t.Errorf("the pauses before the starts were %v", pauses)
	}
}

// One wrong entry in the workload would make the next shim refuse all of Sync.
func TestRefusedCallsAreNotInTheWorkload(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	bad := host.AllocTask{Alloc: "../a", Task: "t", Attempt: 1}
	for name, call := range map[string]func() error{
		"task": func() error { _, err := w.host.TaskStarting(w.ctx(), bad); return err },
		"alloc": func() error {
			_, err := w.host.PrepareAlloc(w.ctx(), host.AllocGroup{Alloc: "../a", Namespace: "default"})
			return err
		},
		"list": func() error {
			return w.host.Sync(w.ctx(), host.Workload{Tasks: []host.WorkloadTask{{AllocTask: bad}}})
		},
	} {
		if err := call(); !errors.Is(err, host.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	rubbish := host.AllocTask{Alloc: "a", Task: "t", Attempt: 1, Sealed: host.Sealed("rubbish")}
	if _, err := w.host.TaskStarting(w.ctx(), rubbish); err == nil {
		t.Error("rubbish was taken for a sealed task")
	}
	w.crash()
}

// The tasks stay gone after a crash of the shim, as the next shim gets the list of the last Sync.
func TestSyncTakesDownTasksThatItDoesNotName(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	kept, lost := w.task("kept"), w.task("lost")
	for _, task := range []host.AllocTask{kept, lost} {
		_, err := w.host.TaskStarting(w.ctx(), task)
		must(t, err)
	}
	known := func(when string, want ...string) {
		list, _, err := w.host.Plugins(w.ctx(), host.PluginQuery{})
		must(t, err)
		var allocs []string
		for _, task := range list.Tasks {
			allocs = append(allocs, string(task.Alloc))
		}
		if !slices.Equal(allocs, want) {
			t.Errorf("%s: %v", when, allocs)
		}
	}
	w.crash()
	known("after a crash", "kept", "lost")
	must(t, w.host.Sync(w.ctx(), host.Workload{Tasks: []host.WorkloadTask{{AllocTask: kept}}}))
	known("after Sync", "kept")
	w.crash()
	known("after Sync and a crash", "kept")
}

// Waiting calls get ErrUnavailable. Nothing is left: no goroutine, process, descriptor, socket. This test is not
// parallel, as it counts those of the test process.
func TestCloseEndsEverything(t *testing.T) {
	w := newEnv(t)
	before, files := runtime.NumGoroutine(), descriptors()
	w.open()
	p := w.plugin("a")
	gate := p.On("CreateVolume").Hold()
	ended := make(chan error, 4)
	l, err := net.Listen("unix", filepath.Join(w.dir, "csi.sock"))
	must(t, err)
	go func() { ended <- w.host.ServeCSI(w.ctx(), "fake", l) }()
	go func() { ended <- w.create("v", "") }()
	go func() { ended <- w.host.Watch(w.ctx(), host.WatchOptions{}, func(host.Event) error { return nil }) }()
	go func() {
		var q host.PluginQuery
		var err error
		for err == nil {
			_, q.MinIndex, err = w.host.Plugins(w.ctx(), q)
		}
		ended <- err
	}()
	<-gate.Arrived()
	must(t, w.host.Close())
	for range 4 {
		if err := <-ended; !errors.Is(err, host.ErrUnavailable) || !strings.Contains(err.Error(), "closed") {
			t.Errorf("a call ended with %v", err)
		}
	}
	gate.Open()
	p.Stop()
	must(t, w.host.Close()) // again
	if _, err := w.host.Status(w.ctx()); !errors.Is(err, host.ErrUnavailable) {
		t.Errorf("a call afterwards: %v", err)
	}
	if left := w.shims(); len(left) > 0 {
		t.Errorf("processes: %v", left)
	}
	if left, _ := filepath.Glob(filepath.Join(w.config.RunDir, "shim-*")); len(left) > 0 {
		t.Errorf("sockets: %v", left)
	}
	for ctx := w.ctx(); (runtime.NumGoroutine() > before || descriptors() > files) && ctx.Err() == nil; {
		time.Sleep(time.Millisecond)
	}
	if n := runtime.NumGoroutine(); n > before {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines, %d before:\n%s", n, before, buf[:runtime.Stack(buf, true)])
	}
	if n := descriptors(); n > files {
		t.Errorf("%d descriptors, %d before", n, files)
	}
}

func descriptors() int {
	fds, _ := os.ReadDir("/proc/self/fd")
	return len(fds)
}
