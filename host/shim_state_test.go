package host_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/proc"
)

// fragile returns a shim that exits at its start while a file exists.
func (w *env) fragile(name string) (b host.Binary, flag string) {
	flag = filepath.Join(w.dir, name+".broken")
	return w.wrapped(name, fmt.Sprintf("[ ! -e %s ] || { echo %s is broken >&2; exit 3; }", flag, name)), flag
}

// During a crash loop, ShimState has the reason and the time of the next start. A swap ends the loop at once.
func TestSwapEndsACrashLoop(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	binary, flag := w.fragile("loops")
	w.config.Shim = binary
	w.open()
	before := w.host.ShimState()
	if !before.Serving || before.PID != w.pid() || before.Failures != 0 {
		t.Errorf("at first: %+v", before)
	}
	must(t, os.WriteFile(flag, nil, 0o600))
	w.kill()
	loop := w.until("in a crash loop", func(s host.ShimState) bool { return s.Failures >= 5 && !s.Next.IsZero() })
	if loop.Serving || loop.PID != 0 || !strings.Contains(loop.Reason, "loops is broken") || // its last lines
		loop.SHA256 != before.SHA256 || !loop.Since.After(before.Since) {
		t.Errorf("in the loop: %+v", loop)
	}
	if report, err := w.host.Swap(w.ctx(), host.Binary{Path: flag}); err == nil ||
		report.Outcome != host.SwapRefused {
		t.Errorf("a bad swap: %v, %+v", err, report)
	}
	report, err := w.host.Swap(w.ctx(), host.Binary{Path: shimBinary})
	must(t, err)
	if len(report.Warnings) != 1 || !strings.Contains(report.Warnings[0], "without a rehearsal") {
		t.Errorf("warnings: %q", report.Warnings)
	}
	if s := w.host.ShimState(); !s.Serving || s.SHA256 != report.To || s.PID != w.pid() || !s.Next.IsZero() {
		t.Errorf("after the swap: %+v", s)
	}
}

// The hanging start is called off, and the new shim answers waiting calls.
func TestSwapEndsAStartThatHangs(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	flag := filepath.Join(w.dir, "hangs.now")
	w.config.Shim, w.config.StartTimeout = w.wrapped("hangs", "[ ! -e "+flag+" ] || exec sleep 3600"), patience
	w.open()
	task := w.task("a")
	must(t, os.WriteFile(flag, nil, 0o600))
	w.kill()
	w.until("without a shim", func(s host.ShimState) bool { return !s.Serving })
	call := make(chan error, 1)
	go func() { _, err := w.host.TaskStarting(w.ctx(), task); call <- err }()
	report, err := w.host.Swap(w.ctx(), host.Binary{Path: shimBinary})
	must(t, err)
	must(t, <-call)
	if s := w.host.ShimState(); !s.Serving || s.SHA256 != report.To || !strings.Contains(s.Reason, "called off") ||
		len(w.shims()) != 1 {
		t.Errorf("%+v serves, of the processes %v", s, w.shims())
	}
}

// freeze stops the active shim. The signal is sent, and the state follows.
func (w *env) freeze() (pid int) {
	w.t.Helper()
	pid = w.pid()
	must(w.t, syscall.Kill(pid, syscall.SIGSTOP))
	w.until("frozen", func(host.ShimState) bool {
		st, _ := proc.ReadStat(pid)
		return st.State == 'T'
	})
	return pid
}

// The next shim answers the call that the frozen one had.
func TestFrozenShimIsStartedAgain(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.config.AnswerTimeout = 3 * time.Second
	w.open()
	w.freeze()
	if _, err := w.host.TaskStarting(w.ctx(), w.task("a")); err != nil {
		t.Error(err)
	}
	if log := w.log.String(); !strings.Contains(log, "it gave no answer for 3s, and was killed") {
		t.Error("the log does not say why")
	}
}

