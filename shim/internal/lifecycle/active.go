package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/internal/proc"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/cluster"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/doctor"
	"holdfast/shim/internal/endpoint"
	"holdfast/shim/internal/intent"
	"holdfast/shim/internal/node"
	"holdfast/shim/internal/rpc"
	"holdfast/shim/internal/store"
	"holdfast/shim/internal/task"
)

// activeState has all parts of an active shim: those that package rpc serves, and those that support them. open builds
// it, and close closes it in reverse order.
type activeState struct {
	rpc.Active
	store    *store.Store
	attacher *cluster.Attacher
	reaper   *cluster.Reaper // nil if Cluster is nil
	fleet    *csi.Fleet
	health   *controller.Health
	onNode   func(context.Context) error // loop that asks node plugins for the health of volumes and storage
	doctor   *doctor.Doctor
	mounts   *doctor.Watch

	cancel    context.CancelCauseFunc
	stopStore context.CancelCauseFunc
	workers   sync.WaitGroup // loops that make mutating CSI calls and record the outcomes
	writer    sync.WaitGroup // the store's writer

	// Loops that change nothing at a plugin and record what they observe. They end after the workers. Release waits
	// only for the view or commit that they have in progress.
	watchCtx     context.Context
	stopWatching context.CancelCauseFunc
	watchers     sync.WaitGroup
}

var errReleased = registry.Errorf(registry.ErrUnavailable, "%w", intent.ErrReleased)

// open builds the active state for the host that sent hello.
func open(ctx context.Context, p *Process, hello *rpc.Hello, in handoff) (*activeState, error) {
	layout := hooks.Layout{Run: hello.RunDir, State: hello.StateDir}
	if err := layout.Check(); err != nil {
		return nil, err
	}
	m, err := mount.NewManager(layout)
	if err != nil {
		return nil, err
	}
	r := &activeState{}
	r.Node = hello.Node
	r.Context, r.cancel = context.WithCancelCause(p.life)
	r.watchCtx, r.stopWatching = context.WithCancelCause(p.life)
	var sharing sync.WaitGroup // runs while the store opens, because it is slow if many mounts exist
	if !in.graceful() {
		sharing.Go(func() {
			switch err := m.Share(); {
			case errors.Is(err, registry.ErrExhausted):
				p.log.Warn("the file system is full: the shim cannot test whether mounts of plugin tasks reach this "+
					"namespace", "error", err)
			case err != nil:
				p.log.Warn("mounts of plugin tasks will not reach this namespace: volumes cannot be used", "error", err)
			}
		})
	}
	r.store, err = store.Open(ctx, store.Options{
		Path: layout.Database(), Boot: m.Boot(), Now: time.Now, Logger: p.log.Named("store"),
		Committing: p.committing(BeforeStore),
		Applied:    func(a registry.Applied) { p.committing(AfterStore)(a.Change); r.applied(a) },
		ReleasedAt: in.releasedAt, Generation: in.generation,
	})
	if sharing.Wait(); err == nil {
		err = r.load(ctx, p, hello)
	}
	if err == nil {
		r.build(p, hello, layout, m, in)
	}
	if err == nil && !in.graceful() { // else the previous shim has compared records and machine until now
		err = r.compare(ctx, p)
	}
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	r.begin(p)
	return r, nil
}

// load builds the parts that receive the store's changes, and the cluster's node if there is a cluster, and starts the
// store's writer. It fails if the records do not fit the cluster block. The feed reads old events from the store when
// they are needed.
func (r *activeState) load(ctx context.Context, p *Process, hello *rpc.Hello) (err error) {
	r.Table = registry.New(r.store)
	if err := r.Table.Load(ctx); err != nil {
		return fmt.Errorf("load the table of plugins: %w", err)
	}
	r.Notifier = rpc.NewNotifier(r.Table.Index())
	r.Feed = registry.NewFeed(r.store, r.Table, registry.RecentEvents)
	r.State = r.store
	r.Generation = r.store.Generation()
	if err := r.store.View(ctx, func(v registry.View) error {
		return cluster.CheckMember(v, hello.ClusterID())
	}); err != nil {
		return err
	}
	if hello.Cluster != nil {
		if r.Cluster, err = cluster.NewNode(cluster.Options{
			Cluster: *hello.Cluster, Node: hello.Node, Version: p.version, Local: r.store, Plugins: r.Table,
			Serve: r.serve(p.server), Repeat: r.repeat, Fence: p.callbacks.Fence, Now: time.Now,
			Sending: p.committing(BeforeEtcd), Logger: p.log.Named("cluster"),
		}); err != nil {
			return err
		}
		r.State = r.Cluster.State
	}
	running, stop := context.WithCancelCause(context.WithoutCancel(p.life))
	r.stopStore = stop
	r.writer.Go(func() {
		if err := r.store.Run(running); err != nil && running.Err() == nil {
			p.fail(fmt.Errorf("the store has failed; the shim exits, and the next one starts from the disk: %w", err))
		}
	})
	return nil
}

