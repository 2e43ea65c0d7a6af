package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
)

// skewEnv is an env whose shim is swapped between two releases under load.
type skewEnv struct {
	*env
	deleted atomic.Int64 // volumes, each of which was created and used
	load    sync.WaitGroup
	pause   sync.RWMutex // held for reading while a volume exists
	end     context.CancelFunc
	events  eventList
	standby *pluginTask // a second instance of the plugin, which becomes unhealthy at its first failed probe
}

// begin creates, uses and deletes volumes, reads lists and watches events until end is called.
func (s *skewEnv) begin() {
	ctx, cancel := context.WithCancel(s.t.Context())
	s.end = cancel
	for worker := range 3 {
		s.load.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				if err := s.useVolume(fmt.Sprintf("v-%d-%d", worker, n)); err != nil {
					s.t.Errorf("a call has failed: %v", err)
					return
				}
				s.deleted.Add(1)
			}
		})
	}
	s.load.Go(func() {
		for ctx.Err() == nil {
			if _, _, err := s.host.Volumes(s.ctx(), host.VolumeQuery{}); err != nil {
				s.t.Errorf("a read has failed: %v", err)
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	s.load.Go(func() {
		err := s.host.Watch(ctx, host.WatchOptions{}, func(e host.Event) error { s.events.add(e); return nil })
		if !errors.Is(err, context.Canceled) {
			s.t.Errorf("the watch ended: %v", err)
		}
	})
}

// stateAtRest reads the state while no volume is created, used or deleted.
func (s *skewEnv) stateAtRest() stateFile {
	s.t.Helper()
	s.pause.Lock()
	defer s.pause.Unlock()
	return s.stateOf()
}

// useVolume is the life of a volume that a task writes to.
func (s *skewEnv) useVolume(id string) error {
	s.pause.RLock()
	defer s.pause.RUnlock()
	if err := s.create(id); err != nil {
		return fmt.Errorf("create %s: %w", id, err)
	}
	path, err := s.prepare(s.group("a-"+id, request{source: id}))
	if err != nil {
		return fmt.Errorf("prepare a-%s: %w", id, err)
	}
	if err := os.WriteFile(filepath.Join(path, "f"), []byte(id), 0o600); err != nil {
		return err
	}
	if err := s.release("a-" + id); err != nil {
		return fmt.Errorf("release a-%s: %w", id, err)
	}
	return s.delete(id)
}

// swap swaps to a release, and waits until volumes were created and deleted under it.
func (s *skewEnv) swap(to release) host.ShimStatus {
	s.t.Helper()
	report, err := s.host.Swap(s.ctx(), to.binary)
	s.must(err)
	st, err := s.host.Status(s.ctx())
	s.must(err)
	if st.Schema != to.schema || st.Protocol != to.protocol || report.Protocol != to.protocol ||
		st.SHA256 != report.To {
		s.t.Errorf("after a swap to %s: %+v, and the report says %+v", to.name, st, report)
	}
	before := s.deleted.Load()
	s.waitUntil("volumes are used under "+to.name, func() bool { return s.deleted.Load() >= before+6 || s.t.Failed() })
	return st
}

// makeSick has the active shim rewrite the record of the standby instance: it becomes unhealthy, then healthy.
func (s *skewEnv) makeSick(after host.Seq) {
	s.t.Helper()
	s.standby.On("Probe").Times(2).NotReady()
	at := after
	for _, kind := range []host.EventKind{"unhealthy", "healthy"} {
		at = s.waitEvent(func(e host.Event) bool {
			return e.Seq > at && e.Kind == kind && e.Role == "csi-node" && e.Alloc == s.standby.task.Alloc
		}).Seq
	}
}

// checkEvents compares the events that the watcher got with the history.
func (s *skewEnv) checkEvents() {
	s.t.Helper()
	got, last := s.events.all(), s.events.last()
	for _, problem := range flapErrors(got, s.standby.task.Alloc) {
		s.t.Error(problem)
	}
	if problem := eventDiff(got, s.eventsUntil(func(e host.Event) bool { return e.Seq >= last })); problem != "" {
		s.t.Error(problem)
	}
}

// flapErrors returns the events that a swap must not cause. The instances of one alloc may be unhealthy.
func flapErrors(events []host.Event, unhealthy host.AllocID) (problems []string) {
	last := host.Seq(0)
	for _, e := range events {
		if e.Seq <= last {
			problems = append(problems, fmt.Sprintf("%s follows %d", e, last))
		}
		last = e.Seq
		if e.Kind == host.EventResync || e.Alloc != unhealthy && (strings.Contains(string(e.Kind), "unhealthy") ||
			e.Kind == "deregistered") {
			problems = append(problems, "over a swap: "+e.String())
		}
	}
	return problems
}

// The shim is swapped to the next release and back, repeatedly and under load. The next release has another protocol
// number and another schema, whose migration moves a field that is needed to reach a plugin. No call fails, no mount
// changes, no event is lost. Each release reads what the other has rewritten and keeps the fields that it does not
// know.
func TestVersionSkew(t *testing.T) {
	slow(t)
	s := &skewEnv{env: newEnv(t, allCaps...)}
	now, next := releases()
	p := s.addPlugin("alloc-p", csifake.Monolith)
	s.heartbeat = "interval = \"100ms\"\n failures = 1"
	s.standby = s.addPlugin("alloc-q", csifake.Monolith)
	s.must(s.create("kept"))
	kept, err := s.prepare(s.group("alloc-kept", request{source: "kept"}))
	s.must(err)
	standing := s.mountLines()
	s.begin()
	was := s.stateAtRest()
	for round := range 4 {
		to := []release{next, now}[round%2]
		st := s.swap(to)
		s.makeSick(st.Index)
		for _, problem := range to.stateErrors(was, s.stateAtRest()) {
			t.Errorf("round %d, under %s: %s", round, to.name, problem)
		}
		s.writeFile(kept, "f", fmt.Sprint(round))
		s.wantFile(kept, "f", fmt.Sprint(round))
		if table := s.mountLines(); slices.ContainsFunc(standing, func(line string) bool {
			return !slices.Contains(table, line)
		}) {
			t.Errorf("round %d: mounts were\n%s\nand are\n%s",
				round, strings.Join(standing, "\n"), strings.Join(table, "\n"))
		}
		s.standby = s.restartPlugin(s.standby, csifake.Monolith)
		was = s.stateAtRest()
	}
	s.end()
	s.load.Wait()
	s.checkEvents()
	s.must(s.release("alloc-kept"))
	s.must(s.delete("kept"))
	s.stopPlugin(p)
	s.stopPlugin(s.standby)
	t.Logf("%d volumes were used", s.deleted.Load())
}

// TestVersionSkewIsSeen is a negative control of stateErrors and flapErrors.
func TestVersionSkewIsSeen(t *testing.T) {
	slow(t)
	now, next := releases()
	state := func(number float64, change func(document)) stateFile {
		first := document{"host": "/h", "task": "/t", "service": "csi"}
		d := document{"create_index": 1.0, "endpoint": document{"host": "/h", "task": "/t"}, "endpoints": []any{first}}
		if change != nil {
			change(d)
		}
		return stateFile{document{"number": number, "readable": 1.0}, map[string]document{"x": d}}
	}
	lost := func(d document) { delete(d, "endpoints") }
	stale := func(d document) { d["endpoint"] = document{"host": "/new", "task": "/t"} }
	for what, c := range map[string]struct {
		by   release
		is   stateFile
		want int
	}{
		"kept": {now, state(1, nil), 0}, "kept, another endpoint": {now, state(1, stale), 0},
		"lost":           {now, state(1, lost), 1},
		"not taken down": {now, state(2, nil), 1}, "moved": {next, state(2, nil), 0},
		"not moved": {next, state(2, lost), 1},
		"stale":     {next, state(2, stale), 1},
	} {
		if got := c.by.stateErrors(state(2, nil), c.is); len(got) != c.want {
			t.Errorf("%s: %q", what, got)
		}
	}
	flapping := []host.Event{
		{Seq: 1, Kind: "unhealthy", Alloc: "sick"}, {Seq: 2, Kind: "unhealthy", Alloc: "other"},
		{Seq: 2, Kind: "healthy"},
	}
	if got := flapErrors(flapping, "sick"); len(got) != 2 {
		t.Errorf("events: %q", got)
	}
}

// A shim that cannot read the state is refused before anything changes, with the reason.
func TestStateOutsideTheWindow(t *testing.T) {
	slow(t)
	w := unopenedEnv(t, allCaps...)
	now, next := releases()
	w.config.Shim = next.binary
	w.open() // migrates
	w.must(w.host.Close())
	w.claimSchema(2, 2)
	w.open()
	p := w.addPlugin("alloc-p", csifake.Monolith)
	w.must(w.create("kept"))
	kept, err := w.prepare(w.group("alloc-kept", request{source: "kept"}))
	w.must(err)
	before, err := w.host.Status(w.ctx())
	w.must(err)
	mounts := w.mountTable()
	report, err := w.host.Swap(w.ctx(), now.binary)
	w.refusedAtPrepare(report, err, "has schema 2", "only shims of schema 2 or newer", "this shim knows 1 to 1",
		"use a newer shim")
	after, err := w.host.Status(w.ctx())
	w.must(err)
	if after.PID != before.PID || after.Generation != before.Generation || w.mountTable() != mounts {
		t.Errorf("the shim was %+v and is %+v; mounts were\n%s\nand are\n%s", before, after, mounts, w.mountTable())
	}
	if got := w.stateOf().schema["readable"]; got != 2.0 {
		t.Errorf("the file's schema is readable by %v", got)
	}
	w.must(w.scenario())
	w.writeFile(kept, "f", "x")
	w.must(w.release("alloc-kept"))
	w.must(w.delete("kept"))
	w.stopPlugin(p)
}

// refusedAtPrepare checks that a swap was refused before it held a call, because no shim could read the state.
func (w *env) refusedAtPrepare(report host.SwapReport, err error, words ...string) {
	w.t.Helper()
	w.wantWords("the swap", err, append(words, "prepare")...)
	if !errors.Is(err, host.ErrUnsupported) || report.Outcome != host.SwapRefused ||
		report.Failed != host.SwapPrepare || report.Hold != 0 {
		w.t.Errorf("%v, %+v", err, report)
	}
}

// A release two ahead would leave nothing that the active shim can read. It is refused before anything changes.
func TestStateBeyondTheWindow(t *testing.T) {
	slow(t)
	w := newEnv(t, allCaps...)
	program := filepath.Join(nextBin(), "holdfast-shim-faulty-next")
	p := w.addPlugin("alloc-p", csifake.Monolith)
	before, err := w.host.Status(w.ctx())
	w.must(err)
	ahead := fault.Binary(t, program, w.dir, "ahead", "Rehearse before schema 2")
	report, err := w.host.Swap(w.ctx(), host.Binary{Path: ahead})
	w.refusedAtPrepare(report, err, "only shims of schema 2 or newer", "none newer than 1",
		"swap to a release between the two first")
	after, err := w.host.Status(w.ctx())
	w.must(err)
	if after.PID != before.PID || after.Generation != before.Generation || w.stateOf().schema["readable"] != 1.0 {
		t.Errorf("the shim was %+v and is %+v, of a state %v", before, after, w.stateOf().schema)
	}
	_, next := releases() // is the one between the two
	w.must(errOf(w.host.Swap(w.ctx(), next.binary)))
	w.must(errOf(w.host.Swap(w.ctx(), host.Binary{Path: ahead})))
	w.must(w.scenario())
	w.stopPlugin(p)
}

// The next release dies while it bakes, after it has migrated the state and started a task by a field that only it
// knows. This release takes over: it watches the task, uses and releases its volumes, and does not start the task again
// without the field.
func TestRollbackToTheReleaseBefore(t *testing.T) {
	slow(t)
	w := unopenedEnv(t, allCaps...)
	now, next := releases()
	w.config.Bake = waitLimit
	w.open()
	_, err := w.host.Swap(w.ctx(), next.binary)
	w.must(err)
	w.heartbeat, w.pluginBlocks = "interval = \"100ms\"\n failures = 1", "scratch_dir = \"/scratch\"\n"
	p := w.addPlugin("alloc-p", csifake.Monolith)
	w.must(w.create("kept"))
	kept, err := w.prepare(w.group("alloc-kept", request{source: "kept"}))
	w.must(err)
	mounts := w.mountTable()
	w.killShim()
	st, err := w.host.Status(w.ctx())
	w.must(err)
	if st.Schema != now.schema || w.host.Swaps()[0].Outcome != host.SwapRolledBack || w.mountTable() != mounts {
		t.Errorf("after the death %+v serves; the last swap is %+v", st, w.host.Swaps()[0])
	}
	w.must(w.scenario())
	w.writeFile(kept, "f", "x")
	p.On("Probe").Times(2).NotReady()
	sick := w.waitEvent(func(e host.Event) bool {
		return e.Seq > st.Index && e.Kind == "unhealthy" && e.Alloc == "alloc-p"
	})
	w.waitEvent(func(e host.Event) bool { return e.Seq > sick.Seq && e.Kind == "task healthy" && e.Alloc == "alloc-p" })
	w.must(w.release("alloc-kept"))
	w.must(w.delete("kept"))
	again := p.task
	again.Attempt++
	_, err = w.host.TaskStarting(w.ctx(), again)
	if !errors.Is(err, host.ErrUnsupported) || !strings.Contains(err.Error(), "task alloc-p/plugin") {
		t.Errorf("a start of the task without what it asks for: %v", err)
	}
	w.stopPlugin(p)
}
