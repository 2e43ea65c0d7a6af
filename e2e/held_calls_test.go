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

// Each call that a swap holds reaches the new shim once, whether it was made while the old shim was still there or
// while none was active. A call whose deadline passes meanwhile ends then, alone.
func TestHeldCallsReachTheNewShim(t *testing.T) {
	t.Parallel()
	h := newHeldCalls(t)
	var short []pendingCall
	h.swapWhile(func() {
		h.waitReached(h.quiesce)
		short = append(short, h.callWithShortDeadline())
		for n := range 4 {
			h.callAll(fmt.Sprint("early-", n))
			short = append(short, h.callWithShortDeadline())
		}
		h.must(h.quiesce.unset())
		h.waitReached(h.activate)
		for n := range 4 {
			short = append(short, h.callWithShortDeadline())
			h.callAll(fmt.Sprint("late-", n))
		}
		for _, c := range short {
			err := h.result(c.name, c.ended)
			if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "it is being replaced") {
				t.Errorf("%s, whose deadline has passed, ended with: %v", c.name, err)
			}
		}
		for _, c := range h.calls {
			if len(c.ended) > 0 {
				t.Errorf("%s was not held: %v", c.name, <-c.ended)
			}
		}
		h.must(h.activate.unset())
	})
	if report := h.host.Swaps()[0]; report.Held < len(h.calls)+len(short) {
		t.Errorf("%d calls were held, and the swap reports %d", len(h.calls)+len(short), report.Held)
	}
	var want []string
	for _, c := range h.calls {
		want = append(want, c.name)
		err := h.result(c.name, c.ended)
		if err != nil && (!c.contested || !errors.Is(err, host.ErrNotFound) && !errors.Is(err, host.ErrConflict)) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	got := h.arrived()
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the new shim got\n%q, and the calls made were\n%q", got, want)
	}
	for id := range h.volumeStates() {
		h.must(h.delete(id))
	}
	h.stopPlugin(h.plugin)
}

// heldCalls is calls that a swap holds. Each is made once the one before is held.
type heldCalls struct {
	*env
	plugin            *pluginTask
	quiesce, activate *breakpoint
	arrivals          string // the file in which shims note the calls that they get
	calls             []pendingCall
}

// pendingCall is known at the shim by its deadline.
type pendingCall struct {
	name      string
	contested bool // others create and delete the same volume: it may be refused
	ended     <-chan error
}

func newHeldCalls(t *testing.T) *heldCalls {
	t.Helper()
	h := &heldCalls{env: newEnv(t, allCaps...)}
	h.plugin = h.addPlugin("alloc-p", csifake.Monolith)
	h.quiesce, h.activate = h.newBreakpoint("Quiesce before"), h.newBreakpoint("Activate before")
	h.arrivals = filepath.Join(h.dir, "arrivals")
	h.setFaults(slices.Concat(h.quiesce.faults(), h.activate.faults(), []string{"start arrivals " + h.arrivals})...)
	h.swap()
	h.must(h.quiesce.set())
	h.must(h.activate.set())
	return h
}

// callAll makes one call for a volume of its own, and two for a volume that others create and delete, too.
func (h *heldCalls) callAll(id string) {
	h.t.Helper()
	spec := func(id string) host.VolumeSpec { // not parsed: that would wait for a shim
		one := registry.VolumeCapability{Access: oneWriter, Attachment: "file-system"}
		return host.VolumeSpec{
			Namespace: "default", ID: host.VolumeID(id), Name: id, Plugin: "fake",
			Capabilities: []registry.VolumeCapability{one},
		}
	}
	call := func(name string, contested bool, f func(context.Context) error) {
		limit := time.Duration(len(h.calls)+2) * time.Minute // arrived finds the call by it
		h.calls = append(h.calls, pendingCall{name, contested, h.start(limit, f)})
	}
	call("create "+id, false, func(ctx context.Context) error { return errOf(h.host.CreateVolume(ctx, spec(id))) })
	call("create shared for "+id, true, func(ctx context.Context) error {
		return errOf(h.host.CreateVolume(ctx, spec("shared")))
	})
	call("delete shared for "+id, true, func(ctx context.Context) error {
		return h.host.DeleteVolume(ctx, volumeName("shared"))
	})
}

func (h *heldCalls) callWithShortDeadline() pendingCall {
	h.t.Helper()
	f := func(ctx context.Context) error { return h.host.DeleteVolume(ctx, volumeName("none")) }
	return pendingCall{fmt.Sprint("short call after ", len(h.calls)), false, h.start(200*time.Millisecond, f)}
}

// start makes a call and returns once it is held.
func (h *heldCalls) start(limit time.Duration, call func(context.Context) error) (ended <-chan error) {
	h.t.Helper()
	limited, cancel := context.WithTimeout(context.WithoutCancel(h.t.Context()), limit)
	h.t.Cleanup(cancel)
	ctx := newBlockingContext(limited)
	ended = background(func() error { return call(ctx) })
	h.waitUntil("the call is held", func() bool { return isClosed(ctx.waiting) })
	return ended
}

// arrived returns the names of the calls that shims got.
func (h *heldCalls) arrived() (names []string) {
	h.t.Helper()
	text, err := os.ReadFile(h.arrivals)
	h.must(err)
	for line := range strings.Lines(string(text)) {
		method, limit, _ := strings.Cut(strings.TrimSpace(line), " ")
		if method != "Volumes.Create" && method != "Volumes.Delete" {
			continue
		}
		left, err := time.ParseDuration(limit)
		h.must(err)
		name := fmt.Sprintf("%s with %s left", method, left)
		if n := int(math.Ceil(left.Minutes())) - 2; n >= 0 && n < len(h.calls) {
			name = h.calls[n].name
		}
		names = append(names, name)
	}
	return names
}
