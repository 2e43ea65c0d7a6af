package tenure

import (
	"os"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/priority"
)

// sched is how a thread is scheduled.
type sched struct {
	policy uint32
	nice   int32
}

// schedules is how many threads there are of each schedule.
func schedules(t *testing.T) map[sched]int {
	t.Helper()
	threads, err := os.ReadDir("/proc/self/task")
	must(t, err)
	values := map[sched]int{}
	for _, entry := range threads {
		thread, err := strconv.Atoi(entry.Name())
		must(t, err)
		if a, err := unix.SchedGetAttr(thread, 0); err == nil { // else it has ended
			values[sched{a.Policy, a.Nice}]++
		}
	}
	return values
}

// only fails the test unless every thread is scheduled so.
func only(t *testing.T, want sched) {
	t.Helper()
	if values := schedules(t); len(values) != 1 || values[want] == 0 {
		t.Errorf("threads by policy and nice value: %v, all should have %v", values, want)
	}
}

// TestGently: for as long as it takes the whole process leaves processors to others, threads that begin meanwhile too; where that is long it gets
// a part all the same. Afterwards it is as before.
func TestGently(t *testing.T) {
	was, err := unix.SchedGetAttr(0, 0)
	must(t, err)
	if !priority.MayReturn(was) {
		t.Skip("who may not take a priority back, without root nobody, never gives it up")
	}
	base := sched{was.Policy, was.Nice}
	synctest.Test(t, func(t *testing.T) {
		gently(func() {
			only(t, sched{unix.SCHED_IDLE, base.nice})
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() { // each needs a thread of its own
					_, err := os.ReadDir("/proc/self/task")
					if err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			only(t, sched{unix.SCHED_IDLE, base.nice})
			time.Sleep(idling + 10*time.Millisecond)
			only(t, sched{base.policy, base.nice + yielding})
		})
	})
	only(t, base)
}
