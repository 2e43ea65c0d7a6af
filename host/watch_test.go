package host_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

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

// A watch of past events ends after all changes that were acknowledged. It ends even if the shim was just killed or
// swapped, or if there are no events.
func TestWatchOfPastEventsEnds(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	if got := w.past(0); len(got) != 0 {
		t.Errorf("of a new node: %v", got)
	}
	w.plugin("a")
	binaries := []string{another(t, w.dir, "one"), another(t, w.dir, "two")}
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
		all := w.past(0)
		if !slices.ContainsFunc(all,
			func(e host.Event) bool { return e.Kind == "volume created" && e.Volume.ID == id }) {
			t.Errorf("no event of the creation of %s: %v", id, all)
		}
		if more := w.past(all[len(all)-1].Seq); len(more) != 0 {
			t.Errorf("after all events: %v", more)
		}
	}
	got := w.past(1 << 40)
	if len(got) != 1 || got[0].Kind != host.EventResync || got[0].Snapshot == nil {
		t.Errorf("after an unknown number: %v", got)
	}
	enough := errors.New("enough")
	if err := w.host.Watch(w.ctx(), host.WatchOptions{Past: true},
		func(host.Event) error { return enough }); err != enough {
		t.Errorf("ended by its callback: %v", err)
	}
}
