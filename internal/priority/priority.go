// Package priority says how the threads of a process are scheduled, has all of them scheduled so, and tells beforehand whether that can be taken
// back. It keeps nothing. Host and shim may call it, for themselves and for a child; it imports the standard library and x/sys/unix.
package priority

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Usual is how a process's first thread is scheduled, if that is of the usual kind and what gives it up may take it back; else nil. 0 is this
// process.
func Usual(pid int) *unix.SchedAttr {
	base, err := unix.SchedGetAttr(pid, 0)
	if err != nil || base.Policy != unix.SCHED_NORMAL && base.Policy != unix.SCHED_BATCH || !MayReturn(base) {
		return nil
	}
	return base
}

// Nicer is base with a nice value that is higher by so much.
func Nicer(base *unix.SchedAttr, by int32) *unix.SchedAttr {
	nicer := *base
	nicer.Nice = min(base.Nice+by, 19)
	return &nicer
}

// MayReturn says whether a thread that has given its priority up may take it back, which without root nobody may. It tries it with one that ends
// afterwards.
func MayReturn(base *unix.SchedAttr) bool {
	may := make(chan bool)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		nicest := *base
		nicest.Policy, nicest.Nice = unix.SCHED_IDLE, 19
		err := unix.SchedSetAttr(0, &nicest, 0)
		if err == nil {
			err = unix.SchedSetAttr(0, base, 0)
		}
		may <- err == nil
	}()
	return <-may
}

const (
	mostPasses = 100
	passGap    = time.Millisecond // in which a thread shows that is just being made
)

// Set sets how every thread of a process is scheduled; 0 is this process. One that begins meanwhile has that of the thread that began it, so it is
// looked again until all were found to have it twice.
func Set(pid int, a *unix.SchedAttr) error {
	for pass, clean := 0, 0; pass < mostPasses; pass++ {
		all, err := set(pid, a)
		if err != nil {
			return fmt.Errorf("set the priority of a process: %w", err)
		}
		if clean++; !all {
			clean = 0
		}
		if clean == 2 {
			return nil
		}
		if clean == 1 {
			time.Sleep(passGap)
		}
	}
	return errors.New("set the priority of a process: there are threads again and again that have another")
}

// set sets how those threads are scheduled that are so otherwise; true: there was none.
func set(pid int, a *unix.SchedAttr) (all bool, err error) {
	threads, err := os.ReadDir(tasks(pid))
	all = true
	for _, entry := range threads {
		thread, wrong := strconv.Atoi(entry.Name())
		if wrong != nil || scheduled(thread, a) {
			continue
		}
		all = false
		if failed := unix.SchedSetAttr(thread, a, 0); !errors.Is(failed, unix.ESRCH) {
			err = errors.Join(err, failed)
		}
	}
	return all, err
}

func tasks(pid int) string {
	if pid == 0 {
		return "/proc/self/task"
	}
	return fmt.Sprintf("/proc/%d/task", pid)
}

// scheduled says whether a thread is scheduled so, or has ended. A nice value means nothing to an idle one, and stays as it is.
func scheduled(thread int, a *unix.SchedAttr) bool {
	is, err := unix.SchedGetAttr(thread, 0)
	return err != nil || is.Policy == a.Policy && (is.Nice == a.Nice || a.Policy == unix.SCHED_IDLE)
}
