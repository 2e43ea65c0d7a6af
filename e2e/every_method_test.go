package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// Many callers call each method of a host all the time, while shims are replaced and killed. Each call ends as with
// one shim: what it asks for is done once, and what must be refused is refused. Streams continue. Each mutating method
// is held by a swap at least once, and cut off by a kill.
func TestNoFailedCall(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		disturb func(tr *traffic) func(methods []string) (missed []string)
		without []string // methods that are not called
	}{
		"swapped": {(*traffic).swapDuring, nil},
		"killed":  {(*traffic).killDuring, []string{"Swap", "SwapAs"}},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "killed" { // TestShimKilledInTheMiddle is shorter
				slow(t)
			}
			t.Parallel()
			tr, stop := newTraffic(t)
			disturb := c.disturb(tr)
			tr.startAll()
			for _, methods := range methodGroups {
				for tries := 1; len(methods) > 0; tries++ {
					tr.waitCalls("CreateVolume", "PrepareAlloc", "ReleaseAlloc", "Volumes", "TaskStarted", "ServeCSI")
					if methods = disturb(methods); tries == maxTries && len(methods) > 0 {
						t.Fatalf("%d shims were not killed while calls of %v were under way", tries, methods)
					}
				}
			}
			tr.waitCalls("CreateVolume", "PrepareAlloc", "ReleaseAlloc", "Sync", "Doctor", "ServeCSI")
			stop()
			tr.stopPlugin(tr.plugin)
			tr.verify()
			tr.must(tr.host.Close())
			tr.count("Close")
			made := tr.counts()
			var never []string
			for m := range reflect.TypeFor[*host.Host]().Methods() {
				if made[m.Name] == 0 {
					never = append(never, m.Name)
				}
			}
			if !slices.Equal(never, c.without) {
				t.Errorf("methods that were not called: %v", never)
			}
			t.Logf("%d shims, calls: %v", len(tr.pids), made)
		})
	}
}

// maxTries bounds how often killDuring is repeated for calls that it missed.
const maxTries = 50

// repair is the method Doctor where it changes something.
const repair = "Doctor with repair"

// mutators maps the shim's names of mutating methods to the host's.
var mutators = map[string]string{
	"Volumes.Create": "CreateVolume", "Volumes.Expand": "ExpandVolume", "Volumes.Delete": "DeleteVolume",
	"VolumeChanges.Modify": "ModifyVolume", "VolumeChanges.Update": "UpdateVolume",
	"VolumeChanges.Adopt": "AdoptVolume",
	"Snapshots.Create":    "CreateSnapshot", "Snapshots.Delete": "DeleteSnapshot",
	"Snapshots.Deregister": "DeregisterSnapshot", "Snapshots.CreateGroup": "CreateGroupSnapshot",
	"Snapshots.DeleteGroup": "DeleteGroupSnapshot", "Snapshots.DeregisterGroup": "DeregisterGroupSnapshot",
	"Volumes.Register": "RegisterVolume", "Volumes.Deregister": "DeregisterVolume",
	"Tasks.Starting": "TaskStarting", "Tasks.Started": "TaskStarted", "Tasks.Stopping": "TaskStopping",
	"Tasks.Exited": "TaskExited", "Tasks.Prefer": "PreferTask",
	"Allocs.ForceRelease": "ForceReleaseAlloc", "Volumes.Detach": "DetachVolume",
	"Allocs.Prepare": "PrepareAlloc", "Allocs.Release": "ReleaseAlloc", "Allocs.Sync": "Sync", "Doctor": repair,
}

// methodGroups are all mutators, in groups that have callers of their own, so that these can wait for each other.
var methodGroups = [][]string{
	{"CreateVolume", "RegisterVolume", "TaskStarting", "CreateSnapshot", "CreateGroupSnapshot"},
	{"PrepareAlloc", "DeregisterVolume", "TaskStarted", "DeleteSnapshot", "DeleteGroupSnapshot"},
	{"ExpandVolume", "ReleaseAlloc", "TaskStopping", "DeregisterSnapshot", "DeregisterGroupSnapshot"},
	{"DeleteVolume", "TaskExited", "ModifyVolume"},
	{"AdoptVolume", "PreferTask", "ForceReleaseAlloc", "DetachVolume"}, {"UpdateVolume"},
	{"Sync"},
	{repair},
}

