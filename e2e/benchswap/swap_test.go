package benchswap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
)

// TestSwapFigures is the run. HOLDFAST_SWAPS says how many swaps; without it few are made, on a small node.
func TestSwapFigures(t *testing.T) {
	if testing.Short() {
		t.Skip("a run of a minute: make bench-swap, and go test without -short")
	}
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	s := sizesOf(t)
	n := newNode(t, s)
	r := &report{}
	n.warm()
	before, mounts := n.settled(), n.mountTable()
	n.swapped(t, r)
	n.failing(t, r)
	for _, more := range n.leftBehind(before) {
		t.Error("left behind: ", more)
	}
	r.fact("the mount table is byte for byte as it was before: %d mounts below the node's directories",
		n.untouched(t, mounts))
	r.fact("left behind: nothing; counted were %d goroutines and %d descriptors of the host, %d of shim and plugins, %d sockets, %d files",
		before["goroutines of the host"], before.total("descriptor of host"),
		before.total("descriptor of")-before.total("descriptor of host"),
		before.total("S"), before.total("-"))
	n.killed(t, r)
	n.empty()
	t.Logf("\n%s", r)
	if path := os.Getenv("HOLDFAST_REPORT"); path != "" && !t.Failed() {
		must(t, os.WriteFile(path, []byte(r.String()), 0o644))
	}
}

// warm has made whatever is made once.
func (n *node) warm() {
	n.t.Helper()
	must(n.t, os.WriteFile(filepath.Join(n.written, "log"), nil, 0o600))
	l := startLoad(n, &expectations{})
	for i := range 4 {
		got, err := n.host.Swap(n.ctx(), host.Binary{Path: binaries[(i+1)%2]})
		must(n.t, err)
		n.t.Logf("while warming up calls were held for %s: %v", got.Hold, got.Steps)
	}
	for i := range 3 { // as many binaries as are kept
		b := fault.Binary(n.t, faulty, n.dir, fmt.Sprint("warm-", i), "Rehearse before error damaged",
			fmt.Sprintf("Hello after touch %s/warm-%d-greeted", n.dir, i))
		if _, err := n.host.Swap(n.ctx(), host.Binary{Path: b}); err == nil {
			n.t.Fatal("a shim that refuses the state was taken")
		}
	}
	l.finish()
	for _, err := range l.failed {
		n.t.Fatalf("while warming up: %v", err)
	}
}

// swapped swaps over and over under load.
func (n *node) swapped(t *testing.T, r *report) {
	t.Helper()
	x := &expectations{}
	witness := watch(n.host)
	task, err := startWriter(n.written)
	must(t, err)
	l := startLoad(n, x)
	n.rest()
	var done []host.SwapReport
	var holds, swaps windows
	refused := 0
	for i := range n.sizes.swaps {
		from := time.Now()
		got, err := n.host.Swap(n.ctx(), host.Binary{Path: binaries[(i+1)%2]})
		if err != nil {
			t.Logf("swap %d was given up: %v", i, err)
			refused++
		}
		done = append(done, got)
		if !got.HeldSince.IsZero() {
			holds = append(holds, window{got.HeldSince, got.HeldSince.Add(got.Hold)})
		}
		time.Sleep(n.sizes.bake)
		swaps = append(swaps, window{from, time.Now()})
		if (i+1)%restEvery == 0 {
			n.rest()
		}
	}
	n.rest()
	l.finish()
	strokes, err := task.stop()
	if err != nil {
		t.Error(err)
	}
	for _, err := range l.failed {
		t.Errorf("a call failed: %v", err)
	}
	events := witness.judge(t, x)
	r.fact("%d swaps between two builds, %d given up; %d plugins, %d volumes, bake %s", len(done), refused,
		n.sizes.plugins, n.sizes.volumes, n.sizes.bake)
	l.tell(r, n)
	r.fact("%d events were watched over all of it: none lost, none told twice, none of a plugin that was sick", events)
	l.times(r, done, holds, swaps)
	r.written(strokes, holds, swaps)
}

// rest is time without a swap, after the last one has baked.
func (n *node) rest() {
	n.settled()
	time.Sleep(n.sizes.rest)
}

// tell says what the load was.
func (l *load) tell(r *report, n *node) {
	reads := 0
	for _, c := range l.calls {
		if reading[c.sort] {
			reads++
		}
	}
	sent := n.sent() - l.sentBefore
	r.fact("%d calls with deadlines of %s, %.0f a second, %d of them change something; %d failed", len(l.calls),
		callLimit,
		float64(len(l.calls))/l.elapsed.Seconds(), len(l.calls)-reads, len(l.failed))
	r.fact("beside them %d calls wait for a driver call of %s (%.1f %% of %d driver calls): all ended well; half of the callers give it %s at a time, and "+
		"%d tries ended by that, at most %s late", l.slow, n.sizes.slowFor, 100*float64(l.slow)/float64(max(sent, 1)),
		sent, callLimit, l.late, ms(l.worst))
}

// sent is how many calls that change something the drivers were sent.
func (n *node) sent() (calls int) {
	n.t.Helper()
	for i := range n.sizes.plugins {
		of, err := csifake.Calls(journalOf(filepath.Join(n.dir, "plugins"), pluginName(i)), "CreateVolume",
			"DeleteVolume", "ControllerPublishVolume",
			"ControllerUnpublishVolume", "NodeStageVolume", "NodeUnstageVolume", "NodePublishVolume",
			"NodeUnpublishVolume")
		must(n.t, err)
		calls += len(of)
	}
	return calls
}

