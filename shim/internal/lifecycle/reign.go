package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/internal/proc"
	"holdfast/registry"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/doctor"
	"holdfast/shim/internal/intent"
	"holdfast/shim/internal/node"
	"holdfast/shim/internal/rpc"
	"holdfast/shim/internal/store"
	"holdfast/shim/internal/suspend"
	"holdfast/shim/internal/task"
)

// reign is what an active shim is made of: built by open, taken down by close, in the opposite order.
type reign struct {
	node    registry.NodeName
	store   *store.Store
	table   *registry.Registry
	feed    *registry.Feed
	pulse   *rpc.Pulse
	fleet   *csi.Fleet
	tasks   *task.Tasks
	allocs  *node.Allocs
	volumes *controller.Controller
	meter   rpc.Meter
	health  func(context.Context) error // asks for the health of volumes in use
	doctor  *doctor.Doctor
	mounts  *doctor.Watch

	pause     intent.Pause    // while the shim is quiesced
	ctx       context.Context // of the use cases
	cancel    context.CancelCauseFunc
	stopStore context.CancelCauseFunc
	work      sync.WaitGroup // the loops that have plugins change something, and write down what became of that
	writer    sync.WaitGroup // the store's

	// The loops that have no plugin change anything: they watch, and write down what they see. They end after the others, and who waits for the state
	// waits for no more of them than a view or a commit that is under way.
	watching context.Context
	blind    context.CancelCauseFunc // ends them
	eyes     sync.WaitGroup
}

var errReleased = registry.Errorf(registry.ErrUnavailable, "%w", intent.ErrReleased)

// open builds a reign for what the host has said of itself.
func open(ctx context.Context, t *Tenure, hello *rpc.Hello, in inheritance) (*reign, error) {
	layout := hooks.Layout{Run: hello.RunDir, State: hello.StateDir}
	if err := layout.Check(); err != nil {
		return nil, err
	}
	m, err := mount.NewManager(layout)
	if err != nil {
		return nil, err
	}
	r := &reign{node: hello.Node, pulse: &rpc.Pulse{}}
	r.ctx, r.cancel = context.WithCancelCause(t.life)
	r.watching, r.blind = context.WithCancelCause(t.life)
	var around doctor.Surroundings
	var shared, surveyed sync.WaitGroup // what takes a while where much is mounted, as reading the state does
	var unseen error
	if !in.handed() {
		shared.Go(func() {
			switch err := m.Share(); {
			case errors.Is(err, registry.ErrExhausted):
				t.log.Warn("the file system is full: the shim cannot test whether mounts of plugin tasks reach this namespace", "error", err)
			case err != nil:
				t.log.Warn("mounts of plugin tasks will not reach this namespace: volumes cannot be used", "error", err)
			}
		})
	}
	err = r.openState(ctx, t, layout, m, in)
	if shared.Wait(); err == nil && !in.handed() { // the state is ours: nobody acts any more
		surveyed.Go(func() { around, unseen = doctor.Surveyed(m, layout.MountRoot()) })
	}
	if err == nil {
		err = r.load(ctx, t, in)
	}
	if surveyed.Wait(); err == nil {
		err = unseen
	}
	if err == nil {
		err = r.build(t, hello, layout, m, in)
	}
	if err == nil && !in.handed() { // else the shim before has kept records and machine in step until now
		err = r.compare(ctx, t, around)
	}
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	r.begin(t, in)
	return r, nil
}

// openState opens the store.
func (r *reign) openState(ctx context.Context, t *Tenure, layout hooks.Layout, m *mount.Manager, in inheritance) (err error) {
	r.store, err = store.Open(ctx, store.Options{
		Path: layout.Database(), Boot: m.Boot(), Now: time.Now, Applied: r.applied, Logger: t.log.Named("store"),
		Left: in.left, Generation: in.generation, Decoded: t.decoded,
	})
	if err != nil {
		return err
	}
	t.decoded.Migrated()
	return nil
}

// load loads the table, and starts the store's writer. Events are not loaded: the feed has the store for who asks for old ones.
func (r *reign) load(ctx context.Context, t *Tenure, in inheritance) (err error) {
	r.table = registry.New(r.store)
	if err := r.table.Load(ctx); err != nil {
		return fmt.Errorf("load the table of plugins: %w", err)
	}
	r.feed = registry.NewFeed(r.store, r.table, registry.RecentEvents)
	if !in.handed() { // the records are decoded by when the survey is done, with which they are compared
		if err := r.store.View(ctx, func(v registry.View) error { doctor.RecordsOf(v); return nil }); err != nil {
			return fmt.Errorf("load the records: %w", err)
		}
	}
	running, stop := context.WithCancelCause(context.WithoutCancel(t.life))
	r.stopStore = stop
	r.writer.Go(func() {
		if err := r.store.Run(running); err != nil && running.Err() == nil {
			t.fail(fmt.Errorf("the store has failed; the shim ends, to start over from what is on disk: %w", err))
		}
	})
	return nil
}

// applied publishes a committed change: the table first, as what is told of it may be looked up there.
func (r *reign) applied(a registry.Applied) {
	r.table.Applied(a)
	r.feed.Applied(a)
	r.pulse.Applied(a)
	if r.mounts != nil && a.Change.Touches(registry.BucketInstances) {
		r.mounts.Wake()
	}
}

