package tenure

import (
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// yielding is how much nicer a rehearsal is than who serves: with this it gets a tenth of a processor that others want, and all of one that
// nobody wants.
const yielding = 10

// gently does what nobody waits for: others that want a processor get it first. Only who may take the priority back gives it up at all, which
// without root is nobody.
func gently(do func()) {
	base := niceOf(0)
	if !mayHurry(base) {
		do()
		return
	}
	setNice(base + yielding)
	defer setNice(base)
	do()
}

// niceOf is the nice value of a thread; 0: of the one that asks. A thread that has ended has that of its process.
func niceOf(thread int) int {
	raw, err := unix.Getpriority(unix.PRIO_PROCESS, thread)
	if err != nil {
		raw, _ = unix.Getpriority(unix.PRIO_PROCESS, os.Getpid())
	}
	return 20 - raw // as getpriority(2) has it
}

// mayHurry says whether a thread that has become nicer may go back. It tries it with one that ends afterwards.
func mayHurry(base int) bool {
	may := make(chan bool)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Setpriority(unix.PRIO_PROCESS, 0, base+1)
		if err == nil {
			err = unix.Setpriority(unix.PRIO_PROCESS, 0, base)
		}
		may <- err == nil
	}()
	return <-may
}

// setNice sets the nice value of every thread. One that begins meanwhile has that of the thread that began it, so it is looked again until all
// have it.
func setNice(n int) {
	for again := true; again; {
		again = false
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return
		}
		for _, entry := range threads {
			thread, err := strconv.Atoi(entry.Name())
			if err == nil && niceOf(thread) != n && unix.Setpriority(unix.PRIO_PROCESS, thread, n) == nil {
				again = true
			}
		}
	}
}
