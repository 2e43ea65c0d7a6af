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
	if err != nil || base.Policy != unix.SCHED_NORMAL && base.Policy != unix.SCHED_BATCH || !mayHurry(base) {
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

const (
	mostPasses = 100
	passGap    = time.Millisecond // in which a thread shows that is just being made
)

// schedule sets how every thread is scheduled. One that begins meanwhile has that of the thread that began it, so it is looked again until all
// were found to have it twice.
func schedule(a *unix.SchedAttr) {
	for pass, clean := 0, 0; pass < mostPasses && clean < 2; pass++ {
		if clean++; !allScheduled(a) {
			clean = 0
		}
		if clean == 1 {
			time.Sleep(passGap)
		}
	}
}

// allScheduled sets how those threads are scheduled that are so otherwise; true: there was none.
func allScheduled(a *unix.SchedAttr) (all bool) {
	threads, err := os.ReadDir("/proc/self/task")
	all = true
	for _, entry := range threads {
		thread, wrong := strconv.Atoi(entry.Name())
		if wrong == nil && !scheduled(thread, a) && unix.SchedSetAttr(thread, a, 0) == nil {
			all = false
		}
	}
	return all || err != nil
}

// scheduled says whether a thread is scheduled so, or has ended. A nice value means nothing to an idle one, and stays as it is.
func scheduled(thread int, a *unix.SchedAttr) bool {
	is, err := unix.SchedGetAttr(thread, 0)
	return err != nil || is.Policy == a.Policy && (is.Nice == a.Nice || a.Policy == unix.SCHED_IDLE)
}