// swapDuring makes calls of some methods in the middle of a swap, while no shim is active. They are held until one is.
func (tr *traffic) swapDuring() func([]string) []string {
	activate := tr.newBreakpoint("Activate before")
	tr.setFaults(activate.faults()...)
	return func(methods []string) []string {
		b := tr.gather(methods)
		tr.must(activate.set())
		report := tr.swapWhile(func() {
			tr.waitReached(activate)
			close(b.begin)
			for method, c := range b.callers {
				tr.waitUntil(method+" is called", func() bool { return isClosed(c.waiting) || isClosed(c.ended) })
			}
			if ended := b.ended(); len(ended) > 0 {
				tr.t.Errorf("calls of %v ended while no shim was active", ended)
			}
			tr.must(activate.unset())
		})
		if report.Held < len(methods) {
			tr.t.Errorf("%v were held, and the swap reports %d calls", methods, report.Held)
		}
		tr.count("Swap")
		tr.count("SwapAs")
		return nil
	}
}

// killDuring kills shims that have done what calls of some methods ask for and have not answered. missed are the
// methods whose call was another one.
func (tr *traffic) killDuring() func([]string) []string {
	dir := filepath.Join(tr.dir, "hang")
	tr.must(os.Mkdir(dir, 0o700))
	mark := func(method string) string { return filepath.Join(dir, strings.ReplaceAll(method, " ", "-")) }
	var hangs []string
	for at, method := range mutators {
		hangs = append(hangs, at+" after hang once "+mark(method))
		tr.must(os.WriteFile(mark(method), nil, 0o600))
	}
	tr.setFaults(hangs...)
	tr.swap()
	return func(methods []string) (missed []string) {
		b := tr.gather(methods)
		for _, method := range methods {
			tr.must(os.Remove(mark(method)))
		}
		close(b.begin)
		for _, method := range methods {
			tr.waitUntil(method+" hangs", func() bool { return exists(mark(method)) })
		}
		missed = b.ended()
		tr.replaceShimByKill()
		return missed
	}
}

// verify compares the effects on volumes with the events.
func (tr *traffic) verify() {
	tr.t.Helper()
	events := tr.eventsUntil(func(event host.Event) bool {
		return event.Kind == "task deregistered" && event.Alloc == tr.plugin.task.Alloc
	})
	other := map[string]bool{}
	for _, c := range tr.calls("CreateVolume") {
		other[volumeOf(c)] = strings.HasPrefix(c.Name, "client-") || repeats(c.Name)
	}
	calls := slices.DeleteFunc(tr.calls(), func(c journal.Call) bool { return other[volumeOf(c)] })
	events = slices.DeleteFunc(events, func(event host.Event) bool {
		return repeats(string(event.Volume.ID))
	})
	for _, problem := range effectErrors(calls, events) {
		tr.t.Error(problem)
	}
}

// repeats reports whether one shim may repeat a call for the volume that has succeeded. It was requested twice, or a
// forced release has cancelled the call.
func repeats(volume string) bool {
	return strings.HasPrefix(volume, "hurried-") || strings.HasPrefix(volume, "forced-")
}

// One shim at a time writes the state and calls plugins, while calls continue and shims are replaced and killed. The
// holders of the lock of shim.db, the processes that call the plugin, and the generations follow one another.
func TestOneWriter(t *testing.T) {
	t.Parallel()
	tr, stop := newTraffic(t)
	earlier := len(tr.pids) - 1 // shims that were replaced before
	lockHolders := tr.watchLock()
	tr.startUsers()
	swap := func() { tr.swap() }
	for _, disturb := range []func(){swap, tr.replaceShimByKill, swap, tr.replaceShimByKill, swap} {
		tr.waitCalls("CreateVolume", "PrepareAlloc", "ReleaseAlloc")
		disturb()
	}
	tr.waitCalls("CreateVolume", "PrepareAlloc", "ReleaseAlloc")
	stop()
	if held := lockHolders(); !slices.Equal(held, tr.pids[earlier:]) {
		t.Errorf("the state was locked by %v; the active shims were %v", held, tr.pids[earlier:])
	}
	tr.stopPlugin(tr.plugin)
	for _, problem := range overlapErrors(tr.calls(), tr.pids) {
		t.Error(problem)
	}
	generation := uint64(0)
	for _, event := range tr.eventsUntil(func(event host.Event) bool { return event.Kind == "task deregistered" }) {
		if uint64(event.Generation) < generation {
			t.Errorf("generation %d wrote after %d: %s", event.Generation, generation, event)
		}
		generation = uint64(event.Generation)
	}
	if generation < uint64(len(tr.pids)) {
		t.Errorf("%d shims were active, and the last generation is %d", len(tr.pids), generation)
	}
}