// applied publishes a committed change. The table gets it first, because readers of the event look there.
func (r *activeState) applied(a registry.Applied) {
	r.Table.Applied(a)
	r.Feed.Applied(a)
	r.Notifier.Applied(a)
	if r.Cluster != nil {
		r.Cluster.Applied(a)
		if r.Snapshots != nil && createsWork(a.Change) { // nil: build has not run yet
			r.Volumes.Wake()
			r.Snapshots.Wake()
		}
	}
	if r.Literals != nil {
		r.Literals.Applied(a)
	}
	if r.mounts != nil && a.Change.Touches(registry.BucketInstances) {
		r.mounts.Wake()
	}
}

// createsWork reports whether a change by any node may create work for this node: it has become the executor, has to
// delete a volume, or has to expand a mounted volume.
func createsWork(c registry.Change) bool {
	return c.Touches(registry.BucketExecutors) || slices.ContainsFunc(c.Put, func(record registry.Record) bool {
		v, is := record.(registry.Volume)
		return is && (v.Unwanted() || v.Expansion != registry.Expansion{})
	})
}

// build connects the use cases with the adapters.
func (r *activeState) build(
	p *Process, hello *rpc.Hello, layout hooks.Layout, m *mount.Manager, in handoff,
) {
	r.fleet = in.fleet(r.Table, p.observer())
	clock := func() registry.BootTime { return registry.BootTime{Boot: m.Boot(), At: proc.BootTime()} }
	host := node.Host{Node: hello.Node, Operations: hello.Operations}
	state := r.State
	supervisor := task.New(state, taskFleet{r.fleet}, task.Clock{Now: time.Now, Boot: clock}, rand.Float64,
		p.log.Named("tasks"))
	calls := intent.Calls{
		Sender: intent.Sender{State: state, Now: time.Now, Drain: intent.DrainTime,
			Traces: p.Traces.Provider()},
		Plugins: r.Table, Secrets: p.callbacks, Locks: &intent.Locks{}, Expected: expectsPlugin,
	}
	if r.Cluster != nil {
		calls.Executors, calls.Node = r.Cluster.Executors, hello.Node
		calls.Plugins = r.Cluster.Executors.Table(r.Table)
	}
	suspended := csi.NewSuspensions(layout.Suspensions())
	var admitted func(registry.View) error
	if r.Cluster != nil {
		admitted = r.Cluster.Admitted
	}
	stager := node.NewStager(calls, r.fleet, m, node.Options{
		Layout: layout, Node: hello.Node, Admitted: admitted, Suspended: suspended, Logger: p.log.Named("node"),
	})
	r.Meter = stager
	r.onNode = stager.WatchHealth
	r.health = controller.NewHealth(calls, r.fleet, suspended, p.log.Named("health"))
	r.Volumes = controller.New(calls, r.fleet, stager, p.log.Named("volumes"))
	r.Volumes.Fence = p.callbacks.Fence
	r.Volumes.Suspended = suspended
	r.Tasks = task.NewTasks(supervisor, m, layout, hello.Operations)
	r.Uses = task.Uses{State: state, Mounts: m, Running: r.fleet.Running}
	supervisor.Served = r.Uses.Of
	r.Snapshots = controller.NewSnapshots(r.Volumes, r.fleet)
	r.Literals = rpc.NewLiterals(layout.Secrets(), state, p.log.Named("secrets"))
	r.Endpoint = &endpoint.Endpoint{Calls: calls, Instances: r.fleet, Node: hello.Node, Since: time.Now(),
		Served: mount.Served}
	var nodeController node.Controller = r.Volumes
	if r.Cluster != nil {
		r.attacher = cluster.NewAttacher(r.Volumes, calls, r.Cluster)
		nodeController = r.attacher
	}
	r.Allocs = node.NewAllocs(calls, nodeController, stager, host, p.log.Named("allocs"))
	if r.Cluster != nil {
		r.Allocs.AwaitAdmitted = r.Cluster.AwaitAdmitted
		r.reaper = cluster.NewReaper(r.Cluster, r.Volumes, r.Allocs)
	}
	r.doctor = doctor.New(state, m, doctor.Options{
		Node: hello.Node, Layout: layout, Now: time.Now, Logger: p.log.Named("doctor"), Live: true, Locks: calls.Locks,
		Undo: r.Allocs.TakeDownUnclaimed, Lister: r.fleet, Suspended: suspended,
		Check: func() []string { return failedChecks(r.store) },
	})
	r.Doctor = r.doctor
	r.mounts = doctor.NewWatch(state, m, layout, time.Now, p.log.Named("mounts"))
	r.mounts.First = firstInspection
}

// serve returns the function that carries out calls of other nodes of the cluster. A method with a leading slash is a
// gRPC method of the host's API; the others are those of cluster.Attacher, which have no reply.
func (r *activeState) serve(s *rpc.Server) func(context.Context, string, []byte) ([]byte, error) {
	return func(ctx context.Context, method string, request []byte) ([]byte, error) {
		if strings.HasPrefix(method, "/") {
			return s.Serve(ctx, method, request)
		}
		err := r.attacher.Serve(ctx, method, request)
		if err != nil {
			err = wire.Status(err)
		}
		return nil, err
	}
}

