package host_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/fault"
)

func TestCloseEndsASwap(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	reached := filepath.Join(w.dir, "reached")
	swapped := make(chan error, 1)
	go func() {
		_, err := w.host.Swap(
			w.ctx(),
			host.Binary{
				Path: fault.Binary(t, faultyShim, w.dir, "hangs", "Rehearse before touch "+reached,
					"Rehearse before hang"),
			},
		)
		swapped <- err
	}()
	awaitFile(t, reached)
	must(t, w.host.Close())
	select {
	case err := <-swapped:
		if !errors.Is(err, host.ErrUnavailable) {
			t.Errorf("the swap ended with %v", err)
		}
	case <-time.After(patience):
		t.Fatal("Close did not end the swap")
	}
	if left := w.shims(); len(left) > 0 {
		t.Errorf("processes: %v", left)
	}
	if left, _ := filepath.Glob(filepath.Join(w.config.StateDir, "rehearsal*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if _, err := w.host.Swap(w.ctx(), host.Binary{Path: shimBinary}); !errors.Is(err, host.ErrUnavailable) {
		t.Errorf("a closed host: %v", err)
	}
}

func awaitFile(t *testing.T, path string) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(path); err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s is never made", path)
		}
	}
}

// The caller goes while the old shim quiesces: the old shim continues.
func TestCanceledSwapLeavesTheOldShim(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	reached, goOn := filepath.Join(w.dir, "reached"), filepath.Join(w.dir, "go-on")
	w.config.Shim = host.Binary{
		Path: fault.Binary(t, faultyShim, w.dir, "waits", "Quiesce before touch "+reached,
			"Quiesce before wait-for "+goOn),
	}
	w.open()
	before := w.pid()
	ctx, cancel := context.WithCancel(w.ctx())
	swapped := make(chan error, 1)
	go func() { _, err := w.host.Swap(ctx, host.Binary{Path: another(t, w.dir, "next")}); swapped <- err }()
	awaitFile(t, reached)
	cancel()
	if err := <-swapped; !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	must(t, os.WriteFile(goOn, nil, 0o600))
	if _, err := w.host.TaskStarting(w.ctx(), w.task("a")); err != nil {
		t.Errorf("a call after it: %v", err)
	}
	if after := w.pid(); after != before {
		t.Errorf("process %d served, and %d does", before, after)
	}
}

// Calls are held, so the binary of a frozen standby is started instead.
func TestRollbackDoesNotWaitForAFrozenStandby(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.config.SwapBudget, w.config.Bake = 4*time.Second, time.Hour
	w.open()
	old := w.pid()
	report, err := w.host.Swap(w.ctx(), host.Binary{Path: another(t, w.dir, "young")})
	must(t, err)
	must(t, syscall.Kill(old, syscall.SIGSTOP))
	w.kill()
	_, err = w.host.TaskStarting(w.ctx(), w.task("a"))
	must(t, err)
	if s := w.host.ShimState(); s.SHA256 != report.From || s.PID == old {
		t.Errorf("%+v serves", s)
	}
	if err := syscall.Kill(old, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the frozen one: %v", err)
	}
	if last := w.host.Swaps()[0]; last.Outcome != host.SwapRolledBack || last.Reason == "" {
		t.Errorf("%+v", last)
	}
}
