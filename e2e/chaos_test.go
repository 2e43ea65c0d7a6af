package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

// TestChaos has allocs come and go on shared volumes while plugins fail, hang, crash and are replaced, shims are
// killed and hosts are reopened. Then the faults end, everything is released, and nothing may be left.
// HOLDFAST_CHAOS=10m continues with new seeds for that long; HOLDFAST_CHAOS_SEED=7 runs that seed.
func TestChaos(t *testing.T) {
	goroutines, files := runtime.NumGoroutine(), len(openFiles(os.Getpid()))
	t.Run("run", func(t *testing.T) {
		for _, seed := range seeds(t) {
			t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
				t.Parallel()
				chaos(t, seed, 2*time.Second)
			})
		}
	})
	first := uint64(time.Now().UnixNano())
	for seed, end := first, time.Now().Add(soakTime(t)); time.Now().Before(end) && !t.Failed(); seed += 2 {
		t.Run("soak", func(t *testing.T) {
			for _, s := range []uint64{seed, seed + 1} {
				t.Run(fmt.Sprintf("seed=%d", s), func(t *testing.T) {
					t.Parallel()
					chaos(t, s, 5*time.Second)
				})
			}
		})
	}
	const slack = 10
	err := waitFor(t.Context(), "goroutines and files are back", func() bool {
		return runtime.NumGoroutine() <= goroutines+slack && len(openFiles(os.Getpid())) <= files+slack
	})
	if err != nil {
		stacks := make([]byte, 1<<20)
		t.Errorf("%v: goroutines %d -> %d, files %d -> %d\n%s", err, goroutines, runtime.NumGoroutine(),
			files, len(openFiles(os.Getpid())), stacks[:runtime.Stack(stacks, true)])
	}
}

// seeds are those of a run without HOLDFAST_CHAOS.
func seeds(t *testing.T) []uint64 {
	t.Helper()
	text := os.Getenv("HOLDFAST_CHAOS_SEED")
	if text == "" {
		return []uint64{1, 2, 3}
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("HOLDFAST_CHAOS_SEED: %v", err)
	}
	return []uint64{seed}
}

// soakTime is how long to continue after the usual seeds.
func soakTime(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("HOLDFAST_CHAOS")
	if text == "" {
		return 0
	}
	long, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("HOLDFAST_CHAOS: %v", err)
	}
	return long
}

// openFiles returns the files that a process has open.
func openFiles(pid int) (files []string) {
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil {
			files = append(files, to)
		}
	}
	return files
}

func chaos(t *testing.T, seed uint64, long time.Duration) {
	c := newChaosEnv(t, seed)
	c.addServices()
	random, cancel := context.WithCancel(t.Context())
	defer cancel()
	c.watching.Go(func() {
		last := func(event host.Event) error {
			if c.recorded.add(event); isLast(event) {
				return errLeave
			}
			return nil
		}
		from := func() host.WatchOptions { return host.WatchOptions{After: c.recorded.last()} }
		c.watch(c.ctx(), "of all", from, last, func() bool { return false })
	})
	var actors sync.WaitGroup
	for _, w := range c.workers {
		c.restarting.Go(func() { w.run(random) })
	}
	for i := range 6 {
		actors.Go(func() { c.useVolumes(random, fmt.Sprintf("u%d", i)) })
	}
	for i := range 2 {
		actors.Go(func() { c.manageVolumes(random, fmt.Sprintf("c%d", i)) })
	}
	actors.Go(func() { c.injectFaults(random) })
	for begin := time.Now(); time.Since(begin) < waitLimit/2; time.Sleep(50 * time.Millisecond) {
		if time.Since(begin) >= long && len(missingKinds(c.recorded.all())) == 0 {
			break
		}
	}
	cancel()
	actors.Wait()
	c.recover()
	c.verify()
	if t.Failed() {
		t.Logf("HOLDFAST_CHAOS_SEED=%d repeats the operations, though not their timing", seed)
	}
}

