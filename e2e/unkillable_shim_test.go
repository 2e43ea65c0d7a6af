package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
)

// FIFREEZE and FITHAW of linux/fs.h.
const (
	fsFreeze = 0xC0045877
	fsThaw   = 0xC0045878
)

// freeze has writers to the file system sleep uninterruptibly until thaw is called, or the test ends.
func (d *testDisk) freeze() (thaw func()) {
	d.t.Helper()
	if err := d.control(fsFreeze); err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { _ = d.control(fsThaw) })
	return func() {
		d.t.Helper()
		if err := d.control(fsThaw); err != nil {
			d.t.Fatal(err)
		}
	}
}

func (d *testDisk) control(request uintptr) error {
	dir, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if _, _, failed := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), request, 0); failed != 0 {
		return os.NewSyscallError("ioctl", failed)
	}
	return nil
}

// asleep returns how many threads of a process sleep uninterruptibly, and whether SIGKILL is pending for all of them.
func asleep(pid int) (threads int, killed bool) {
	killed = true
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	for _, status := range tasks {
		text, _ := os.ReadFile(status)
		if strings.Contains(string(text), "\nState:\tD") {
			threads++
			killed = killed && signalled(string(text), unix.SIGKILL)
		}
	}
	return threads, killed && threads > 0
}

// signalled reports whether a signal is pending for a thread, by its /proc/PID/task/TID/status.
func signalled(status string, sig unix.Signal) bool {
	for line := range strings.Lines(status) {
		if mask, is := strings.CutPrefix(line, "SigPnd:\t"); is {
			pending, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
			return err == nil && pending&(1<<(sig-1)) != 0
		}
	}
	return false
}

// unkillable is an env whose shim survives SIGKILL while a disk is frozen.
type unkillable struct {
	*env
	plugin   *pluginTask
	user     host.AllocGroup
	disk     *testDisk
	thaw     func()
	lateCall <-chan error // of the call in which it hangs
	locked   func() []int
}

// newUnkillable opens a host whose shim will hang in the disk of its state, or in another one.
func newUnkillable(t *testing.T, state bool) *unkillable {
	t.Helper()
	t.Parallel()
	disk := newDisk(t, "ext4", "600M")
	w := unopenedEnv(t, allCaps...)
	w.config.SwapBudget, w.config.AnswerTimeout, w.config.Bake = 10*time.Second, 5*time.Second, time.Second
	good := w.config.Shim
	if state {
		w.config.StateDir = filepath.Join(disk.dir, "state")
	} else {
		touch := "touch " + filepath.Join(disk.dir, "here")
		w.config.Shim.Path = fault.Binary(t, faulty, w.dir, "hangs", "Volumes.Create before "+touch,
			"Release before "+touch)
	}
	w.open()
	w.config.Shim = good
	u := &unkillable{env: w, disk: disk}
	u.locked = u.watchLock()
	u.plugin = u.env.addPlugin("alloc-p", csifake.Monolith)
	u.must(u.create("one"))
	u.must(u.create("gone"))
	u.must(u.delete("gone"))
	u.user = u.group("user", request{source: "one"})
	u.must(errOf(u.prepare(u.user)))
	return u
}

// hang freezes the disk and waits until the shim hangs in it.
func (u *unkillable) hang() {
	u.t.Helper()
	u.thaw = u.disk.freeze()
	u.lateCall = background(func() error { return u.create("late") })
	u.waitUntil("the shim hangs in the disk", func() bool { n, _ := asleep(u.pids[0]); return n > 0 })
}

// wantWaiting makes a call and a read. Each waits until its own deadline and returns the reason. Meanwhile no other
// shim is started.
func (u *unkillable) wantWaiting(its time.Duration, says ...string) {
	u.t.Helper()
	ctx, cancel := context.WithTimeout(u.ctx(), its)
	defer cancel()
	end, _ := ctx.Deadline()
	for what, done := range map[string]<-chan error{
		"a call": background(func() error { return u.host.ReleaseAlloc(ctx, "nobody") }),
		"a read": background(func() error { _, _, err := u.host.Volumes(ctx, host.VolumeQuery{}); return err }),
	} {
		u.wantAlone(done)
		err := u.result(what, done)
		if left := time.Until(end); !errors.Is(err, host.ErrUnavailable) ||
			!errors.Is(err, context.DeadlineExceeded) || left > 0 || left < -waitLimit/4 {
			u.t.Errorf("%s ends %s before its time: %v", what, left, err)
		}
		u.wantWords(what, err, says...)
	}
}

// wantAlone checks, until done has a result, that no shim runs but the one that does not exit.
func (u *unkillable) wantAlone(done <-chan error) {
	u.t.Helper()
	old := u.pids[0]
	for len(done) == 0 {
		others := slices.DeleteFunc(shimsOf(u.config.StateDir), func(pid int) bool { return pid == old })
		if threads, killed := asleep(old); len(others) > 0 || threads == 0 || !killed {
			u.t.Fatalf("process %d sleeps in %d threads, was killed: %t; beside it there are the shims %v",
				old, threads, killed, others)
		}
		sleep(u.ctx(), time.Millisecond)
	}
}

// thawAndCheck thaws the disk and checks that everything works again without help.
func (u *unkillable) thawAndCheck() {
	u.t.Helper()
	u.thaw()
	u.t.Logf("the call in which it hung: %v", u.result("the call in which it hung", u.lateCall))
	u.waitUntil("the next shim serves", func() bool {
		st := u.host.ShimState()
		return st.Serving && st.PID != u.pids[0]
	})
	u.checkRecovered()
}

