package agent

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/host/agent/taskdriver"
)

// While a write hangs in the disk, everything that only reads answers, and says what was true before.
func TestStatusAnswersWhileTheDiskHangs(t *testing.T) {
	inWorld(t, func(w *world) {
		w.submit(job("old", "service", tasks("g", task("main", ""))))
		old := w.awaitRunning("old")
		hangs, goes := make(chan struct{}, 1), make(chan struct{})
		w.agent.ledger.before = func() error {
			select {
			case hangs <- struct{}{}:
			default:
			}
			<-goes
			return nil
		}
		submitted := make(chan error, 1)
		go func() {
			_, err := w.agent.Submit(w.Context(), job("new", "service", tasks("g", task("main", ""))), Source{}, w.shim, SubmitOptions{})
			submitted <- err
		}()
		<-hangs
		read := make(chan struct{})
		go func() {
			defer close(read)
			if jobs := w.agent.Jobs(); len(jobs) != 1 {
				t.Errorf("%d jobs are published, one is on disk", len(jobs))
			}
			if r, err := w.agent.Find(string(old.ID)); err != nil || r.State != AllocRunning {
				t.Errorf("the old alloc: %v", err)
			}
			if len(w.agent.Allocs()) != 1 || w.agent.record(old.ID) == nil {
				t.Error("the old alloc is not listed")
			}
			if err := w.agent.Logs(w.Context(), old.ID, "main", taskdriver.Stdout, false, nil); err != nil {
				t.Error(err)
			}
			w.agent.Retry()
			ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
			defer cancel()
			if err := w.agent.Await(ctx, func(all []*AllocRecord) bool { return len(all) == 1 }); err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
		select {
		case <-read:
		default:
			t.Error("who reads waits for the disk")
		}
		close(goes)
		if err := <-submitted; err != nil {
			t.Error(err)
		}
		<-read
		w.awaitRunning("new")
		if n := w.count("start "); n != 2 {
			t.Errorf("%d starts: %s", n, strings.Join(w.all(), "; "))
		}
	})
}
