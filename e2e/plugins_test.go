package e2e

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// active waits until the active node instance of the plugin is the alloc's.
func (w *world) active(alloc string) {
	w.t.Helper()
	err := w.host.Fingerprints(w.ctx(), host.PluginQuery{Role: "csi-node"}, func(changed []host.PluginFingerprint, _ bool) error {
		for _, f := range changed {
			if string(f.Active.Alloc) == alloc && f.Active.Health.State == "healthy" {
				return io.EOF
			}
		}
		return nil
	})
	if !errors.Is(err, io.EOF) {
		w.t.Fatalf("%s never became active: %v", alloc, err)
	}
}

// The newest healthy alloc of a plugin serves; an older one does again the moment the newer sickens or leaves.
func TestNewerAllocTakesOver(t *testing.T) {
	w := newWorld(t, everything...)
	older := w.plugin("alloc-old", csifake.Monolith)
	w.active("alloc-old")
	w.must(w.create("vol"))
	path, err := w.prepare(w.group("alloc-1", "vol", "single-node-writer"))
	w.must(err)
	newer := w.plugin("alloc-new", csifake.Monolith)
	w.active("alloc-new")
	w.must(os.WriteFile(filepath.Join(path, "f"), nil, 0o600))
	newer.Kill() // sickens
	w.active("alloc-old")
	w.must(w.host.TaskExited(w.ctx(), newer.task.Key(), 1, 0, 9, true))
	w.must(w.release("alloc-1"))
	w.must(w.delete("vol"))
	w.exit(older)
}

// A host that comes back names what still runs: that goes on. What it does not name is taken down.
func TestHostComesBack(t *testing.T) {
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("kept"))
	w.must(w.create("lost"))
	kept := w.group("alloc-kept", "kept", "single-node-writer")
	path, err := w.prepare(kept)
	w.must(err)
	w.must(os.WriteFile(filepath.Join(path, "f"), []byte("x"), 0o600))
	_, err = w.prepare(w.group("alloc-lost", "lost", "single-node-writer"))
	w.must(err)
	w.must(w.host.Close())

	w.config.Workload = host.Workload{Allocs: []host.AllocGroup{kept}, Tasks: []host.WorkloadTask{{AllocTask: p.task, Running: true, Started: w.bootTime()}}}
	w.open()
	w.must(w.release("alloc-lost")) // waits for what goes on by itself
	if err := w.delete("lost"); err != nil {
		t.Errorf("the lost alloc's volume is still used: %v", err)
	}
	if text, err := os.ReadFile(filepath.Join(path, "f")); err != nil || string(text) != "x" {
		t.Errorf("the kept alloc's volume: %q, %v", text, err)
	}
	again, err := w.prepare(kept)
	w.must(err)
	if again != path {
		t.Errorf("prepared again, the volume is at %s, not %s", again, path)
	}
	w.must(w.release("alloc-kept"))
	w.must(w.delete("kept"))
	w.exit(p)
}

// Health does not flap when the shim is started anew: no event tells of a change that was none.
func TestShimRestartIsNoChangeOfHealth(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	probes := func() int {
		calls, err := p.Calls("Probe")
		w.must(err)
		return len(calls)
	}
	before := probes()
	w.killShim()
	for probes() < before+2 {
		if _, err := w.host.Status(w.ctx()); err != nil {
			t.Fatal(err)
		}
	}
	w.must(w.create("mark"))
	err := w.host.Watch(w.ctx(), host.WatchOptions{}, func(e host.Event) error {
		switch e.Kind {
		case "unhealthy", "task unhealthy", "deregistered", "restart asked":
			t.Errorf("an event of a change that was none: %s", e)
		case "volume created":
			return io.EOF
		}
		return nil
	})
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	w.must(w.delete("mark"))
	w.exit(p)
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