// checkRecovered checks that acknowledged volumes exist, that a swap is possible, and that there were never two shims.
func (u *unkillable) checkRecovered() {
	u.t.Helper()
	u.activeShim()
	var ids []string
	volumes, _, err := u.host.Volumes(u.ctx(), host.VolumeQuery{})
	u.must(err)
	for _, v := range volumes {
		ids = append(ids, string(v.ID))
	}
	if !slices.Contains(ids, "one") || slices.Contains(ids, "gone") {
		u.t.Errorf("volume one was made, gone was deleted; there are %v", ids)
	}
	u.must(u.create("late"))
	u.swap()
	u.must(u.release("user"))
	for _, id := range []string{"one", "late"} {
		u.must(u.delete(id))
	}
	u.stopPlugin(u.plugin)
	if held := u.locked(); !slices.Equal(held, u.pids) {
		u.t.Errorf("the state was locked by %v; those that served are %v", held, u.pids)
	}
	for _, problem := range overlapErrors(u.calls(), u.pids) {
		u.t.Error(problem)
	}
}

// inEachDisk runs a test with a shim that hangs in the disk of its state, and with one that hangs in another disk.
func inEachDisk(t *testing.T, test func(u *unkillable)) {
	slow(t)
	t.Run("state", func(t *testing.T) { test(newUnkillable(t, true)) })
	t.Run("another", func(t *testing.T) { test(newUnkillable(t, false)) })
}

// A shim that hangs in the kernel, so that SIGKILL does not end it, is not replaced while it lives. The swap returns
// the reason, calls wait until their own deadline and return it, and no other shim is started. Once the kernel
// continues, everything works again.
func TestSwapFromAShimThatCannotDie(t *testing.T) {
	inEachDisk(t, func(u *unkillable) {
		here, goOn := filepath.Join(u.dir, "here"), filepath.Join(u.dir, "go-on")
		path := fault.Binary(u.t, faulty, u.dir, "waits", "Rehearse after touch "+here, "Rehearse after wait-for "+goOn)
		var report host.SwapReport
		swap := func() (err error) { report, err = u.host.Swap(u.ctx(), host.Binary{Path: path}); return err }
		swapped := background(swap)
		u.waitUntil("the new shim has rehearsed", func() bool { return exists(here) })
		u.hang()
		u.must(os.WriteFile(goOn, nil, 0o600))
		err := u.result("the swap", swapped)
		u.t.Logf("the swap: %+v: %v", report, err)
		because := []string{"does not exit", fmt.Sprintf("shim %d", u.pids[0]), "state D (disk sleep)", "by itself"}
		u.refused(report, host.SwapRolledBack, host.SwapFence, err, because)
		u.wantWaiting(2*time.Second, append(because, "no shim is active")...)
		if st := u.host.ShimState(); st.Serving || !strings.Contains(st.Reason, because[1]) {
			u.t.Errorf("it stands thus: %+v", st)
		}
		err = u.result("another swap", background(swap))
		u.refused(report, host.SwapRefused, host.SwapActivate, err, because)
		u.wantWaiting(2*time.Second, append(because, "no shim is active")...)
		u.thawAndCheck()
	})
}

// refused checks how a swap ended and that its error contains the words.
func (u *unkillable) refused(
	r host.SwapReport, outcome host.SwapOutcome, step host.SwapStep, err error, says []string,
) {
	u.t.Helper()
	if !errors.Is(err, host.ErrUnavailable) || r.Outcome != outcome || r.Failed != step {
		u.t.Errorf("the swap is %s at %s: %v", r.Outcome, r.Failed, err)
	}
	u.wantWords("the swap", err, append(says, "swap: "+string(step))...)
}

// A shim that was killed, and that the kernel cannot end, is missed once it has not answered for some time.
func TestKilledShimThatCannotDie(t *testing.T) {
	inEachDisk(t, func(u *unkillable) {
		u.hang()
		u.must(unix.Kill(u.pids[0], unix.SIGKILL))
		u.waitUntil("it is known not to die", func() bool {
			return strings.Contains(u.host.ShimState().Reason, "does not exit")
		})
		u.wantWaiting(2*time.Second, "no shim is active", "does not exit", "state D (disk sleep)")
		u.thawAndCheck()
	})
}

// The next host does not open beside a shim that cannot die. Its error names the shim.
func TestNextHostWaitsForAShimThatCannotDie(t *testing.T) {
	slow(t)
	u := newUnkillable(t, false)
	u.hang()
	is := fmt.Sprintf("shim %d", u.pids[0])
	u.must(unix.Kill(u.pids[0], unix.SIGKILL)) // else it would let the state go before it ends
	if err := u.result("close", background(u.host.Close)); err == nil || !strings.Contains(err.Error(), is) {
		t.Errorf("the host is closed: %v", err)
	}
	if err := u.result("the call in which it hung", u.lateCall); !errors.Is(err, host.ErrUnavailable) ||
		errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the call in which it hung: %v", err)
	}
	opened := background(func() error { return errOf(host.Open(u.ctx(), u.config)) })
	u.wantAlone(opened)
	err := <-opened
	if text := fmt.Sprint(err); !errors.Is(err, host.ErrUnavailable) ||
		!strings.Contains(text, is) || !strings.Contains(text, "start the host again") {
		t.Errorf("the next host: %v", err)
	}
	u.config.Workload = host.Workload{
		Allocs: []host.AllocGroup{u.user}, Tasks: []host.WorkloadTask{u.running(u.plugin.task)},
	}
	u.thaw()
	u.open()
	u.checkRecovered()
}
