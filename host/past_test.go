package host_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"holdfast/host"
)

// past is what a watch of the past tells of the events after a number.
func (w *world) past(after host.Seq) (told []host.Event) {
	w.t.Helper()
	err := w.host.Watch(w.ctx(), host.WatchOptions{After: after, Past: true}, func(e host.Event) error { told = append(told, e); return nil })
	must(w.t, err)
	return told
}

// A watch of the past ends by itself, where nothing has happened too, and not before it has told of every change that was acknowledged: also when
// the shim has just been killed or swapped.
func TestPastEndsWhenItIsTold(t *testing.T) {
	w := newWorld(t)
	if told := w.past(0); len(told) != 0 {
		t.Errorf("of a new node: %v", told)
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
		if !slices.ContainsFunc(all, func(e host.Event) bool { return e.Kind == "volume created" && e.Volume.ID == id }) {
			t.Errorf("the creation of %s is not told: %v", id, all)
		}
		if more := w.past(all[len(all)-1].Seq); len(more) != 0 {
			t.Errorf("after all are told: %v", more)
		}
	}
	told := w.past(1 << 40)
	if len(told) != 1 || told[0].Kind != host.EventResync {
		t.Errorf("after a number that nobody gave out: %v", told)
	}
	if err := w.host.Watch(w.ctx(), host.WatchOptions{Past: true}, func(host.Event) error { return errEnough }); err != errEnough {
		t.Errorf("ended by its callback: %v", err)
	}
}

var errEnough = errors.New("enough")

// One that is cut off in the middle goes on at the next shim, and ends there. How much is under way when the first event has been read is
// gRPC's to say, which widens its windows as it goes: where that was all, nothing was cut off, and it is done again.
func TestPastGoesOnAtTheNextShim(t *testing.T) {
	w := newWorld(t)
	w.plugin("a")
	for i := range 300 {
		must(t, w.create(fmt.Sprintf("v%d-%s", i, strings.Repeat("x", 100)), ""))
	}
	for range 5 {
		if w.pastCutOff() {
			return
		}
	}
	t.Error("it was never cut off")
}

// pastCutOff kills the shim when the first event of the past has been told, and says whether that cut the others off.
func (w *world) pastCutOff() bool {
	w.t.Helper()
	all := w.past(0)
	const again = "opening a stream again"
	before := strings.Count(w.log.String(), again)
	var told []host.Seq
	err := w.host.Watch(w.ctx(), host.WatchOptions{Past: true}, func(e host.Event) error {
		if told = append(told, e.Seq); len(told) == 1 {
			was := w.pid()
			must(w.t, syscall.Kill(was, syscall.SIGKILL))
			for w.pid() == was {
				time.Sleep(time.Millisecond)
			}
		}
		return nil
	})
	if err != nil || len(told) != len(all) || !slices.IsSorted(told) || len(slices.Compact(slices.Clone(told))) != len(all) {
		w.t.Errorf("%d events of %d, %v", len(told), len(all), err)
	}
	return strings.Count(w.log.String(), again) > before
}

// Where there is no shim a watch of the past ends as a call does: with its caller's time, or after MaxHold. It says why there is none.
func TestPastWithoutAShim(t *testing.T) {
	w := at(t)
	w.config.MaxHold = time.Second
	w.open()
	w.plugin("a")
	must(t, w.create("v", ""))
	repair := w.damage()
	for !strings.Contains(w.log.String(), "cannot be started") {
		time.Sleep(time.Millisecond)
	}
	watch := func(ctx context.Context) error {
		return w.host.Watch(ctx, host.WatchOptions{Past: true}, func(e host.Event) error { return fmt.Errorf("told %v", e) })
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := watch(ctx); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, host.ErrUnavailable) || !strings.Contains(err.Error(), "shim.db") {
		t.Errorf("with the caller's time: %v", err)
	}
	if err := watch(w.ctx()); errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, host.ErrUnavailable) || !strings.Contains(err.Error(), "shim.db") {
		t.Errorf("after MaxHold: %v", err)
	}
	repair()
	if told := w.past(0); len(told) == 0 {
		t.Error("nothing is told after the repair")
	}
}