// The frozen shim is killed, as it does not release the state. ShimState shows each slow step, and the operator.
func TestFrozenShimIsReplaced(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	// the new shim reads the state without a limit of the budget, as the frozen one has not released it
	w.config.AnswerTimeout, w.config.Bake, w.config.SwapBudget = time.Hour, time.Hour, 3*time.Second
	w.open()
	task := w.task("a")
	if s := w.host.ShimState(); s.Swap != nil || !s.Bakes.IsZero() {
		t.Errorf("at first: %+v", s)
	}
	frozen := w.freeze()
	call := make(chan error, 1)
	go func() { _, err := w.host.TaskStarting(w.ctx(), task); call <- err }()
	next := host.Binary{Path: another(t, w.dir, "next")}
	var report host.SwapReport
	swapped := make(chan error, 1)
	go func() {
		var err error
		report, err = w.host.SwapAs(w.ctx(), next, "tester")
		swapped <- err
	}()
	for _, step := range []host.SwapStep{host.SwapPrepare, host.SwapQuiesce, host.SwapFence} {
		s := w.until("at "+string(step), func(s host.ShimState) bool { return s.Swap != nil && s.Swap.Step == step })
		if s.Swap.By != "tester" || s.Swap.Path != next.Path || s.Swap.Began.IsZero() ||
			s.Swap.Since.Before(s.Swap.Began) || !s.Serving {
			t.Errorf("at %s: %+v, %+v", step, s, s.Swap)
		}
	}
	must(t, <-swapped)
	if len(report.Warnings) != 1 || !strings.Contains(report.Warnings[0], "gives no copy of the state") {
		t.Errorf("%+v", report)
	}
	if err := syscall.Kill(frozen, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the frozen shim: %v", err)
	}
	must(t, <-call)
	if s := w.host.ShimState(); !s.Serving || s.SHA256 != report.To || s.Swap != nil ||
		time.Until(s.Bakes) < time.Hour/2 {
		t.Errorf("%+v", s)
	}
}

// A swap counts until the configuration names another binary than before.
func TestNextHostRunsWhatWasSwappedTo(t *testing.T) {
	t.Parallel()
	w := openLongBake(t)
	next := func(when, want string) {
		t.Helper()
		must(t, w.host.Close())
		w.open()
		if got := w.host.ShimState().SHA256; got != want {
			t.Errorf("after %s, %s runs", when, got)
		}
	}
	report, err := w.host.Swap(w.ctx(), host.Binary{Path: another(t, w.dir, "next")})
	must(t, err)
	next("a swap", report.To)
	next("a restart", report.To)
	if last := w.host.Swaps()[0]; last.Outcome != host.SwapCommitted {
		t.Errorf("the swap is %s for the next host", last.Outcome)
	}
	w.config.Shim = host.Binary{Path: another(t, w.dir, "configured")}
	text, err := os.ReadFile(w.config.Shim.Path)
	must(t, err)
	sum := fmt.Sprintf("%x", sha256.Sum256(text))
	next("a change of the configuration", sum)
	must(t, os.WriteFile(filepath.Join(w.config.StateDir, "shim.json"), []byte("rubbish"), 0o600))
	next("damage of the record", sum)
}

// The binary was in its bake when its host died. The next host is called off while it starts that binary, which decides
// nothing. For the host after that, the binary does not start.
func TestNextHostRollsBack(t *testing.T) {
	t.Parallel()
	w := openLongBake(t)
	w.plugin("a")
	hangs, reached := filepath.Join(w.dir, "hangs"), filepath.Join(w.dir, "reached")
	broken := filepath.Join(w.dir, "broken")
	report, err := w.host.Swap(w.ctx(), w.wrapped("young", fmt.Sprintf(
		"[ ! -e %s ] || exit 3\n[ ! -e %s ] || { : > %s; exec sleep 3600; }", broken, hangs, reached)))
	must(t, err)
	must(t, w.create("v", ""))
	must(t, w.host.Close())
	must(t, os.WriteFile(hangs, nil, 0o600))
	ctx, callOff := context.WithCancel(w.ctx())
	go func() {
		w.awaitFile(reached)
		callOff()
	}()
	if h, err := host.Open(ctx, w.config); err == nil {
		must(t, h.Close())
		t.Error("a shim that hangs was started")
	}
	must(t, os.WriteFile(broken, nil, 0o600))
	w.open()
	if s := w.host.ShimState(); s.SHA256 != report.From {
		t.Errorf("%s runs", s.SHA256)
	}
	if last := w.host.Swaps()[0]; last.Outcome != host.SwapRolledBack || last.Failed != host.SwapBake ||
		last.Reason == "" {
		t.Errorf("%+v", last)
	}
	if list, _, err := w.host.Volumes(w.ctx(), host.VolumeQuery{}); err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
}