// addServices picks two plugins, with two workers for each role and three volumes each.
func (c *chaosEnv) addServices() {
	all := []*pluginService{
		{id: "mono", caps: expandCaps},
		{id: "split", caps: append([]string{"EXPAND_VOLUME", "expansion/OFFLINE"}, allCaps...)},
		{id: "bare", caps: []string{"CREATE_DELETE_VOLUME", "EXPAND_VOLUME", "expansion/ONLINE"}},
		{id: "stager", caps: []string{"CREATE_DELETE_VOLUME", "STAGE_UNSTAGE_VOLUME"}},
		{id: "attacher", caps: []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME"}},
	}
	rng := c.random("plugins")
	c.services = []*pluginService{all[rng.IntN(2)], all[2+rng.IntN(3)]}
	for _, s := range c.services {
		s.backend = csifake.NewBackend("")
		roles := []csifake.Role{csifake.Monolith}
		if s.id == "split" {
			roles = []csifake.Role{csifake.Node, csifake.Controller}
		}
		for _, role := range roles {
			c.workers = append(c.workers, c.newWorker(s, role, 0), c.newWorker(s, role, 1))
		}
		for i := range 3 {
			c.volumes = append(c.volumes, c.newVolumeSlot(s.id, i))
		}
	}
}

// run starts the worker's task and ends it in every way until ctx ends. Then it restarts it only if it dies.
func (w *worker) run(ctx context.Context) {
	w.newAlloc()
	for {
		w.start()
		over := false
		timer := time.NewTimer(200*time.Millisecond + upTo(w.rng, 2500))
		select {
		case <-w.exited:
		case <-timer.C:
		case <-ctx.Done():
			over = true
		}
		timer.Stop()
		died := isClosed(w.exited)
		if over && !died {
			break
		}
		final := w.rng.IntN(3) == 0
		w.end(died || w.rng.IntN(2) == 0, final)
		sleep(ctx, upTo(w.rng, 150))
		if final {
			w.newAlloc()
		}
	}
	for !isClosed(w.c.done) {
		select {
		case <-w.exited:
			w.restartIfDead()
		case <-w.c.done:
		}
	}
}

// injectFaults reopens the host, kills shims and has plugins fail.
func (c *chaosEnv) injectFaults(ctx context.Context) {
	rng := c.random("faults")
	for sleep(ctx, 20*time.Millisecond+upTo(rng, 60)) {
		switch n := rng.IntN(60); {
		case n == 0:
			c.reopenHost()
		case n <= 3:
			c.killShim()
		default:
			c.injectFault(rng)
		}
	}
}

// RPCs that ask only, and codes by what they say. A plugin that answers "not found" for an existing volume, refuses
// what it has created, or refuses a deletion that it has made, would lose volumes by itself.
var (
	queryRPCs = []string{"Probe", "GetPluginInfo", "GetPluginCapabilities", "NodeGetInfo", "NodeGetCapabilities",
		"ControllerGetCapabilities"}
	uncertain = []codes.Code{codes.Internal, codes.Unavailable, codes.Aborted, codes.Unknown, codes.DeadlineExceeded,
		codes.DataLoss, codes.Canceled}
	refusals = []codes.Code{codes.FailedPrecondition, codes.InvalidArgument, codes.PermissionDenied,
		codes.AlreadyExists, codes.OutOfRange}
)

// injectFault scripts a fault at a running plugin.
func (c *chaosEnv) injectFault(rng *rand.Rand) {
	w := c.workers[rng.IntN(len(c.workers))]
	p := w.plugin()
	rpc, after := mutatingCalls[rng.IntN(len(mutatingCalls))], rng.IntN(2) == 0
	if rng.IntN(6) == 0 {
		rpc = queryRPCs[rng.IntN(len(queryRPCs))]
	}
	code, refused := uncertain[rng.IntN(len(uncertain))], false
	if rng.IntN(3) == 0 && !(rpc == "CreateVolume" && after) {
		code, refused = refusals[rng.IntN(len(refusals))], true
	}
	kind, delay, times := rng.IntN(5), upTo(rng, 300), 1+rng.IntN(2)
	if p == nil {
		return
	}
	rule := p.On(rpc).Times(times)
	if rpc == "DeleteVolume" && refused {
		rule.Rule(w.refuseDelete())
		return
	}
	if after {
		rule = rule.After()
	}
	switch kind {
	case 0, 1:
		rule.Code(code, "injected")
	case 2:
		rule.Delay(delay)
	case 3:
		rule.Delayed(delay).Code(code, "injected late")
	case 4:
		rule.Times(1).Delayed(delay).Crash()
	}
}

// refuseDelete refuses to delete a volume that exists. The deletion of one that does not exist succeeds.
func (w *worker) refuseDelete() csifake.Rule {
	return csifake.Rule{Lie: csifake.NoEffect, Answer: func(_ context.Context, req, reply proto.Message,
		err error) (proto.Message, error) {
		volumes, failed := w.service.backend.Volumes()
		if failed != nil {
			return nil, failed
		}
		if _, there := volumes[req.(*csi.DeleteVolumeRequest).GetVolumeId()]; there && err == nil {
			return nil, status.Error(codes.FailedPrecondition, "injected")
		}
		return reply, err
	}}
}

// checkError fails the test for errors that neither faults nor other actors explain.
func (c *chaosEnv) checkError(what string, err error) {
	if errors.Is(err, host.ErrDamaged) || errors.Is(err, host.ErrUnsupported) {
		c.t.Errorf("%s: %v", what, err)
	}
}

// manageVolumes creates, expands and deletes volumes.
func (c *chaosEnv) manageVolumes(ctx context.Context, name string) {
	rng := c.random(name)
	for sleep(ctx, upTo(rng, 100)) {
		v, limit := c.volumes[rng.IntN(len(c.volumes))], upTo(rng, 2000)
		switch rng.IntN(6) {
		case 0, 1:
			c.checkError("delete "+v.id, c.deleteVolume(v, limit))
		case 2:
			size := host.CapacityRange{Required: int64(1+rng.IntN(8)) << 20}
			err := c.within(limit, func(ctx context.Context, h *host.Host) error {
				return errOf(h.ExpandVolume(ctx, volumeName(v.id), size))
			})
			if !errors.Is(err, host.ErrUnsupported) { // some plugins cannot
				c.checkError("expand "+v.id, err)
			}
		default:
			c.checkError("create "+v.id, c.createVolume(v, limit))
		}
	}
}

// useVolumes runs one alloc after the other.
func (c *chaosEnv) useVolumes(ctx context.Context, name string) {
	rng := c.random(name)
	for n := 1; sleep(ctx, upTo(rng, 50)); n++ {
		c.useOnce(ctx, rng, fmt.Sprintf("%s-%d", name, n))
	}
}

// useOnce is one alloc's life.
func (c *chaosEnv) useOnce(ctx context.Context, rng *rand.Rand, id string) {
	mode := manyWriters
	if rng.IntN(6) == 0 {
		mode = oneWriter
	}
	requests := []request{{name: "v0", source: c.volumes[rng.IntN(len(c.volumes))].id, mode: mode}}
	if other := c.volumes[rng.IntN(len(c.volumes))].id; other != requests[0].source && rng.IntN(3) == 0 {
		requests = append(requests, request{name: "v1", source: other, mode: mode})
	}
	sealed := c.parse(groupText(requests...)).Groups[0].Sealed
	group := host.AllocGroup{Alloc: host.AllocID(id), Job: "user", Group: "g", Namespace: "default", Sealed: sealed}
	c.locked(func() { c.allocs[group.Alloc] = group })
	if rng.IntN(4) == 0 {
		c.releaseWhilePreparing(ctx, rng, group)
		return
	}
	c.mountAndCheck(ctx, rng, group, len(requests))
	if rng.IntN(8) == 0 { // the next host releases it, as it is not named
		c.locked(func() { delete(c.allocs, group.Alloc); c.unreleased[id] = true })
		return
	}
	for range 3 {
		if c.releaseAlloc(id, upTo(rng, 3000)) {
			c.wantGone(id)
			return
		}
	}
}

// releaseWhilePreparing releases an alloc while it is prepared. It must stay released.
func (c *chaosEnv) releaseWhilePreparing(ctx context.Context, rng *rand.Rand, group host.AllocGroup) {
	s := c.current()
	var preparing sync.WaitGroup
	blocking := newBlockingContext(c.ctx())
	preparing.Go(func() {
		_, err := s.PrepareAlloc(blocking, group)
		blocking.Done() // it may have returned without waiting
		c.checkError("prepare "+string(group.Alloc), err)
	})
	<-blocking.waiting
	sleep(context.WithoutCancel(ctx), 5*time.Millisecond+upTo(rng, 200))
	c.releaseAlloc(string(group.Alloc), upTo(rng, 3000))
	preparing.Wait()
	c.wantGone(string(group.Alloc))
}

// blockingContext closes waiting once a call waits for the context's end: from then on the call is under way.
type blockingContext struct {
	context.Context
	once    *sync.Once
	waiting chan struct{}
}

func newBlockingContext(ctx context.Context) blockingContext {
	return blockingContext{ctx, new(sync.Once), make(chan struct{})}
}

func (b blockingContext) Done() <-chan struct{} {
	b.once.Do(func() { close(b.waiting) })
	return b.Context.Done()
}

// mountAndCheck prepares an alloc and checks that its volumes stay mounted until it is released.
func (c *chaosEnv) mountAndCheck(ctx context.Context, rng *rand.Rand, group host.AllocGroup, volumes int) {
	var plans map[string]host.Plan
	err := errors.New("not tried")
	for try := 0; try < 2 && err != nil; try++ {
		err = c.within(300*time.Millisecond+upTo(rng, 4000), func(ctx context.Context, h *host.Host) (err error) {
			plans, err = h.PrepareAlloc(ctx, group)
			return err
		})
	}
	hold := upTo(rng, 200)
	if err != nil {
		c.checkError("prepare "+string(group.Alloc), err)
		return
	}
	for range 2 {
		for i := range volumes {
			path := planEnv(plans["t"], fmt.Sprintf("HOLDFAST_VOLUME_V%d", i))
			if mounted, err := mountinfo.Mounted(path); err != nil || !mounted {
				c.t.Errorf("alloc %s is prepared, and %s is not mounted: %v", group.Alloc, path, err)
			} else if err := os.WriteFile(filepath.Join(path, string(group.Alloc)), nil, 0o600); err != nil {
				c.t.Errorf("alloc %s: %v", group.Alloc, err)
			}
		}
		sleep(ctx, hold)
	}
}

// releaseAlloc reports whether the alloc was released in time. The shim continues a release that was not.
func (c *chaosEnv) releaseAlloc(id string, limit time.Duration) bool {
	c.locked(func() { delete(c.allocs, host.AllocID(id)); c.unreleased[id] = true })
	err := c.within(limit, func(ctx context.Context, h *host.Host) error {
		return h.ReleaseAlloc(ctx, host.AllocID(id))
	})
	if err != nil {
		c.checkError("release "+id, err)
		return false
	}
	c.locked(func() { delete(c.unreleased, id) })
	return true
}

// wantGone checks that nothing brought an alloc back whose release was acknowledged.
func (c *chaosEnv) wantGone(id string) {
	pending := false
	c.locked(func() { pending = c.unreleased[id] })
	if pending {
		return
	}
	var list []host.AllocStatus
	err := c.call(func(h *host.Host) (err error) { list, _, err = h.Allocs(c.ctx(), host.AllocID(id)); return err })
	if err != nil || len(list) > 0 {
		c.t.Errorf("alloc %s was released and exists: %+v, %v", id, list, err)
	}
}

// recover ends the faults and takes everything down.
func (c *chaosEnv) recover() {
	for _, w := range c.workers {
		if p := w.plugin(); p != nil {
			p.ClearScript()
		}
	}
	var ids []string
	c.locked(func() {
		for id := range c.unreleased {
			ids = append(ids, id)
		}
		for id := range c.allocs {
			ids = append(ids, string(id))
		}
	})
	for _, id := range ids {
		if !c.releaseAlloc(id, waitLimit) {
			c.t.Errorf("alloc %s cannot be released", id)
			c.logState()
		}
	}
	for _, v := range c.volumes {
		if err := c.deleteVolume(v, waitLimit); err != nil && !errors.Is(err, host.ErrNotFound) {
			c.t.Errorf("volume %s cannot be deleted: %v", v.id, err)
			c.logState()
		}
	}
	close(c.done)
	c.restarting.Wait()
}

func (c *chaosEnv) logState() {
	allocs, _, _ := c.host.Allocs(c.ctx(), "")
	for _, a := range allocs {
		c.t.Logf("alloc %s %s waits %q uses %+v", a.ID, a.State, registry.Waits(a.Waiting), a.Uses)
	}
	volumes, _, _ := c.host.Volumes(c.ctx(), host.VolumeQuery{})
	for _, v := range volumes {
		c.t.Logf("volume %s %s attachments %+v staging %+v holders %+v intent %+v",
			v.ID, v.State, v.Attachments, v.Staging, v.Holders, v.Intent)
	}
}

// verify checks records, storage, directories and events. The env checks mounts and journal when it closes.
func (c *chaosEnv) verify() {
	c.wantPluginsListed()
	for _, w := range c.workers {
		w.end(false, true)
	}
	c.plugins.Wait()
	c.wantNoRecords()
	c.wantEventsReplay()
	for _, s := range c.services {
		if volumes, err := s.backend.Volumes(); err != nil || len(volumes) > 0 {
			c.t.Errorf("the storage of %s still has %+v, %v", s.id, volumes, err)
		}
	}
	for _, pattern := range []string{c.config.StateDir + "/mnt/*/*/*", c.config.RunDir + "/t/*"} {
		left, err := filepath.Glob(pattern)
		if err != nil || len(left) > 0 {
			c.t.Errorf("directories left: %v, %v", left, err)
		}
		for _, event := range c.recorded.all() {
			if slices.ContainsFunc(left, func(dir string) bool { return strings.Contains(event.Detail, dir) }) {
				c.t.Logf("generation %d at %s: %s", event.Generation, event.At.UTC().Format("05.000"), event)
			}
		}
	}
	lines, err := journal.Read(c.journal)
	c.must(err)
	logViolations(c.t, lines, journal.Check(lines, journal.Options{Settled: true}))
}

// logViolations logs what the journal has of the volumes of violations shortly before them.
func logViolations(t *testing.T, lines []journal.Line, violations []journal.Violation) {
	for _, v := range violations {
		t.Logf("journal: %s", v)
		if v.Line == 0 {
			continue
		}
		from := max(0, v.Line-100)
		for i, l := range lines[from:min(len(lines), v.Line+20)] {
			if l.Volume == lines[v.Line-1].Volume || l.Kind == journal.Start || l.Kind == journal.Stop {
				t.Logf("line %d %s %s %s call %d of %s by %d: %s %s, request %.8s, beside %v, effect %v, killed %v",
					from+i+1,
					l.Wall.Format("05.000"), l.Kind, l.RPC, l.Call, l.Instance, l.Peer, l.Code, l.Target, l.Hash,
					l.Beside, l.Effect, l.Killed)
			}
		}
	}
}

// wantPluginsListed checks that each worker's task and instances are listed, and no other.
func (c *chaosEnv) wantPluginsListed() {
	instances := 0
	for _, w := range c.workers {
		w.restartIfDead() // a late crash
		if err := w.waitHealth(host.Healthy); err != nil {
			c.t.Error(err)
		}
		instances++
		if w.role == csifake.Monolith {
			instances++
		}
	}
	list, _, err := c.host.Plugins(c.ctx(), host.PluginQuery{})
	if err != nil || len(list.Instances) != instances || len(list.Tasks) != len(c.workers) {
		c.t.Errorf("%d instances and %d tasks are listed, want %d and %d: %+v, %v",
			len(list.Instances), len(list.Tasks), instances, len(c.workers), list, err)
	}
}

func (c *chaosEnv) wantNoRecords() {
	volumes, _, err1 := c.host.Volumes(c.ctx(), host.VolumeQuery{})
	claims, _, err2 := c.host.Claims(c.ctx())
	allocs, _, err3 := c.host.Allocs(c.ctx(), "")
	plugins, _, err4 := c.host.Plugins(c.ctx(), host.PluginQuery{})
	st, err5 := c.host.Status(c.ctx())
	err := errors.Join(err1, err2, err3, err4, err5)
	if err != nil || len(volumes)+len(claims)+len(allocs)+len(plugins.Instances)+len(plugins.Tasks) > 0 ||
		st.OpenIntents > 0 {
		c.t.Errorf("left are the volumes %+v, claims %+v, allocs %+v, plugins %+v and %d intents: %v",
			volumes, claims, allocs, plugins, st.OpenIntents, err)
	}
}

// lastAlloc serves a plugin as the very last thing that happens, so that a watcher knows that it has seen everything.
const lastAlloc = "end-monolith-0-1"

func isLast(event host.Event) bool {
	return event.Kind == registry.EventTaskRemoved && event.Alloc == lastAlloc
}

// wantEventsReplay checks that the watcher got the same events that a new watcher gets, and that they add up to
// nothing.
func (c *chaosEnv) wantEventsReplay() {
	w := c.newWorker(&pluginService{id: "end", backend: csifake.NewBackend("")}, csifake.Monolith, 0)
	w.newAlloc()
	w.start()
	if err := w.waitHealth(host.Healthy); err != nil {
		c.t.Error(err)
	}
	w.end(false, true)
	c.watching.Wait()
	history := c.eventsUntil(isLast)
	for _, kind := range missingKinds(history) {
		c.t.Errorf("no event %q: the run proves nothing", kind)
	}
	for _, problem := range replayErrors(history) {
		c.t.Errorf("events: %s", problem)
	}
	if problem := eventDiff(c.recorded.all(), history); problem != "" {
		c.t.Errorf("the watcher: %s", problem)
	}
	c.t.Logf("%d events, %d shims", len(history), history[len(history)-1].Generation)
}

// missingKinds returns the kinds of events without which a run proves nothing.
func missingKinds(history []host.Event) (kinds []host.EventKind) {
	for _, kind := range []host.EventKind{"volume created", "published", "step failed", "activated"} {
		if !slices.ContainsFunc(history, func(event host.Event) bool { return event.Kind == kind }) {
			kinds = append(kinds, kind)
		}
	}
	return kinds
}

// TestChaosIsJudged is a negative control: a journal without an unpublish and a history without some events are found.
func TestChaosIsJudged(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.scenario())
	e.stopPlugin(p)
	lines, err := journal.Read(e.journal)
	e.must(err)
	without := slices.DeleteFunc(slices.Clone(lines), func(l journal.Line) bool {
		return l.RPC == "NodeUnpublishVolume"
	})
	if len(without) == len(lines) || len(journal.Check(without, journal.Options{Settled: true})) == 0 {
		t.Error("a journal without its NodeUnpublishVolume is found legal")
	}
	history := e.eventsUntil(func(event host.Event) bool { return event.Kind == registry.EventTaskRemoved })
	if problems := replayErrors(history); len(problems) > 0 {
		t.Errorf("a complete history: %v", problems)
	}
	for _, kind := range []host.EventKind{"released", "unpublished", "volume deleted", "deregistered"} {
		less := slices.DeleteFunc(slices.Clone(history), func(event host.Event) bool { return event.Kind == kind })
		if len(replayErrors(less)) == 0 {
			t.Errorf("a history without its events %q is found complete", kind)
		}
	}
}