// traffic is callers of all methods of a host. The result of each call is known before.
type traffic struct {
	*env
	plugin  *pluginTask
	stopped context.Context // ends callers after what they are doing
	callers sync.WaitGroup
	streams sync.WaitGroup
	lives   sync.RWMutex // held to read by each user, to write by who needs that only the plugin lives
	// taken before lives is to write, and while a barrier gathers callers, which hold lives to read
	gathering sync.Mutex

	mu      sync.Mutex     // guards what follows
	made    map[string]int // calls that ended as they should, by method
	barrier *barrier       // nil: none
}

// barrier gathers one caller of each of some methods, until all of them call at once.
type barrier struct {
	callers map[string]*barrierCall // by method; nil: not there yet
	begin   chan struct{}
}

type barrierCall struct {
	waiting chan struct{} // closed when the call waits for its end
	ended   chan struct{}
}

// gather returns once a caller of each of the methods has come. They call when begin is closed.
func (tr *traffic) gather(methods []string) *barrier {
	tr.t.Helper()
	b := &barrier{map[string]*barrierCall{}, make(chan struct{})}
	for _, method := range methods {
		b.callers[method] = nil
	}
	if !slices.Contains(methods, "Sync") && !slices.Contains(methods, repair) {
		tr.gathering.Lock()
		defer tr.gathering.Unlock()
	}
	tr.mu.Lock()
	tr.barrier = b
	tr.mu.Unlock()
	tr.waitUntil(fmt.Sprintf("a caller of each of %v waits", methods), func() bool {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		return !slices.Contains(slices.Collect(maps.Values(b.callers)), nil)
	})
	return b
}

// join waits at the barrier if it needs a caller of the method, else it returns nil.
func (tr *traffic) join(method string) *barrierCall {
	tr.mu.Lock()
	b := tr.barrier
	if b == nil {
		tr.mu.Unlock()
		return nil
	}
	if c, expected := b.callers[method]; !expected || c != nil {
		tr.mu.Unlock()
		return nil
	}
	c := &barrierCall{make(chan struct{}), make(chan struct{})}
	b.callers[method] = c
	tr.mu.Unlock()
	select {
	case <-b.begin:
	case <-tr.stopped.Done():
	}
	return c
}

// ended returns the methods whose calls have ended.
func (b *barrier) ended() (methods []string) {
	for method, c := range b.callers {
		if isClosed(c.ended) {
			methods = append(methods, method)
		}
	}
	return methods
}

// newTraffic starts a plugin, and no callers yet. stop ends them and waits for their calls.
func newTraffic(t *testing.T) (tr *traffic, stop func()) {
	e := unopenedEnv(t, slices.Concat([]string{"node/GET_VOLUME_STATS", "CREATE_DELETE_SNAPSHOT", "LIST_SNAPSHOTS",
		"GET_CAPACITY"}, groupCaps, expandCaps,
		[]string{"SNAPSHOT_METADATA_SERVICE", "MODIFY_VOLUME", "GET_VOLUME"})...)
	e.config.Fence = func(context.Context, string) error { return nil }
	e.open()
	e.leaveAttached(lostNode, lostVolumes())
	tr = &traffic{env: e, made: map[string]int{}, plugin: e.addPlugin("alloc-p", csifake.Monolith)}
	stopped, cancel := context.WithCancel(t.Context())
	tr.stopped = stopped
	return tr, func() {
		cancel()
		tr.callers.Wait()
		tr.streams.Wait()
	}
}

