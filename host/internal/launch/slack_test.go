package launch_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// slacks are the timer slacks of the threads of a process, in nanoseconds, as the kernel has them.
func slacks(t *testing.T, pid int) map[string]int {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(threads) == 0 {
		t.Fatalf("threads of %d: %v, %v", pid, threads, err)
	}
	found := map[string]int{}
	for _, path := range threads {
		text, err := os.ReadFile(filepath.Join("/proc", filepath.Base(path), "timerslack_ns"))
		switch {
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
			t.Skip("without CAP_SYS_NICE nobody is told the timer slack of another process")
		case err == nil: // else it has ended
			found[strings.TrimSpace(string(text))]++
		}
	}
	return found
}

// All threads of a shim have the slack, also those that begin later, and no thread of its host has: no other test starts one meanwhile.
func TestTimersOfAShimMayBeLate(t *testing.T) {
	p := start(t, options(t, "plain"))
	for range 20 {
		if slack, err := ask(t.Context(), p.Conn(), "slack"); err != nil || slack != "500000" {
			t.Fatalf("whoever answers has a slack of %s, %v", slack, err)
		}
	}
	if found := slacks(t, p.PID()); len(found) != 1 || found["500000"] < 3 {
		t.Errorf("threads of the shim by their slack: %v", found)
	}
	if found := slacks(t, os.Getpid()); found["500000"] > 0 {
		t.Errorf("threads of the host by their slack: %v", found)
	}
}

// A thread that starts a shim has the slack that it had, whatever that was.
func TestStartLeavesTheTimersOfItsThread(t *testing.T) {
	t.Parallel()
	for _, usual := range []int{1, 50_000, 2_000_000} {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(usual), 0, 0, 0); err != nil {
			t.Fatal(err)
		}
		start(t, options(t, "plain"))
		if is, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0); err != nil || is != usual {
			t.Errorf("the slack was %d and is %d, %v", usual, is, err)
		}
	}
}