// times are how long calls took.
func (l *load) times(r *report, done []host.SwapReport, holds, swaps windows) {
	all := tell(l.calls, holds, swaps)
	target := limit{p50: 10 * time.Millisecond, p99: 50 * time.Millisecond, max: 500 * time.Millisecond}
	var hold []time.Duration
	for _, s := range done {
		hold = append(hold, s.Hold)
	}
	r.add("hold of a swap, as the host tells it", hold, target)
	r.add("mutating call in a hold: longer than usual by", all.held, target)
	r.add("control: the same while there is no swap", all.anyway, limit{})
	r.add("the longest such of each swap", all.longest, limit{})
	r.add("read in a hold", all.reads, limit{p99: 20 * time.Millisecond})
	r.add("read during the rest of a swap", all.during[true], limit{p99: 20 * time.Millisecond})
	r.add("control: read while there is no swap", all.quiet[true], limit{})
	r.add("mutating call during the rest of a swap", all.during[false], limit{})
	r.add("control: mutating call while there is no swap", all.quiet[false], limit{})
	r.steps(done)
}

// written says how the task fared that writes all the while.
func (r *report) written(strokes []stroke, holds, swaps windows) {
	var in, during, quiet []time.Duration
	for _, s := range strokes {
		switch {
		case is(holds.at(s.At, s.At.Add(s.Took))):
			in = append(in, s.Took)
		case is(swaps.at(s.At, s.At.Add(s.Took))):
			during = append(during, s.Took)
		default:
			quiet = append(quiet, s.Took)
		}
	}
	r.add("write and fsync of a task in a hold", in, limit{})
	r.add("the same during the rest of a swap", during, limit{})
	r.add("control: the same while there is no swap", quiet, limit{})
	r.fact("a task writes 4 KiB and syncs them every %s: %d writes, no error; %s", writeEvery, len(strokes),
		coincidence(strokes, holds))
}

func is(_ int, in bool) bool { return in }

// rubbish is the path of what is no shim.
func (n *node) rubbish() string {
	path := filepath.Join(n.dir, "rubbish")
	must(n.t, os.WriteFile(path, []byte("#!/bin/sh\necho rubbish\nexit 3\n"), 0o700))
	return path
}

// failing swaps to what is no shim, or does not take a copy of the state over: nothing is held. Then to what cannot
// take the state itself.
func (n *node) failing(t *testing.T, r *report) {
	t.Helper()
	none, most := limit{max: time.Nanosecond}, limit{max: 600 * time.Millisecond}
	refuses := fault.Binary(t, faulty, n.dir, "refuses", "Rehearse before error damaged")
	n.fails(t, r, "before the fence", none, host.SwapRefused, n.rubbish(), refuses)
	errs := fault.Binary(t, faulty, n.dir, "errs", "Activate before error damaged")
	dies := fault.Binary(t, faulty, n.dir, "dies", "Activate before kill-self")
	last := fault.Binary(t, faulty, n.dir, "late", "Activate after kill-self")
	all := []string{errs, dies, last}
	if n.sizes.budget == 0 { // else it is waited for as long
		all = append(all, fault.Binary(t, faulty, n.dir, "hangs", "Activate before hang"))
	}
	n.fails(t, r, "after the fence", most, host.SwapRolledBack, all...)
}

// fails swaps to each of the binaries in turn.
func (n *node) fails(t *testing.T, r *report, when string, aim limit, want host.SwapOutcome, paths ...string) {
	t.Helper()
	l := startLoad(n, &expectations{})
	n.rest()
	var hold []time.Duration
	var swaps windows
	for i := range max(n.sizes.failures, len(paths)) {
		from := time.Now()
		got, err := n.host.Swap(n.ctx(), host.Binary{Path: paths[i%len(paths)]})
		if err == nil || got.Outcome != want {
			t.Errorf("a swap to %s: %v, %+v", filepath.Base(paths[i%len(paths)]), err, got)
		}
		swaps = append(swaps, window{from, time.Now()})
		hold = append(hold, got.Hold)
	}
	n.rest()
	l.finish()
	for _, err := range l.failed {
		t.Errorf("a call failed: %v", err)
	}
	r.add("hold of a swap that fails "+when, hold, aim)
	all := tell(l.calls, nil, swaps)
	r.add("mutating call during such a swap", all.during[false], limit{})
	r.add("control: mutating call while there is none", all.quiet[false], limit{})
}

// killed kills the shim, and waits for the answer to a call that is waiting already. Each time it is a host that has
// just begun: the back-off of crashes in a row is not what is measured.
func (n *node) killed(t *testing.T, r *report) {
	t.Helper()
	var took []time.Duration
	n.config.Workload = host.Workload{Allocs: n.allocs, Tasks: n.tasks}
	for range n.sizes.kills {
		must(t, n.host.Close())
		n.open()
		d, err := n.killedOnce()
		if err != nil {
			t.Error(err)
			continue
		}
		took = append(took, d)
	}
	r.add("kill -9 of the shim, until a call is answered again", took, limit{p99: 250 * time.Millisecond})
}

func (n *node) killedOnce() (time.Duration, error) {
	st, err := n.host.Status(n.ctx())
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	gone := make(chan struct{})
	answered := make(chan error, 1)
	go func() {
		close(gone)
		for ctx.Err() == nil {
			now, err := n.host.Status(ctx)
			if err != nil || now.PID != st.PID {
				answered <- errors.Join(err, n.host.ReleaseAlloc(ctx, "nobody"))
				return
			}
		}
		answered <- context.Cause(ctx)
	}()
	<-gone
	began := time.Now()
	if err := syscall.Kill(st.PID, syscall.SIGKILL); err != nil {
		return 0, fmt.Errorf("kill the shim: %w", err)
	}
	err = <-answered
	return time.Since(began), err
}