// startAll starts callers of every method.
func (tr *traffic) startAll() {
	tr.must(tr.create("kept"))
	tr.must(tr.host.DeregisterVolume(tr.ctx(), volumeName("kept")))
	tr.startUsers()
	tr.repeat(func(n int) { tr.pluginLife(fmt.Sprintf("p%d", n)) })
	tr.repeat(func(n int) { tr.hurried(fmt.Sprintf("hurried-%d", n), time.Duration(1+n*7%40)*time.Millisecond) })
	tr.repeat(func(n int) { tr.registerAndForget(fmt.Sprintf("known-%d", n)) })
	tr.repeat(func(n int) { tr.snapshotLife(fmt.Sprintf("snap-%d", n)) })
	tr.repeat(func(n int) { tr.groupLife(fmt.Sprintf("group-%d", n)) })
	conn, _ := tr.serveCSI()
	for i := range 2 {
		tr.repeat(func(n int) { tr.clientLife(conn, fmt.Sprintf("client-%d-%d", i, n)) })
	}
	tr.repeat(func(n int) { tr.forcedLife(fmt.Sprintf("forced-%d", n)) })
	tr.repeat(tr.detachLost)
	tr.repeat(tr.readAll)
	tr.repeat(tr.callRefused)
	tr.repeat(tr.callAlone)
	tr.watchAll(tr.stopped)
}

// startUsers starts three callers that create volumes and use them.
func (tr *traffic) startUsers() {
	for i := range 3 {
		release := []string{"ReleaseAlloc", "ReleaseAlloc", "ReplaceAlloc"}[i]
		tr.repeat(func(n int) { tr.volumeLife(fmt.Sprintf("v-%d-%d", i, n), release) })
	}
}

func (tr *traffic) repeat(do func(n int)) {
	tr.callers.Go(func() {
		for n := 0; tr.stopped.Err() == nil; n++ {
			do(n)
			sleep(tr.stopped, 50*time.Millisecond)
		}
	})
}

// call makes a call with a deadline that is far enough. It must succeed, or fail with the wanted kind of error.
func (tr *traffic) call(method string, wanted error, f func(context.Context) error) bool {
	var c *barrierCall
	if wanted == nil { // a refusal may need no shim
		c = tr.join(method)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(tr.stopped), waitLimit)
	defer cancel()
	var err error
	if c == nil {
		err = f(ctx)
	} else {
		err = f(blockingContext{ctx, new(sync.Once), c.waiting})
		close(c.ended)
	}
	if wanted == nil && err != nil || !errors.Is(err, wanted) {
		tr.t.Errorf("%s ended with %v, not %v", method, err, wanted)
		return false
	}
	tr.count(method)
	return true
}

func (tr *traffic) count(method string) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.made[method]++
}

// counts returns how many calls of each method have ended.
func (tr *traffic) counts() map[string]int {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return maps.Clone(tr.made)
}

// waitCalls waits until each method has been called again.
func (tr *traffic) waitCalls(methods ...string) {
	tr.t.Helper()
	was := tr.counts()
	tr.waitUntil("the calls continue", func() bool {
		now := tr.counts()
		return !slices.ContainsFunc(methods, func(method string) bool { return now[method] <= was[method] })
	})
}

// volumeLife creates a volume, uses it once and deletes it. release is the method that ends the use.
func (tr *traffic) volumeLife(id, release string) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	h, name := tr.host, volumeName(id)
	var spec host.VolumeSpec
	var group host.AllocGroup
	var plans map[string]host.Plan
	for _, step := range []struct {
		method string
		wanted error
		call   func(context.Context) error
	}{
		{"ParseVolume", nil, func(ctx context.Context) (err error) {
			spec, err = parseVolume(ctx, h, volumeText("fake", id, ""))
			return err
		}},
		{"CreateVolume", nil, func(ctx context.Context) error { return errOf(h.CreateVolume(ctx, spec)) }},
		{"Parse", nil, func(ctx context.Context) (err error) {
			group, err = parseGroup(ctx, h, "user-"+id, groupText(request{source: id}))
			return err
		}},
		{"Feasible", nil, func(ctx context.Context) error { return wantNone(h.Feasible(ctx, group)) }},
		{"FeasibleNodes", nil, func(ctx context.Context) error {
			list, _, err := h.FeasibleNodes(ctx, group)
			if err == nil && (len(list) != 1 || len(list[0].Reasons) > 0) {
				err = fmt.Errorf("the nodes are %+v", list)
			}
			return err
		}},
		{"PrepareAlloc", nil, func(ctx context.Context) (err error) {
			plans, err = h.PrepareAlloc(ctx, group)
			return err
		}},
		{"", nil, func(context.Context) error {
			return os.WriteFile(filepath.Join(planEnv(plans["t"], "HOLDFAST_VOLUME_DATA"), "f"), []byte("x"), 0o600)
		}},
		{"VolumeStats", nil, func(ctx context.Context) error { _, _, err := h.VolumeStats(ctx, name); return err }},
		{"ExpandVolume", nil, func(ctx context.Context) error { return expand(ctx, h, name, 3<<30) }},
		{"ModifyVolume", nil, func(ctx context.Context) error {
			return modify(ctx, h, name, map[string]string{"tier": "gold"})
		}},
		{"ModifyVolume", host.ErrInvalid, func(ctx context.Context) error { return modify(ctx, h, name, nil) }},
		{"DeleteVolume", host.ErrConflict, func(ctx context.Context) error { return h.DeleteVolume(ctx, name) }},
		{"Claims", nil, func(ctx context.Context) error { return tr.wantClaim(ctx, group.Alloc) }},
		{release, nil, func(ctx context.Context) error {
			if release == "ReplaceAlloc" {
				return h.ReplaceAlloc(ctx, group.Alloc)
			}
			return h.ReleaseAlloc(ctx, group.Alloc)
		}},
		{"Allocs", nil, func(ctx context.Context) error {
			return wantNone(h.Allocs(ctx, host.AllocQuery{ID: group.Alloc}))
		}},
		{"ExpandVolume", host.ErrInvalid, func(ctx context.Context) error { return expand(ctx, h, name, 1) }},
		{"DeleteVolume", nil, func(ctx context.Context) error { return h.DeleteVolume(ctx, name) }},
		{"Volumes", nil, func(ctx context.Context) error {
			return wantNone(h.Volumes(ctx, host.VolumeQuery{Name: name}))
		}},
	} {
		if !tr.call(step.method, step.wanted, step.call) {
			return
		}
	}
}

