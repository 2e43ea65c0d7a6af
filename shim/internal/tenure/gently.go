package tenure

import (
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// What a rehearsal leaves to who serves.
const (
	// idling is how long it takes only what nobody else wants of the processors (SCHED_IDLE, sched(7)): whoever wakes up has one at once.
	idling = 3 * time.Second
	// yielding is how much nicer it is than who serves after that, so that it ends where processors are always wanted: with this it gets a tenth.
	yielding = 10
)

// gently does what nobody waits for: others that want a processor get it first. Only who may take the priority back gives it up at all, which
// without root is nobody.
func gently(do func()) {
	base, err := unix.SchedGetAttr(0, 0)
	if err != nil || !mayHurry(base) {
		do()
		return
	}
	idle, nicer := *base, *base
	idle.Policy = unix.SCHED_IDLE
	nicer.Nice = min(base.Nice+yielding, 19)
	var p pace
	p.set(&idle)
	long := time.AfterFunc(idling, func() { p.set(&nicer) })
	defer p.end(base)
	defer long.Stop()
	do()
}

// pace is how this process is scheduled, until its end.
type pace struct {
	mu   sync.Mutex // guards over; held while threads are set
	over bool
}

func (p *pace) set(a *unix.SchedAttr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.over {
		schedule(a)
	}
}

func (p *pace) end(a *unix.SchedAttr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	schedule(a)
}

// mayHurry says whether a thread that has given its priority up may take it back. It tries it with one that ends afterwards.
func mayHurry(base *unix.SchedAttr) bool {
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

// schedule sets how every thread is scheduled. One that begins meanwhile has that of the thread that began it, so it is looked again until all
// have it.
func schedule(a *unix.SchedAttr) {
	for again := true; again; {
		again = false
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return
		}
		for _, entry := range threads {
			thread, err := strconv.Atoi(entry.Name())
			if err == nil && !scheduled(thread, a) && unix.SchedSetAttr(thread, a, 0) == nil {
				again = true
			}
		}
	}
}

// scheduled says whether a thread is scheduled so, or has ended.
func scheduled(thread int, a *unix.SchedAttr) bool {
	is, err := unix.SchedGetAttr(thread, 0)
	return err != nil || is.Policy == a.Policy && is.Nice == a.Nice
}
