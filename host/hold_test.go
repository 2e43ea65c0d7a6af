package host_test

import (
	"context"
	"errors"
	"io"
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

// The error of a held call says why there is no shim. Calls with time left are answered once there is one.
func TestHeldCallKeepsItsOwnDeadline(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	repair := w.damage()
	w.awaitLog("cannot be started")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := w.host.Status(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, host.ErrUnavailable) ||
		!strings.Contains(err.Error(), "shim.db") {
		t.Errorf("got %v", err)
	}
	repair()
	if _, err := w.host.Status(w.ctx()); err != nil {
		t.Errorf("after the repair: %v", err)
	}
}

// No call fails meanwhile.
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
	var waits [deaths]time.Duration
	for i := range waits {
		was := w.host.ShimState()
		must(t, syscall.Kill(was.PID, syscall.SIGKILL))
		for now := was; !now.Serving || now.PID == was.PID; now = w.host.ShimState() {
			if !now.Serving && !now.Next.IsZero() {
				waits[i] = max(waits[i], now.Next.Sub(now.Since))
			}
			time.Sleep(time.Millisecond)
		}
		if now := w.host.ShimState(); now.Failures != i+1 || !strings.Contains(now.Reason, "killed") {
			t.Errorf("after %d deaths: %+v", i+1, now)
		}
	}
	stop()
	calls.Wait()
	if last := waits[deaths-1]; last < 8*10*time.Millisecond {
		t.Errorf("the waits before the starts were %v", waits)
	}
}

// The call that a shim was cut off at is answered by the next one.
func TestLastLinesOfADeadShimAreLogged(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	task := w.task("a")
	must(t, os.Rename(filepath.Join(w.config.StateDir, "shim.db"), filepath.Join(w.dir, "gone")))
	if _, err := w.host.TaskStarting(w.ctx(), task); err != nil {
		t.Errorf("the call: %v", err)
	}
	if log := w.log.String(); !strings.Contains(log, "its last lines") ||
		!strings.Contains(log, "the store has failed") {
		t.Error("the log does not say why")
	}
}

// The next shim would refuse all of Sync for an entry that is wrong. Such calls fail at once, without a shim too.
func TestRefusedCallsAreNotInTheWorkload(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	rubbish := host.AllocTask{Alloc: "a", Task: "t", Attempt: 1, Sealed: host.Sealed("rubbish")}
	if _, err := w.host.TaskStarting(w.ctx(), rubbish); err == nil {
		t.Error("rubbish was taken for a sealed task")
	}
	repair := w.damage()
	w.awaitLog("cannot be started")
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
	repair()
	if _, err := w.host.Status(w.ctx()); err != nil {
		t.Errorf("after the repair: %v", err)
	}
}

// The shim does the same after a crash.
func TestSyncTakesDownTasksThatItDoesNotName(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	kept, lost := w.task("kept"), w.task("lost")
	for _, task := range []host.AllocTask{kept, lost} {
		_, err := w.host.TaskStarting(w.ctx(), task)
		must(t, err)
	}
	known := func() (allocs []string) {
		list, _, err := w.host.Plugins(w.ctx(), host.PluginQuery{})
		must(t, err)
		for _, task := range list.Tasks {
			allocs = append(allocs, string(task.Alloc))
		}
		return allocs
	}
	w.kill()
	if got := known(); !slices.Equal(got, []string{"kept", "lost"}) {
		t.Errorf("after a crash: %v", got)
	}
	must(t, w.host.Sync(w.ctx(), host.Workload{Tasks: []host.WorkloadTask{{AllocTask: kept}}}))
	if got := known(); !slices.Equal(got, []string{"kept"}) {
		t.Errorf("after Sync: %v", got)
	}
	w.kill()
	if got := known(); !slices.Equal(got, []string{"kept"}) {
		t.Errorf("after Sync and a crash: %v", got)
	}
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
	go func() { ended <- w.create("v", "") }()
	go func() { ended <- w.host.Watch(w.ctx(), host.WatchOptions{}, func(host.Event) error { return nil }) }()
	go func() { ended <- w.host.Restarts(w.ctx(), func([]host.PendingRestart) error { return nil }) }()
	go func() {
		ended <- w.host.Fingerprints(w.ctx(), host.PluginQuery{},
			func([]host.PluginFingerprint, bool) error { return nil })
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
	for end := time.Now().Add(5 * time.Second); (runtime.NumGoroutine() > before || descriptors() > files) &&
		time.Now().Before(end); {
		runtime.Gosched()
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

// Every event after the cursor is received once and in order.
func TestWatchContinuesOverFiveShims(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	w.plugin("a")
	var got []host.Seq
	watched := make(chan error, 1)
	go func() {
		watched <- w.host.Watch(w.ctx(), host.WatchOptions{}, func(e host.Event) error {
			got = append(got, e.Seq)
			if e.Kind == host.EventResync {
				t.Errorf("a resync: %v", e)
			}
			if e.Volume.ID == "last" {
				return io.EOF
			}
			return nil
		})
	}()
	for _, id := range []string{"v1", "v2", "v3", "v4", "v5"} {
		must(t, w.create(id, ""))
		w.kill()
		must(t, w.create(id+"b", ""))
	}
	must(t, w.create("last", ""))
	if err := <-watched; err != io.EOF {
		t.Fatal(err)
	}
	var want []host.Seq
	err := w.host.Watch(w.ctx(), host.WatchOptions{}, func(e host.Event) error {
		if want = append(want, e.Seq); e.Volume.ID == "last" {
			return io.EOF
		}
		return nil
	})
	if err != io.EOF || !slices.Equal(got, want) || !slices.IsSorted(want) || len(want) < 11 {
		t.Errorf("%v\nwatched %v\nthere are %v", err, got, want)
	}
}

// An unknown cursor gets a resync, as does Snapshot. Bad options are refused.
func TestWatchBeginsWithAResync(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	for _, o := range []host.WatchOptions{{After: 1 << 40}, {Snapshot: true}} {
		err := w.host.Watch(w.ctx(), o, func(e host.Event) error {
			if e.Kind != host.EventResync || e.Snapshot == nil {
				t.Errorf("%+v begins with %v", o, e)
			}
			return io.EOF
		})
		if err != io.EOF {
			t.Error(err)
		}
	}
	if err := w.host.Watch(w.ctx(), host.WatchOptions{Role: "../x"}, nil); !errors.Is(err, host.ErrInvalid) {
		t.Errorf("a bad role: %v", err)
	}
}

func TestFingerprintsAreCompleteAtEachShim(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	w.plugin("a")
	begun := 0
	err := w.host.Fingerprints(
		w.ctx(),
		host.PluginQuery{Role: host.RoleNode},
		func(list []host.PluginFingerprint, complete bool) error {
			if complete {
				begun++
			}
			healthy := len(list) == 1 && list[0].Healthy == 1
			switch {
			case healthy && begun == 1:
				w.kill()
			case healthy && begun == 2:
				return io.EOF
			}
			return nil
		},
	)
	if err != io.EOF || begun != 2 {
		t.Errorf("%v after %d beginnings", err, begun)
	}
}
