package benchswap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"holdfast/host"
)

// expectations are the events that calls which ended well must have led to, each exactly once.
type expectations struct {
	mu      sync.Mutex // guards volumes and uses
	volumes []string   // created and deleted
	uses    []string   // allocs that were prepared and released, with one volume each
}

func (x *expectations) volume(id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.volumes = append(x.volumes, id)
}

func (x *expectations) use(alloc string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.uses = append(x.uses, alloc)
}

// What an event may be about that the load causes.
var (
	ofVolumes = []host.EventKind{"volume created", "volume deleted"}
	ofUses    = []host.EventKind{"claimed", "published", "unpublished", "released"}
)

// told is an event in short.
type told struct {
	seq     host.Seq
	kind    host.EventKind
	subject string
}

// remembered is how many of the last events are told again at the end, to another watcher.
const remembered = 5000

// witness watches from the beginning to the end, over every swap.
type witness struct {
	h      *host.Host
	stop   context.CancelFunc
	ended  chan error
	mu     sync.Mutex // guards what follows
	last   host.Seq
	tail   []told
	counts map[told]int // seq is 0
	wrong  []string
	n      int
}

func watch(h *host.Host) *witness {
	ctx, stop := context.WithCancel(context.Background())
	w := &witness{h: h, stop: stop, ended: make(chan error, 1), counts: map[told]int{}}
	go func() { w.ended <- h.Watch(ctx, host.WatchOptions{}, w.see) }()
	return w
}

func (w *witness) see(e host.Event) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if e.Seq <= w.last {
		w.wrong = append(w.wrong, fmt.Sprintf("after event %d comes %s", w.last, e))
	}
	w.last = e.Seq
	w.n++
	s := subject(e)
	if w.tail = append(w.tail, s); len(w.tail) > 2*remembered {
		w.tail = slices.Clone(w.tail[remembered:])
	}
	switch {
	case slices.Contains(ofVolumes, e.Kind), slices.Contains(ofUses, e.Kind):
		w.counts[told{0, s.kind, s.subject}]++
	case slices.Contains([]host.EventKind{"resync", "unhealthy", "task unhealthy", "deregistered", "restart asked",
		"mount lost"}, e.Kind):
		w.wrong = append(w.wrong, "nothing has happened, and an event says: "+e.String())
	}
	return nil
}

func subject(e host.Event) told {
	if slices.Contains(ofUses, e.Kind) {
		return told{e.Seq, e.Kind, string(e.Alloc)}
	}
	return told{e.Seq, e.Kind, string(e.Volume.ID)}
}

// judge ends the watching once the witness has seen what the last call led to, and says what was lost, or told twice.
func (w *witness) judge(t testing.TB, x *expectations) (events int) {
	t.Helper()
	_, index, err := w.h.Volumes(t.Context(), host.VolumeQuery{Name: host.VolumeName{Namespace: "default", ID: "none"}})
	must(t, err)
	again := w.again(t, index)
	w.settle(again)
	w.stop()
	if err := <-w.ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the watch ended: %v", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, wrong := range w.wrong {
		t.Error(wrong)
	}
	w.compare(t, x.volumes, ofVolumes)
	w.compare(t, x.uses, ofUses)
	mine := w.tail[max(0, len(w.tail)-len(again)):]
	if !slices.Equal(mine, again) {
		t.Errorf("of the last %d events a new watcher is told others than the one that was there when they happened",
			len(again))
	}
	return w.n
}

// settle waits until the witness has seen what others were told.
func (w *witness) settle(again []told) {
	for end := time.Now().Add(patience); len(again) > 0 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		w.mu.Lock()
		last := w.last
		w.mu.Unlock()
		if last >= again[len(again)-1].seq {
			return
		}
	}
}

func (w *witness) compare(t testing.TB, subjects []string, kinds []host.EventKind) {
	t.Helper()
	for _, s := range subjects {
		for _, kind := range kinds {
			if n := w.counts[told{0, kind, s}]; n != 1 {
				t.Errorf("%s %s: told %d times", kind, s, n)
			}
		}
	}
}

// again is what a new watcher is told of the last events, up to the last one.
func (w *witness) again(t testing.TB, index host.Seq) (all []told) {
	t.Helper()
	w.mu.Lock()
	after := host.Seq(0)
	if len(w.tail) > remembered {
		after = w.tail[len(w.tail)-remembered].seq
	}
	w.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	quiet := time.AfterFunc(time.Second, cancel)
	err := w.h.Watch(ctx, host.WatchOptions{After: after}, func(e host.Event) error {
		quiet.Reset(time.Second)
		all = append(all, subject(e))
		if e.Seq >= index {
			return io.EOF
		}
		return nil
	})
	if !errors.Is(err, io.EOF) && !errors.Is(err, context.Canceled) {
		t.Errorf("watch again: %v", err)
	}
	return all
}