// build wires the use cases and the adapters.
func (r *reign) build(t *Tenure, hello *rpc.Hello, layout hooks.Layout, m *mount.Manager, in inheritance) (err error) {
	r.fleet = in.met(r.table)
	clock := func() registry.BootTime { return registry.BootTime{Boot: m.Boot(), At: proc.BootTime()} }
	host := node.Host{Node: hello.Node, Operations: hello.Operations}
	supervisor := task.New(r.store, supervised{r.fleet}, task.Clock{Now: time.Now, Boot: clock}, rand.Float64, t.log.Named("tasks"))
	calls := intent.Calls{
		Sender:  intent.Sender{State: r.store, Now: time.Now, Pause: &r.pause, Drain: intent.DrainTime},
		Plugins: r.table, Secrets: t.callbacks, Locks: &intent.Locks{}, Expected: expected,
	}
	suspended := suspend.New(layout.Suspensions())
	stager := node.NewStager(calls, r.fleet, m, node.Options{
		Layout: layout, Check: true, Inspect: m.Inspect, Parts: m, Suspended: suspended,
	})
	r.meter, r.health = stager, stager.WatchHealth
	r.volumes = controller.New(calls, r.fleet, stager, t.log.Named("volumes"))
	r.tasks = task.NewTasks(supervisor, m, layout, hello.Operations)
	r.allocs = node.NewAllocs(calls, r.volumes, stager, host, t.log.Named("allocs"))
	if in.handed() {
		r.allocs.Calm, r.allocs.Breath = calm, breath
	}
	r.doctor = doctor.New(r.store, m, doctor.Options{
		Layout: layout, Now: time.Now, Logger: t.log.Named("doctor"), Live: true, Locks: calls.Locks, Undo: r.allocs.TakeDownUnclaimed, Lister: r.fleet,
		Suspended: suspended,
		Check:     func() []string { return contradictions(r.store) },
	})
	r.mounts = doctor.NewWatch(r.store, m, layout, time.Now, t.log.Named("mounts"))
	r.mounts.First = in.around()
	return nil
}

// supervised is the connections to plugins, for their supervisor.
type supervised struct{ *csi.Fleet }

func (s supervised) Connect(id registry.PluginID, t registry.TaskKey, at registry.Endpoint) (task.Plugin, error) {
	return s.Fleet.Connect(id, t, at)
}

// begin starts the use cases' loops.
func (r *reign) begin(t *Tenure, in inheritance) {
	r.works(t, "allocs", r.allocs.Run)
	r.works(t, "volumes", in.after(calm, r.volumes.Run))
	r.works(t, "health of volumes", r.health)
	r.watches(t, "tasks", r.tasks.Run)
	r.watches(t, "mounts", r.mounts.Run)
}

// compare compares what is recorded with what is there.
func (r *reign) compare(ctx context.Context, t *Tenure, around doctor.Surroundings) error {
	if _, err := r.doctor.Start(ctx, around); err != nil {
		return fmt.Errorf("compare the records with this machine: %w", err)
	}
	if err := r.tasks.Sweep(ctx); err != nil {
		t.log.Warn("directories of sockets are left", "error", err)
	}
	return nil
}

func (r *reign) works(t *Tenure, name string, f func(context.Context) error) {
	r.work.Go(func() { t.loop(r.ctx, name, f) })
}

func (r *reign) watches(t *Tenure, name string, f func(context.Context) error) {
	r.eyes.Go(func() { t.loop(r.watching, name, f) })
}

// loop runs f until ctx ends. Its own end ends the process.
func (t *Tenure) loop(ctx context.Context, name string, f func(context.Context) error) {
	if err := f(ctx); err != nil && ctx.Err() == nil {
		t.fail(fmt.Errorf("%s: %w", name, err))
	}
}

// stop ends the loops that have plugins change something and the calls that are under way; both still write down how they ended.
func (r *reign) stop(why error) {
	r.cancel(why)
	r.work.Wait()
}

// close takes everything down that open has built: first who calls plugins, then the connections, then the store.
func (r *reign) close() error {
	rest, err := r.release()
	return errors.Join(err, rest())
}

// release is close, but for what holds nobody up any more: rest.
func (r *reign) release() (rest func() error, err error) {
	r.stop(errReleased)
	r.blind(errReleased)
	idle, unmap := func() {}, func() error { return nil }
	if r.fleet != nil {
		idle = r.fleet.End()
	}
	var errs []error
	if r.stopStore != nil {
		r.stopStore(errReleased)
	}
	r.writer.Wait()
	if r.store != nil {
		unmap, err = r.store.Release()
		errs = append(errs, err)
	}
	return func() error { r.eyes.Wait(); idle(); return unmap() }, errors.Join(errs...)
}

// active is the reign as it is served.
func (r *reign) active() *rpc.Active {
	return &rpc.Active{
		Node: r.node, Generation: r.store.Generation(), Log: r.store, Table: r.table, Feed: r.feed, Pulse: r.pulse, Tasks: r.tasks, Allocs: r.allocs,
		Volumes: r.volumes, Meter: r.meter, Doctor: r.doctor, Context: r.ctx, Pause: &r.pause,
	}
}

// describe fills in what only a reign knows, unless it has been taken down.
func (r *reign) describe(st *rpc.Status) {
	counts, at, err := r.store.Count(registry.BucketIntents, registry.BucketNodeIntents, registry.BucketInstances, registry.BucketAllocs)
	if err != nil {
		return
	}
	st.Generation, st.Schema, st.Index = r.store.Generation(), store.Newest, at
	st.OpenIntents, st.Instances, st.Allocs = counts[0]+counts[1], counts[2], counts[3]
}