// repeat repeats a call that this node began while it was the executor.
func (r *activeState) repeat(ctx context.Context, at registry.Instance, late registry.LateCall) error {
	if late.Snapshot != nil {
		return r.Snapshots.Repeat(ctx, at, late)
	}
	return r.Volumes.Repeat(ctx, at, late)
}

// taskFleet adapts a csi.Fleet to task.Fleet, because both have their own type for a connection.
type taskFleet struct{ *csi.Fleet }

func (f taskFleet) Connect(id registry.PluginID, t registry.TaskKey, at registry.Endpoint) (task.Plugin, error) {
	return f.Fleet.Connect(id, t, at)
}

// firstInspection is the time from the start to the first inspection of mounts, unless a plugin comes or goes before.
// The start, or the previous shim, has just compared the mounts with the records.
const firstInspection = 2 * time.Second

// begin starts the loops.
func (r *activeState) begin(p *Process) {
	r.startWorker(p, "allocs", r.Allocs.Run)
	r.startWorker(p, "volumes", r.ready(r.Volumes.Run))
	r.startWorker(p, "snapshots", r.ready(r.Snapshots.Run))
	if r.reaper != nil {
		r.startWorker(p, "lost nodes", r.ready(r.reaper.Run))
		r.startWorker(p, "former calls", r.ready(r.Cluster.Executors.HandOver))
	}
	r.startWorker(p, "health of volumes", r.health.Run)
	r.startWorker(p, "health on this node", r.onNode)
	// Literals.Run removes files that no record refers to, so it needs all records first
	r.startWatcher(p, "literal secrets", r.ready(r.Literals.Run))
	r.startWatcher(p, "tasks", r.Tasks.Run)
	r.startWatcher(p, "mounts", r.mounts.Run)
	if r.Cluster != nil {
		r.startWatcher(p, "cluster", r.Cluster.Run)
	}
}

// ready returns a function that calls run once this node has read all that its earlier shims wrote to etcd, because run
// continues their controller calls. Without a cluster, ready returns run.
func (r *activeState) ready(run func(context.Context) error) func(context.Context) error {
	if r.Cluster == nil {
		return run
	}
	return func(ctx context.Context) error {
		if err := r.Cluster.Ready(ctx); err != nil {
			return err
		}
		return run(ctx)
	}
}

// compare compares the records with the mount table and the directories of this node, and removes unused socket
// directories.
func (r *activeState) compare(ctx context.Context, p *Process) error {
	if _, err := r.doctor.Start(ctx); err != nil {
		return fmt.Errorf("compare the records with this machine: %w", err)
	}
	if err := r.Tasks.Sweep(ctx); err != nil {
		p.log.Warn("cannot remove unused socket directories", "error", err)
	}
	return nil
}

// startWorker starts a loop that ends when the workers are cancelled: see workers.
func (r *activeState) startWorker(p *Process, name string, f func(context.Context) error) {
	r.workers.Go(func() { p.loop(r.Context, name, f) })
}

// startWatcher starts a loop that ends after the workers: see watchers.
func (r *activeState) startWatcher(p *Process, name string, f func(context.Context) error) {
	r.watchers.Go(func() { p.loop(r.watchCtx, name, f) })
}

// loop runs f until ctx ends. If f fails earlier, the process ends.
func (p *Process) loop(ctx context.Context, name string, f func(context.Context) error) {
	if err := f(ctx); err != nil && ctx.Err() == nil {
		p.fail(fmt.Errorf("%s: %w", name, err))
	}
}

// stopWorkers cancels the workers and the calls in flight, and waits for the workers. Both still record their outcomes.
func (r *activeState) stopWorkers(why error) {
	r.cancel(why)
	r.workers.Wait()
}

// close closes the parts that open has built: callers of plugins, then connections, then the store. open may have
// failed before it has built all of them.
func (r *activeState) close() error {
	rest, err := r.release()
	rest()
	return err
}

// release is close without the part that may run after the next shim has started. The caller must call rest for that
// part.
func (r *activeState) release() (rest func(), err error) {
	r.stopWorkers(errReleased)
	r.stopWatching(errReleased)
	closeIdle := func() {}
	if r.fleet != nil {
		closeIdle = r.fleet.End()
	}
	if r.stopStore != nil {
		r.stopStore(errReleased)
	}
	r.writer.Wait()
	if r.Cluster != nil {
		_ = r.Cluster.Close()
	}
	if r.store != nil {
		err = r.store.Close()
	}
	return func() { r.watchers.Wait(); closeIdle() }, err
}

// describe adds generation, schema, index and counts to st, unless the store is closed.
func (r *activeState) describe(st *rpc.Status) {
	counts, at, err := r.store.Count(registry.BucketIntents, registry.BucketNodeIntents, registry.BucketInstances,
		registry.BucketAllocs)
	if err != nil {
		return
	}
	st.Generation, st.Schema, st.Index = r.store.Generation(), store.Newest, at
	st.OpenIntents, st.Instances, st.Allocs = counts[0]+counts[1], counts[2], counts[3]
	if r.Cluster != nil {
		st.ClusterProblem = r.Cluster.State.Problem()
	}
}
