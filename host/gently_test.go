package host_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/priority"
)

// nicest is the highest nice value that a thread of a child has while f runs.
func nicest(f func()) (most int32) {
	over := make(chan struct{})
	var looking sync.WaitGroup
	looking.Go(func() {
		for {
			for _, pid := range children() {
				threads, _ := filepath.Glob("/proc/" + pid + "/task/*")
				for _, path := range threads {
					thread, _ := strconv.Atoi(filepath.Base(path))
					if a, err := unix.SchedGetAttr(thread, 0); err == nil {
						most = max(most, a.Nice)
					}
				}
			}
			select {
			case <-over:
				return
			default:
			}
		}
	})
	f()
	close(over)
	looking.Wait()
	return most
}

// A candidate starts gently beside a shim that serves, and is as quick as any when it serves. The first shim, one that is started after a crash, and a
// candidate that calls wait for start in haste.
func TestCandidatesStartGently(t *testing.T) {
	base := priority.Usual(0)
	if base == nil {
		t.Skip("who may not take a priority back, without root nobody, never gives it up")
	}
	w := at(t)
	w.config.SwapBudget, w.config.Bake = patience, time.Millisecond
	next := host.Binary{Path: another(t, w.dir, "next")}
	hasty := func(what string, f func()) {
		t.Helper()
		if most := nicest(f); most != base.Nice {
			t.Errorf("%s: the shim had a nice value of %d", what, most)
		}
	}
	swap := func() {
		_, err := w.host.Swap(w.ctx(), next)
		must(t, err)
	}
	hasty("open", w.open)
	for tries := 1; nicest(swap) == base.Nice; tries++ { // one might not be seen
		if tries == 20 {
			t.Fatal("no candidate starts gently")
		}
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", w.pid()))
	must(t, err)
	for _, entry := range threads {
		thread, err := strconv.Atoi(entry.Name())
		must(t, err)
		if a, err := unix.SchedGetAttr(thread, 0); err == nil && (a.Nice != base.Nice || a.Policy != base.Policy) {
			t.Errorf("the shim that serves has a thread that is scheduled so: %+v", a)
		}
	}
	for len(children()) > 1 { // the replaced one yields, and ends
		time.Sleep(time.Millisecond)
	}
	hasty("a restart", func() {
		was := w.pid()
		w.kill()
		for w.pid() == was {
			time.Sleep(time.Millisecond)
		}
	})
	repair := w.damage()
	for w.host.Standing().Serving {
		time.Sleep(time.Millisecond)
	}
	hasty("a candidate while nobody serves", func() {
		if _, err := w.host.Swap(w.ctx(), next); err == nil {
			t.Error("a state that nobody can read was activated")
		}
	})
	repair()
}
