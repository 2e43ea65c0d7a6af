package e2e

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"holdfast/internal/csifake"
)

// Who gives up while another one is served is told so: neither a mount nor an unmount that never ran is a success.
func TestDefectV3WaitingInVainIsAnError(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	first := w.use("alloc-1", ask{source: "vol", mode: manyWriters})
	gate := p.On("NodePublishVolume").Times(1).Hold()
	g := w.asking("alloc-2", ask{source: "vol", mode: manyWriters})
	served := goes(func() error { return second(w.prepared(w.ctx(), g)) })
	w.arrives(gate, served)

	third := w.asking("alloc-3", ask{source: "vol", mode: manyWriters})
	err := w.inVain("alloc-3", "alloc-2", func(ctx context.Context) error { return second(w.prepared(ctx, third)) })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a mount that never ran ends with: %v", err)
	}
	if err := w.releasedInVain("alloc-1", "alloc-2"); !errors.Is(err, context.Canceled) {
		t.Errorf("an unmount that never ran ends with: %v", err)
	}
	if _, mounted := w.mounted(first); !mounted || len(w.sent("NodeUnpublishVolume")) > 0 {
		t.Error("the first alloc's mount was touched")
	}
	gate.Open()
	w.must(w.ends("prepare", served))
	for _, id := range []string{"alloc-1", "alloc-2", "alloc-3"} {
		w.must(w.release(id))
	}
	w.must(w.delete("vol"))
	w.exit(p)
}

// Who gives up while it is served or waits leaves the volume to the next, and nobody spins meanwhile.
func TestDefectV4NobodySpinsAndNothingStaysLocked(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	ctx, leave := context.WithCancel(w.ctx())
	defer leave()
	gate := p.On("NodeStageVolume").Times(1).Hold()
	prepare := func(ctx context.Context, id string) <-chan error {
		g := w.asking(id, ask{source: "vol", mode: manyWriters})
		return goes(func() error { return second(w.prepared(ctx, g)) })
	}
	holder := prepare(ctx, "alloc-1")
	w.arrives(gate, holder)
	waiter, third, last := prepare(ctx, "alloc-2"), prepare(w.ctx(), "alloc-3"), prepare(w.ctx(), "alloc-4")
	for _, id := range []string{"alloc-2", "alloc-3", "alloc-4"} {
		w.eventually(id+" waits", func() bool { return w.waits(id) != "" })
	}
	leave()
	for name, done := range map[string]<-chan error{"the holder": holder, "the waiter": waiter} {
		if err := w.ends(name, done); !errors.Is(err, context.Canceled) {
			t.Errorf("%s left, and is told: %v", name, err)
		}
	}
	used := w.busy(2 * time.Second) // one of the two that are left has the volume now, and the other waits
	t.Logf("a shim in which one waits uses %.1f%% of a processor", 100*used)
	if used > 0.1 {
		t.Error("somebody spins")
	}
	if n := len(w.sent("NodeStageVolume")); n > 20 {
		t.Errorf("the call that is open was sent %d times within two seconds", n)
	}
	gate.Open()
	w.must(w.ends("the third", third))
	w.must(w.ends("the last one", last))
	for _, id := range []string{"alloc-1", "alloc-2", "alloc-3", "alloc-4"} {
		w.must(w.release(id))
	}
	w.must(w.delete("vol"))
	w.exit(p)
}

// busy is which part of a processor the shim uses for so long.
func (w *world) busy(long time.Duration) float64 {
	w.t.Helper()
	st, err := w.host.Status(w.ctx())
	w.must(err)
	used, began := w.ticks(st.PID), time.Now()
	<-time.After(long)
	return float64(w.ticks(st.PID)-used) * float64(time.Second/100) / float64(time.Since(began))
}

// ticks is the processor time of a process in hundredths of a second (proc_pid_stat(5): utime and stime).
func (w *world) ticks(pid int) (sum int) {
	w.t.Helper()
	stat := proc(pid, "stat")
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	for _, field := range fields[11:13] {
		n, err := strconv.Atoi(field)
		w.must(err)
		sum += n
	}
	return sum
}