// wantClaim returns an error unless the alloc has exactly one claim.
func (tr *traffic) wantClaim(ctx context.Context, id host.AllocID) error {
	list, _, err := tr.host.Claims(ctx, host.ClaimQuery{Alloc: id})
	if err == nil && len(list) != 1 {
		err = fmt.Errorf("%s has the claims %v", id, list)
	}
	return err
}

// wantNone returns an error unless a list is empty.
func wantNone[T any](list []T, _ host.Seq, err error) error {
	if err == nil && len(list) > 0 {
		err = fmt.Errorf("it exists: %+v", list)
	}
	return err
}

// snapshotLife takes a snapshot of a volume, lists it and deletes it.
func (tr *traffic) snapshotLife(id string) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	h, volume := tr.host, volumeName("of-"+id)
	name := host.SnapshotName{Namespace: "default", ID: host.SnapshotID(id)}
	wantOne := func(list []host.Snapshot, err error) error {
		if err == nil && !slices.ContainsFunc(list, func(s host.Snapshot) bool { return s.SnapshotName() == name }) {
			err = fmt.Errorf("snapshot %s is not listed: %+v", name, list)
		}
		return err
	}
	for _, step := range []struct {
		method string
		call   func(context.Context) error
	}{
		{"", func(ctx context.Context) error { return createText(ctx, h, volumeText("fake", string(volume.ID), "")) }},
		{"CreateSnapshot", func(ctx context.Context) error {
			return errOf(h.CreateSnapshot(ctx, host.SnapshotSpec{Namespace: "default", ID: name.ID, Volume: volume.ID}))
		}},
		{"Snapshots", func(ctx context.Context) error {
			list, _, err := h.Snapshots(ctx, host.SnapshotQuery{Name: name})
			return wantOne(list, err)
		}},
		{"SnapshotBlocks", func(ctx context.Context) error {
			return h.SnapshotBlocks(ctx, host.BlockQuery{Snapshot: name}, func(host.Blocks) error { return nil })
		}},
		{"SnapshotsAtPlugin", func(ctx context.Context) error { return wantOne(h.SnapshotsAtPlugin(ctx, "fake")) }},
		{"DeregisterSnapshot", func(ctx context.Context) error { return h.DeregisterSnapshot(ctx, name) }},
		{"CreateSnapshot", func(ctx context.Context) error {
			return errOf(h.CreateSnapshot(ctx, host.SnapshotSpec{Namespace: "default", ID: name.ID, Volume: volume.ID}))
		}},
		{"DeleteSnapshot", func(ctx context.Context) error { return h.DeleteSnapshot(ctx, name) }},
		{"Snapshots", func(ctx context.Context) error {
			return wantNone(h.Snapshots(ctx, host.SnapshotQuery{Name: name}))
		}},
		{"", func(ctx context.Context) error { return h.DeleteVolume(ctx, volume) }},
	} {
		if !tr.call(step.method, nil, step.call) {
			return
		}
	}
}

