package e2e

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// Whose time is up is told what the alloc waits for: here, a node plugin that nobody runs. The shim says so, or if it comes too late the host.
func TestDeadlineSaysWhatIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	c := w.plugin("alloc-c", csifake.Controller)
	w.must(w.create("vol"))
	ctx, cancel := context.WithTimeout(w.ctx(), 2*time.Second)
	defer cancel()
	_, err := w.host.PrepareAlloc(ctx, w.group("alloc-1", "vol", "single-node-writer"))
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "it serves only csi-controller here") {
		t.Errorf("prepare: %v", err)
	}
	w.must(w.release("alloc-1"))
	w.must(w.delete("vol"))
	w.exit(c)
}

// A living task that the shim cannot take over holds up nothing: neither a host that opens, nor the shims that come after it.
func TestOneOddTaskHoldsUpNothing(t *testing.T) {
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	odd := host.WorkloadTask{AllocTask: host.AllocTask{Alloc: "alloc-odd", Task: "plugin", Attempt: 1, Sealed: []byte("of nobody")}, Running: true}
	w.must(w.host.Sync(w.ctx(), host.Workload{Tasks: []host.WorkloadTask{odd, {AllocTask: p.task, Running: true, Started: w.bootTime()}}}))
	w.killShim()
	w.must(w.story())
	w.exit(p)
}

// Plugins that run are found where they were told to listen, also when the host comes back with another run directory.
func TestAnotherRunDirectory(t *testing.T) {
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	w.must(w.host.Close())
	first := w.config.RunDir
	w.config.Workload = host.Workload{Tasks: []host.WorkloadTask{{AllocTask: p.task, Running: true, Started: w.bootTime()}}}
	w.config.RunDir = w.dir + "/run2"
	w.open()
	_, err := w.prepare(w.group("alloc-1", "vol", "single-node-writer"))
	w.must(err)
	w.must(w.release("alloc-1"))
	w.must(w.delete("vol"))
	w.exit(p)
	unmount(t, first)
}
