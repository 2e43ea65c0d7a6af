package e2e

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// TestHeldCallsReachTheNewShim: every call that a swap holds comes to the new shim once, whether it was made while the old shim was still there or
// while none was active. A call whose deadline ends meanwhile ends then, alone.
func TestHeldCallsReachTheNewShim(t *testing.T) {
	t.Parallel()
	l := newLine(t)
	var hasty []heldCall
	l.swapWhile(func() {
		l.eventually("the old shim is about to be quiesced", func() bool { return exists(l.quiesce.reached) })
		hasty = append(hasty, l.hastens())
		for n := range 4 {
			l.joinsAll(fmt.Sprint("early-", n))
			hasty = append(hasty, l.hastens())
		}
		l.must(l.quiesce.opens())
		l.eventually("nobody serves", func() bool { return exists(l.activate.reached) })
		for n := range 4 {
			hasty = append(hasty, l.hastens())
			l.joinsAll(fmt.Sprint("late-", n))
		}
		for _, c := range hasty {
			if err := l.ends(c.name, c.ended); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "it is being replaced") {
				t.Errorf("%s, whose deadline is over, ended with: %v", c.name, err)
			}
		}
		for _, c := range l.calls {
			if len(c.ended) > 0 {
				t.Errorf("%s was not held: %v", c.name, <-c.ended)
			}
		}
		l.must(l.activate.opens())
	})
	if report := l.host.Swaps()[0]; report.Held < len(l.calls)+len(hasty) {
		t.Errorf("%d calls were held, and the swap tells of %d", len(l.calls)+len(hasty), report.Held)
	}
	var want []string
	for _, c := range l.calls {
		want = append(want, c.name)
		if err := l.ends(c.name, c.ended); err != nil && (!c.contested || !errors.Is(err, host.ErrNotFound) && !errors.Is(err, host.ErrConflict)) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	got := l.arrived()
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the new shim got\n%q, and the calls made were\n%q", got, want)
	}
	l.leaves()
}

// line is calls that a swap holds. Each is made once the one before is held.
type line struct {
	*succession
	plugin            *pluginTask
	quiesce, activate *halt
	arrivals          string // the file in which shims note what comes
	calls             []heldCall
}

// heldCall is known at the shim by its deadline.
type heldCall struct {
	name      string
	contested bool // it is about the volume that others are about as well: it may be refused
	ended     <-chan error
}

func newLine(t *testing.T) *line {
	t.Helper()
	l := &line{succession: newSuccession(t, everything...)}
	l.plugin = l.succession.plugin("alloc-p", csifake.Monolith)
	l.quiesce, l.activate, l.arrivals = l.halt("Quiesce before"), l.halt("Activate before"), filepath.Join(l.dir, "arrivals")
	l.follow(slices.Concat(l.quiesce.lines(), l.activate.lines(), []string{"start arrivals " + l.arrivals})...)
	l.swap()
	l.must(l.quiesce.shuts())
	l.must(l.activate.shuts())
	return l
}

// joinsAll has calls join the line: one that makes a volume of its own, and two for one volume that others make and delete as well.
func (l *line) joinsAll(id string) {
	l.t.Helper()
	own, shared := l.spec(id), l.spec("shared")
	l.joins("create "+id, false, func(ctx context.Context) error { return second(l.host.CreateVolume(ctx, own)) })
	l.joins("create shared for "+id, true, func(ctx context.Context) error { return second(l.host.CreateVolume(ctx, shared)) })
	l.joins("delete shared for "+id, true, func(ctx context.Context) error { return l.host.DeleteVolume(ctx, volumeName("shared")) })
}

// spec is a volume's. Nothing is parsed for it: that would wait as well while nobody serves.
func (l *line) spec(id string) host.VolumeSpec {
	one := registry.VolumeCapability{Access: oneWriter, Attachment: "file-system"}
	return host.VolumeSpec{Namespace: "default", ID: host.VolumeID(id), Name: id, Plugin: "fake", Capabilities: []registry.VolumeCapability{one}}
}

// joins has a call join the line. Its deadline is as many minutes away as there are calls then, and one more.
func (l *line) joins(name string, contested bool, call func(context.Context) error) {
	l.t.Helper()
	limit := time.Duration(len(l.calls)+2) * time.Minute
	l.calls = append(l.calls, heldCall{name, contested, l.held(limit, call)})
}

// hastens has a call join the line whose deadline ends soon.
func (l *line) hastens() heldCall {
	l.t.Helper()
	name := fmt.Sprint("hasty call behind ", len(l.calls))
	return heldCall{name, false, l.held(200*time.Millisecond, func(ctx context.Context) error { return l.host.DeleteVolume(ctx, volumeName("none")) })}
}

// held makes a call and returns once it is held: it has nothing to do but to wait for its end.
func (l *line) held(limit time.Duration, call func(context.Context) error) (ended <-chan error) {
	l.t.Helper()
	limited, cancel := context.WithTimeout(context.WithoutCancel(l.t.Context()), limit)
	l.t.Cleanup(cancel)
	ctx := &heeded{Context: limited, heed: make(chan struct{})}
	ended = goes(func() error { return call(ctx) })
	select {
	case <-ctx.heed:
	case <-time.After(patience):
		l.t.Fatal("a call waits for nothing")
	}
	return ended
}

// arrived is the names of the calls in the order in which shims got them.
func (l *line) arrived() (names []string) {
	l.t.Helper()
	text, err := os.ReadFile(l.arrivals)
	l.must(err)
	for entry := range strings.Lines(string(text)) {
		method, waits, _ := strings.Cut(strings.TrimSpace(entry), " ")
		if !slices.Contains([]string{"Volumes.Create", "Volumes.Delete"}, method) {
			continue
		}
		left, err := time.ParseDuration(waits)
		l.must(err)
		name := fmt.Sprintf("%s that waits for %s", method, left)
		if n := int(math.Ceil(left.Minutes())) - 2; n >= 0 && n < len(l.calls) {
			name = l.calls[n].name
		}
		names = append(names, name)
	}
	return names
}

// leaves deletes all volumes.
func (l *line) leaves() {
	l.t.Helper()
	for id := range l.states() {
		l.must(l.delete(id))
	}
	l.exit(l.plugin)
}
