package host_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"holdfast/host"
)

// past returns the past events after a number.
func (w *env) past(after host.Seq) (got []host.Event) {
	w.t.Helper()
	err := w.host.Watch(w.ctx(), host.WatchOptions{After: after, Past: true},
		func(e host.Event) error { got = append(got, e); return nil })
	must(w.t, err)
	return got
}

// It ends after every change that was acknowledged, even if the shim has just been killed or swapped, and if there is
// none.
func TestWatchOfPastEventsEnds(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	if got := w.past(0); len(got) != 0 {
		t.Errorf("of a new node: %v", got)
	}
	w.plugin("a")
	binaries := []string{another(t, w.dir, "one"), another(t, w.dir, "two")}
	var all []host.Event
	for i := range 6 {
		id := host.VolumeID(fmt.Sprintf("v%d", i))
		must(t, w.create(string(id), ""))
		switch i % 3 {
		case 1:
			w.kill()
		case 2:
			_, err := w.host.Swap(w.ctx(), host.Binary{Path: binaries[i/3]})
			must(t, err)
		}
		all = w.past(0)
		if !slices.ContainsFunc(all,
			func(e host.Event) bool { return e.Kind == "volume created" && e.Volume.ID == id }) {
			t.Errorf("no event of the creation of %s: %v", id, all)
		}
		if more := w.past(all[len(all)-1].Seq); len(more) != 0 {
			t.Errorf("after all events: %v", more)
		}
	}
	got := w.past(1 << 40)
	if len(got) != 1 || got[0].Kind != host.EventResync {
		t.Errorf("after an unknown number: %v", got)
	}
	if err := w.host.Watch(w.ctx(), host.WatchOptions{Past: true},
		func(host.Event) error { return errEnough }); err != errEnough {
		t.Errorf("ended by its callback: %v", err)
	}
}

var errEnough = errors.New("enough")

// The watch is cut off in the middle. How much gRPC has buffered by then varies; if it was all, the test tries again.
func TestWatchOfPastEventsContinuesAtTheNextShim(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	w.plugin("a")
	var creating sync.WaitGroup
	for worker := range 10 {
		creating.Go(func() {
			for i := range 60 {
				if err := w.create(fmt.Sprintf("v%d-%d-%s", worker, i, strings.Repeat("x", 100)), ""); err != nil {
					t.Error(err)
				}
			}
		})
	}
	creating.Wait()
	for range 5 {
		if w.pastCutOff() {
			return
		}
	}
	t.Error("it was never cut off")
}

// pastCutOff kills the shim after the first past event, and returns whether that cut the watch off.
func (w *env) pastCutOff() bool {
	w.t.Helper()
	const again = "opening a stream again"
	before := strings.Count(w.log.String(), again)
	var got []host.Seq
	err := w.host.Watch(w.ctx(), host.WatchOptions{Past: true}, func(e host.Event) error {
		if got = append(got, e.Seq); len(got) == 1 {
			was := w.pid()
			must(w.t, syscall.Kill(was, syscall.SIGKILL))
			for w.pid() == was {
				time.Sleep(time.Millisecond)
			}
		}
		return nil
	})
	cut := strings.Count(w.log.String(), again) > before
	all := w.past(0) // now, as gRPC widens its windows by what it has received
	if err != nil || len(got) != len(all) || !slices.IsSorted(got) ||
		len(slices.Compact(slices.Clone(got))) != len(all) {
		w.t.Errorf("%d events of %d, %v", len(got), len(all), err)
	}
	return cut
}

// A watch of past events ends as a call does: with its caller's deadline, or after MaxHold. The error says why no shim
// serves, and starts become less and less frequent.
func TestWithoutAShimCallsEndAfterMaxHold(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.config.MaxHold = time.Second
	w.open()
	w.plugin("a")
	must(t, w.create("v", ""))
	repair := w.damage()
	w.awaitLog("cannot be started")
	began := time.Now()
	_, err := w.host.Status(context.WithoutCancel(t.Context()))
	if held := time.Since(began); held < w.config.MaxHold || !errors.Is(err, host.ErrDamaged) ||
		!strings.Contains(err.Error(), "shim.db") {
		t.Errorf("a call was held for %s: %v", held, err)
	}
	if n := strings.Count(w.log.String(), "cannot be started"); n < 1 || n > 10 {
		t.Errorf("%d starts in %s", n, time.Since(began))
	}
	watch := func(ctx context.Context) error {
		return w.host.Watch(ctx, host.WatchOptions{Past: true},
			func(e host.Event) error { return fmt.Errorf("got %v", e) })
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := watch(ctx); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, host.ErrUnavailable) ||
		!strings.Contains(err.Error(), "shim.db") {
		t.Errorf("with the caller's time: %v", err)
	}
	if err := watch(w.ctx()); errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, host.ErrUnavailable) ||
		!strings.Contains(err.Error(), "shim.db") {
		t.Errorf("after MaxHold: %v", err)
	}
	repair()
	if got := w.past(0); len(got) == 0 {
		t.Error("no events after the repair")
	}
}
