package benchswap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"holdfast/host"
)

// sizes are how large a run is.
type sizes struct {
	swaps, plugins, volumes, kills int
	every                          time.Duration // from one call of a caller to its next
	bake                           time.Duration
	budget                         time.Duration // of a swap; 0: the host's default
	rest                           time.Duration // without a swap, after every restEvery swaps
}

// restEvery is how many swaps are between two rests. Calls in rests are the control.
const restEvery = 20

// sizesOf returns the sizes of make bench-swap with HOLDFAST_SWAPS swaps, or those of a small run that shows that
// everything works.
func sizesOf(t *testing.T) sizes {
	text, full := os.LookupEnv("HOLDFAST_SWAPS")
	if !full {
		return sizes{
			swaps: 8, plugins: 4, volumes: 12, every: 50 * time.Millisecond, kills: 2,
			bake: 50 * time.Millisecond, budget: waitLimit, rest: 200 * time.Millisecond,
		}
	}
	s := sizes{
		plugins: 100, volumes: 1000, every: 180 * time.Millisecond, kills: 100,
		bake: 100 * time.Millisecond, rest: time.Second,
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("HOLDFAST_SWAPS=%q is not a number of swaps", text)
	}
	s.swaps = n
	if n < 1000 {
		s.kills = 20
	}
	if n, err := strconv.Atoi(os.Getenv("HOLDFAST_PLUGINS")); err == nil {
		s.plugins, s.volumes = n, 10*n
	}
	if d, err := time.ParseDuration(os.Getenv("HOLDFAST_EVERY")); err == nil {
		s.every = d
	}
	return s
}

// TestSwapFigures swaps under load and reports how long calls take. HOLDFAST_SWAPS is the number of swaps.
func TestSwapFigures(t *testing.T) {
	if testing.Short() {
		t.Skip("a run of a minute: make bench-swap, and go test without -short")
	}
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	n, r := newNode(t, sizesOf(t)), &report{}
	n.warmUp()
	before, mounts := n.census(), n.mountTable()
	n.measureSwaps(r)
	for _, more := range n.leftovers(before) {
		t.Error("left behind: ", more)
	}
	r.fact("the mount table did not change: %d mounts below the node's directory", n.wantMounts(t, mounts))
	r.fact("nothing was left behind: %d goroutines and %d descriptors of the host, %d of shim and plugins, %d "+
		"sockets, %d files", before["goroutines of the host"], before.total("descriptor of host"),
		before.total("descriptor of")-before.total("descriptor of host"), before.total("S"), before.total("-"))
	n.measureKills(r)
	n.takeDown()
	t.Logf("\n%s", r)
	if path := os.Getenv("HOLDFAST_REPORT"); path != "" && !t.Failed() {
		must(t, os.WriteFile(path, []byte(r.String()), 0o644))
	}
}

// warmUp has both builds stored and everything created that is created once.
func (n *node) warmUp() {
	n.t.Helper()
	l := startLoad(n)
	for i := range 4 {
		_, err := n.host.Swap(n.ctx(), host.Binary{Path: binaries[(i+1)%2]})
		must(n.t, err)
	}
	l.finish()
	n.waitCommitted()
}

// rest waits until the last swap is committed, and then for some time without a swap.
func (n *node) rest() {
	n.waitCommitted()
	time.Sleep(n.sizes.rest)
}

// measureSwaps swaps again and again under load.
func (n *node) measureSwaps(r *report) {
	n.t.Helper()
	l := startLoad(n)
	n.rest()
	var reports []host.SwapReport
	var holds, swaps windows
	var held []time.Duration
	failed := 0
	for i := range n.sizes.swaps {
		from := time.Now()
		got, err := n.host.Swap(n.ctx(), host.Binary{Path: binaries[(i+1)%2]})
		if err != nil {
			n.t.Logf("swap %d failed: %v", i, err)
			failed++
		}
		reports, held = append(reports, got), append(held, got.Hold)
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
	mutating := 0
	for _, c := range l.calls {
		if !reads[c.method] {
			mutating++
		}
	}
	r.fact("%d swaps between two builds, %d failed; %d plugins, %d volumes, bake %s", len(reports), failed,
		n.sizes.plugins, n.sizes.volumes, n.sizes.bake)
	r.fact("%d calls, %.0f a second, %d of them mutating; %d failed", len(l.calls),
		float64(len(l.calls))/l.elapsed.Seconds(), mutating, len(l.failed))
	d := newDurations(l.calls, holds, swaps)
	target := limits{p50: 10 * time.Millisecond, p99: 50 * time.Millisecond, max: 500 * time.Millisecond}
	r.add("hold of a swap, as the host reports it", held, target)
	r.add("mutating call in a hold: longer than usual by", d.held, target)
	r.add("control: the same without a swap", d.control, limits{})
	r.add("the longest such of each swap", d.longest, limits{})
	r.add("read in a hold", d.reads, limits{p99: 20 * time.Millisecond})
	r.add("read during the rest of a swap", d.during[true], limits{p99: 20 * time.Millisecond})
	r.add("control: read without a swap", d.quiet[true], limits{})
	r.add("mutating call during the rest of a swap", d.during[false], limits{})
	r.add("control: mutating call without a swap", d.quiet[false], limits{})
	r.addSteps(reports)
}

// measureKills kills the shim and measures how long a mutating call then takes. Each host is new, because the start
// delay grows with each death.
func (n *node) measureKills(r *report) {
	n.t.Helper()
	var took []time.Duration
	n.config.Workload = host.Workload{Allocs: n.users, Tasks: n.tasks}
	for range n.sizes.kills {
		must(n.t, n.host.Close())
		n.open()
		d, err := n.killShim()
		must(n.t, err)
		took = append(took, d)
	}
	r.add("kill -9 of the shim, until a call is answered again", took, limits{p99: 250 * time.Millisecond})
}

// killShim kills the shim while another goroutine waits for the next one, and returns when that one has answered.
func (n *node) killShim() (time.Duration, error) {
	st, err := n.host.Status(n.ctx())
	if err != nil {
		return 0, err
	}
	ctx := n.ctx()
	waiting, answered := make(chan struct{}), make(chan error, 1)
	go func() {
		close(waiting)
		for ctx.Err() == nil {
			now, err := n.host.Status(ctx)
			if err != nil || now.PID != st.PID {
				answered <- errors.Join(err, n.host.ReleaseAlloc(ctx, "none"))
				return
			}
		}
		answered <- context.Cause(ctx)
	}()
	<-waiting
	began := time.Now()
	if err := syscall.Kill(st.PID, syscall.SIGKILL); err != nil {
		return 0, fmt.Errorf("kill the shim: %w", err)
	}
	err = <-answered
	return time.Since(began), err
}
