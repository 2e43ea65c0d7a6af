// Package priority says how a process is scheduled, has all of its threads scheduled so, and tells beforehand whether that can be taken
// back; and what work that nobody waits for leaves to others (Bite). It keeps nothing. Host and shim may call it, for themselves and for a child; it
// imports the standard library and x/sys/unix.
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

// Schedule is how a process is scheduled.
type Schedule struct {
	unix.SchedAttr        // of each of its threads
	Session        *int32 // nice value of its session; nil: it has none of its own, or the kernel does not tell sessions apart
}

// Usual is how a process is scheduled, by its first thread, if that is of the usual kind and what gives it up may take it back; else nil. 0 is this
// process.
func Usual(pid int) *Schedule {
	base, err := unix.SchedGetAttr(pid, 0)
	if err != nil || base.Policy != unix.SCHED_NORMAL && base.Policy != unix.SCHED_BATCH || !MayReturn(base) {
		return nil
	}
	return &Schedule{*base, session(pid)}
}

// Nicer is s with nice values that are higher by so much.
func (s Schedule) Nicer(by int32) *Schedule {
	s.Nice = min(s.Nice+by, nicest)
	if s.Session != nil {
		s.Session = new(min(*s.Session+by, nicest))
	}
	return &s
}

// Idle is s with what nobody else wants of the processors (SCHED_IDLE, sched(7)): whoever wakes up has one at once.
func (s Schedule) Idle() *Schedule {
	s.Policy = unix.SCHED_IDLE
	if s.Session != nil {
		s.Session = new(int32(nicest))
	}
	return &s
}

const nicest = 19

// MayReturn says whether a thread that has given its priority up may take it back, which without root nobody may. It tries it with one that ends
// afterwards.
func MayReturn(base *unix.SchedAttr) bool {
	may := make(chan bool)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		last := *base
		last.Policy, last.Nice = unix.SCHED_IDLE, nicest
		err := unix.SchedSetAttr(0, &last, 0)
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

// Set sets how a process is scheduled; 0 is this process. A thread that begins meanwhile is scheduled as the one that began it, so it is
// looked again until all were found to be right twice.
func Set(pid int, s *Schedule) error {
	if s.Session != nil {
		if err := setSession(pid, *s.Session); err != nil {
			return fmt.Errorf("set the priority of a session: %w", err)
		}
	}
	for pass, clean := 0, 0; pass < mostPasses; pass++ {
		all, err := set(pid, &s.SchedAttr)
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

func tasks(pid int) string { return fmt.Sprintf("/proc/%d/task", own(pid)) }

// own is pid; 0 is this process's.
func own(pid int) int {
	if pid == 0 {
		return os.Getpid()
	}
	return pid
}

// scheduled says whether a thread is scheduled so, or has ended. A nice value means nothing to an idle one, and stays as it is.
func scheduled(thread int, a *unix.SchedAttr) bool {
	is, err := unix.SchedGetAttr(thread, 0)
	return err != nil || is.Policy == a.Policy && (is.Nice == a.Nice || a.Policy == unix.SCHED_IDLE)
}
