package launch

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// timerSlack is how late a timer of a shim may be, in nanoseconds, so that several end at once. Go's runtime looks after a process that works every 20 us,
// with Linux's 50 us of slack 12 000 times a second, and whoever has the processor just then loses it for that.
const timerSlack = 500_000

// unpunctual does something on a thread whose timers may be late by timerSlack, as will be those of the processes and threads that it begins
// (PR_SET_TIMERSLACK, prctl(2)). It needs no privilege. Where the kernel refuses, timers stay as they are.
func unpunctual[T any](do func() (T, error)) (T, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if usual, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0); err == nil && usual < timerSlack {
		if unix.Prctl(unix.PR_SET_TIMERSLACK, timerSlack, 0, 0, 0) == nil {
			defer func() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(usual), 0, 0, 0) }()
		}
	}
	return do()
}
