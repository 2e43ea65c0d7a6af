package tenure

import (
	"os"
	"strconv"
	"sync"
	"testing"
)

// niceValues is how many threads there are of each nice value.
func niceValues(t *testing.T) map[int]int {
	t.Helper()
	threads, err := os.ReadDir("/proc/self/task")
	must(t, err)
	values := map[int]int{}
	for _, entry := range threads {
		thread, err := strconv.Atoi(entry.Name())
		must(t, err)
		values[niceOf(thread)]++
	}
	return values
}

// TestGently: the whole process is nicer for as long as it takes, threads that begin meanwhile too, and none is afterwards.
func TestGently(t *testing.T) {
	base := niceOf(0)
	if !mayHurry(base) {
		t.Skip("who may not lower a nice value, without root nobody, never raises it")
	}
	gently(func() {
		if values := niceValues(t); len(values) != 1 || values[base+yielding] == 0 {
			t.Errorf("threads by nice value: %v, all should have %d", values, base+yielding)
		}
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
	})
	if values := niceValues(t); len(values) != 1 || values[base] == 0 {
		t.Errorf("threads by nice value: %v, all should have %d", values, base)
	}
}
