package mount

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread runs fn on a thread of its own, which ends with fn, so that fn may leave it in any namespace. A process's main thread
// cannot end before the process: if fn got it, it is held until fn has run on another.
func OnThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- OnThread(fn)
			return
		}
		done <- fn()
	}()
	return <-done
}