// groupLife takes a group snapshot of two volumes, lists it and deletes it.
func (tr *traffic) groupLife(id string) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	h, first, second := tr.host, volumeName("of-"+id), volumeName("also-of-"+id)
	spec := host.SnapshotSpec{Namespace: "default", ID: host.SnapshotID(id),
		Volumes: []host.VolumeID{first.ID, second.ID}}
	name := spec.SnapshotName()
	list := func(ctx context.Context) error {
		groups, _, err := h.GroupSnapshots(ctx, host.SnapshotQuery{Name: name})
		if err == nil && (len(groups) != 1 || len(groups[0].Members) != 2) {
			err = fmt.Errorf("group snapshot %s is not listed: %+v", name, groups)
		}
		return err
	}
	for _, step := range []struct {
		method string
		call   func(context.Context) error
	}{
		{"", func(ctx context.Context) error { return createText(ctx, h, volumeText("fake", string(first.ID), "")) }},
		{"", func(ctx context.Context) error { return createText(ctx, h, volumeText("fake", string(second.ID), "")) }},
		{"CreateGroupSnapshot", func(ctx context.Context) error { return errOf(h.CreateGroupSnapshot(ctx, spec)) }},
		{"GroupSnapshots", list},
		{"DeregisterGroupSnapshot", func(ctx context.Context) error { return h.DeregisterGroupSnapshot(ctx, name) }},
		{"CreateGroupSnapshot", func(ctx context.Context) error { return errOf(h.CreateGroupSnapshot(ctx, spec)) }},
		{"DeleteGroupSnapshot", func(ctx context.Context) error { return h.DeleteGroupSnapshot(ctx, name) }},
		{"GroupSnapshots", func(ctx context.Context) error {
			return wantNone(h.GroupSnapshots(ctx, host.SnapshotQuery{Name: name}))
		}},
		{"", func(ctx context.Context) error { return h.DeleteVolume(ctx, first) }},
		{"", func(ctx context.Context) error { return h.DeleteVolume(ctx, second) }},
	} {
		if !tr.call(step.method, nil, step.call) {
			return
		}
	}
}

// clientLife is a volume of a CSI client.
func (tr *traffic) clientLife(conn *grpc.ClientConn, name string) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	v := newCSIVolume(conn, name, filepath.Join(tr.dir, "clients"))
	tr.call("ServeCSI", nil, v.life)
}

// registerAndForget registers and deregisters a volume that the plugin has.
func (tr *traffic) registerAndForget(id string) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	var spec host.VolumeSpec
	if !tr.call("ParseVolume", nil, func(ctx context.Context) (err error) {
		spec, err = parseVolume(ctx, tr.host, volumeText("fake", id, ""))
		return err
	}) {
		return
	}
	spec.External = registry.ExternalID(csifake.VolumeID("kept"))
	spec.Context = map[string]string{"csifake/name": "kept", "pool": "p"}
	tr.call("RegisterVolume", nil, func(ctx context.Context) error { return errOf(tr.host.RegisterVolume(ctx, spec)) })
	deregister := func(ctx context.Context) error { return tr.host.DeregisterVolume(ctx, volumeName(id)) }
	tr.call("DeregisterVolume", nil, deregister)
	tr.call("AdoptVolume", nil, func(ctx context.Context) error { return errOf(tr.host.AdoptVolume(ctx, spec)) })
	spec.Secrets = map[string]registry.Secret{"token": {Env: "HOME"}}
	tr.call("UpdateVolume", nil, func(ctx context.Context) error {
		return errOf(tr.host.UpdateVolume(ctx, spec, false))
	})
	tr.call("DeregisterVolume", nil, deregister)
}

// pluginLife is a plugin's task that starts, becomes healthy and is stopped.
func (tr *traffic) pluginLife(id string) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	h := tr.host
	task := host.AllocTask{Alloc: host.AllocID("alloc-" + id), Task: "plugin", Attempt: 1}
	var plan host.Plan
	ok := tr.call("Parse", nil, func(ctx context.Context) error {
		source := host.Source{Name: "plugin.hcl", Text: []byte(pluginText(id, csifake.Monolith, ""))}
		job, _, err := h.Parse(ctx, source, host.ParseOptions{})
		if err == nil {
			task.Sealed = job.Groups[0].Tasks[0].Sealed
		}
		return err
	}) && tr.call("TaskStarting", nil, func(ctx context.Context) (err error) {
		plan, err = h.TaskStarting(ctx, task)
		return err
	})
	if !ok {
		return
	}
	p, err := csifake.New(csifake.Config{
		Name: id + ".example.org", Socket: csifake.SocketPath(planEnv(plan, "CSI_ENDPOINT")), Journal: tr.journal,
		Blind: true, Instance: id,
	})
	tr.must(err)
	exited := background(func() error { return p.Run(context.WithoutCancel(tr.t.Context())) })
	tr.call("TaskStarted", nil, func(ctx context.Context) error { return h.TaskStarted(ctx, task.Key(), 1) })
	tr.waitUntil(id+" is healthy", func() bool {
		var list host.PluginList
		tr.call("Plugins", nil, func(ctx context.Context) (err error) {
			list, _, err = h.Plugins(ctx, host.PluginQuery{Plugin: host.PluginID(id)})
			return err
		})
		return len(list.Instances) == 2
	})
	tr.call("PreferTask", nil, func(ctx context.Context) error { return h.PreferTask(ctx, task.Key(), 1) })
	tr.call("TaskStopping", nil, func(ctx context.Context) error { return h.TaskStopping(ctx, task.Key(), 1) })
	p.Stop()
	if err := tr.result(id, exited); err != nil {
		tr.t.Errorf("%s: %v", id, err)
	}
	tr.call("TaskExited", nil, func(ctx context.Context) error { return h.TaskExited(ctx, task.Key(), 1, 0, 0, true) })
}

// hurried makes a call with hardly any time: it succeeds, or its time is over. The same call with enough time succeeds.
func (tr *traffic) hurried(id string, limit time.Duration) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	var spec host.VolumeSpec
	if !tr.call("ParseVolume", nil, func(ctx context.Context) (err error) {
		spec, err = parseVolume(ctx, tr.host, volumeText("fake", id, ""))
		return err
	}) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(tr.stopped), limit)
	defer cancel()
	if _, err := tr.host.CreateVolume(ctx, spec); err != nil && (!errors.Is(err, context.DeadlineExceeded) ||
		ctx.Err() == nil) {
		tr.t.Errorf("create a volume within %s: %v", limit, err)
	}
	tr.call("CreateVolume", nil, func(ctx context.Context) error { return errOf(tr.host.CreateVolume(ctx, spec)) })
	tr.call("DeleteVolume", nil, func(ctx context.Context) error { return tr.host.DeleteVolume(ctx, volumeName(id)) })
}

// readAll calls each method that reads.
func (tr *traffic) readAll(int) {
	h := tr.host
	for method, read := range map[string]func(context.Context) error{
		"Status":      func(ctx context.Context) error { return errOf(h.Status(ctx)) },
		"CallMetrics": func(ctx context.Context) error { return errOf(h.CallMetrics(ctx)) },
		"Volumes":     func(ctx context.Context) error { _, _, err := h.Volumes(ctx, host.VolumeQuery{}); return err },
		"Allocs":      func(ctx context.Context) error { _, _, err := h.Allocs(ctx, host.AllocQuery{}); return err },
		"Plugins":     func(ctx context.Context) error { _, _, err := h.Plugins(ctx, host.PluginQuery{}); return err },
		"PluginCapacity": func(ctx context.Context) error {
			return errOf(h.PluginCapacity(ctx, host.CapacityQuery{Plugin: "fake"}))
		},
		"Nodes":     func(ctx context.Context) error { _, _, err := h.Nodes(ctx, host.NodeQuery{}); return err },
		"Swaps":     func(context.Context) error { h.Swaps(); return nil },
		"ShimState": func(context.Context) error { h.ShimState(); return nil },
		"Doctor":    func(ctx context.Context) error { return errOf(h.Doctor(ctx, false, "")) },
	} {
		tr.call(method, nil, read)
	}
}

// callRefused makes calls that must be refused.
func (tr *traffic) callRefused(int) {
	sleep(tr.stopped, 20*time.Millisecond)
	h := tr.host
	tr.call("TaskStarting", host.ErrInvalid, func(ctx context.Context) error {
		return errOf(h.TaskStarting(ctx, host.AllocTask{Alloc: "../a", Task: "t", Attempt: 1}))
	})
	tr.call("PrepareAlloc", host.ErrInvalid, func(ctx context.Context) error {
		return errOf(h.PrepareAlloc(ctx, host.AllocGroup{Alloc: "../a", Namespace: "default"}))
	})
	tr.call("EndpointUses", nil, func(ctx context.Context) error {
		_, _, err := h.EndpointUses(ctx, host.EndpointQuery{Plugin: "fake"})
		return err
	})
	tr.call("ForceReleaseClaim", host.ErrNotFound, func(ctx context.Context) error {
		return errOf(h.ForceReleaseClaim(ctx, volumeName("none"), "none", host.Force{By: "e2e", Confirm: "none"}))
	})
	tr.call("DrainNode", host.ErrNotFound, func(ctx context.Context) error {
		return errOf(h.DrainNode(ctx, "none", host.DrainOptions{By: "e2e"}))
	})
	tr.call("NodeOutOfService", host.ErrUnsupported, func(ctx context.Context) error {
		return errOf(h.NodeOutOfService(ctx, "none", host.OutOfServiceOptions{By: "e2e"}))
	})
	tr.call("ForgetNode", host.ErrUnsupported, func(ctx context.Context) error {
		return h.ForgetNode(ctx, "none", host.ForgetOptions{By: "e2e"})
	})
	tr.call("ForgetEndpointUses", host.ErrNotFound, func(ctx context.Context) error {
		return h.ForgetEndpointUses(ctx, "fake", "none", host.Force{By: "e2e", Confirm: "none"})
	})
	tr.call("Parse", host.ErrInvalid, func(ctx context.Context) error {
		return errOf(parseGroup(ctx, h, "bad", "job {"))
	})
	tr.call("DeleteVolume", host.ErrNotFound, func(ctx context.Context) error {
		return h.DeleteVolume(ctx, volumeName("none"))
	})
	tr.call("VolumesAtPlugin", host.ErrUnsupported, func(ctx context.Context) error {
		return errOf(h.VolumesAtPlugin(ctx, "fake"))
	})
	tr.call("VolumeStats", host.ErrNotFound, func(ctx context.Context) error {
		_, _, err := h.VolumeStats(ctx, volumeName("none"))
		return err
	})
	tr.call("Watch", host.ErrInvalid, func(ctx context.Context) error {
		return h.Watch(ctx, host.WatchOptions{Role: "../x"}, nil)
	})
}

// callAlone calls Sync and Doctor while only the plugin lives, so that there is nothing to repair.
func (tr *traffic) callAlone(int) {
	sleep(tr.stopped, 200*time.Millisecond)
	tr.gathering.Lock()
	defer tr.gathering.Unlock()
	tr.lives.Lock()
	defer tr.lives.Unlock()
	running := tr.running(tr.plugin.task)
	running.Started.At = proc.BootTime()
	workload := host.Workload{Tasks: []host.WorkloadTask{running}}
	tr.call("Sync", nil, func(ctx context.Context) error { return tr.host.Sync(ctx, workload) })
	var found host.Diagnosis
	if tr.call("Doctor", nil, func(ctx context.Context) (err error) {
		found, err = tr.host.Doctor(ctx, false, "")
		return err
	}) {
		tr.call(repair, nil, func(ctx context.Context) error { return errOf(tr.host.Doctor(ctx, true, found.Digest)) })
	}
	if len(found.Findings) > 0 {
		tr.t.Errorf("only a plugin lives, and there is something to repair: %+v", found.Findings)
	}
}

// watchAll follows the events and the list of plugins until ctx ends. Nothing else may end either.
func (tr *traffic) watchAll(ctx context.Context) {
	for method, follow := range map[string]func() error{
		"Watch": func() error {
			return tr.host.Watch(ctx, host.WatchOptions{}, func(host.Event) error { return nil })
		},
		"Plugins": func() (err error) {
			for q := (host.PluginQuery{}); err == nil; {
				_, q.MinIndex, err = tr.host.Plugins(ctx, q)
			}
			return err
		},
	} {
		tr.streams.Go(func() {
			if err := follow(); !errors.Is(err, context.Canceled) {
				tr.t.Errorf("%s ended with %v", method, err)
			}
			tr.count(method)
		})
	}
}
