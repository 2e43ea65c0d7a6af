package cluster

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Executors makes this node the executor of plugins whose controller runs here. A plugin has at most one executor at a
// time, which sends all its controller calls. CSI calls carry no token by which a plugin could refuse the calls of an
// earlier executor.
type Executors struct {
	state   *State
	session *session
	plugins Plugins
	now     func() time.Time // wall time, for people
	log     hclog.Logger
	repeat  func(context.Context, registry.Instance, registry.LateCall) error // see Options

	changed broadcast // fires after changes of instances, leases and executors, and after the last call of a plugin

	mu      sync.Mutex                            // guards the fields below
	sending map[registry.PluginID]map[uint64]bool // by the numbers of the calls under way
	last    uint64                                // the number of the last call
}

// Plugins is the table of plugin instances of this node.
type Plugins interface {
	Find(registry.Role, registry.PluginID) (registry.Instance, bool)
	All() registry.Snapshot
}

func newExecutors(s *session, plugins Plugins, now func() time.Time, log hclog.Logger) *Executors {
	return &Executors{
		state: s.state, session: s, plugins: plugins, now: now, log: log,
		sending: map[registry.PluginID]map[uint64]bool{},
	}
}

// Check implements intent.Executors.
func (e *Executors) Check(v registry.View, by registry.ExecutorKey) (registry.Executor, error) {
	if by.Node == "" && e.isLocal(by.Plugin) {
		by.Node = e.state.node // a new volume, which this node will have
	}
	if by.Node == e.state.node {
		return registry.Executor{}, nil
	}
	if by.Node != "" {
		return registry.Executor{}, registry.Errorf(registry.ErrUnavailable,
			"%s; this is node %s", describe(v, by), e.state.node)
	}
	executor, _ := v.Executor(by.Plugin)
	lease, _ := v.NodeLease(e.state.node)
	if executor.Holder == e.state.node && executor.Lease == lease.Lease && lease.Lease != 0 {
		return executor, nil
	}
	return executor, registry.Errorf(registry.ErrUnavailable, "%s; this is node %s", describe(v, by), e.state.node)
}

// describe says which node makes the controller calls, by.Node or else the plugin's executor, and whether it is
// suspect.
func describe(v registry.View, by registry.ExecutorKey) string {
	executor, _ := v.Executor(by.Plugin)
	executor.Plugin = by.Plugin // it is empty if the plugin has no executor
	node, text := executor.Holder, executor.String()
	if by.Node != "" {
		node = by.Node
		text = fmt.Sprintf("node %s has the volume, and makes its controller calls for plugin %s", node, by.Plugin)
	}
	if _, alive := v.NodeLease(node); node != "" && !alive {
		text += ", and is suspect: its shim has lost its lease in etcd"
	}
	return text
}

// isLocal reports whether each node makes the plugin's calls for its own volumes (controller_scope = "node").
func (e *Executors) isLocal(plugin registry.PluginID) bool {
	instance, found := e.plugins.Find(registry.RoleController, plugin)
	return found && instance.Local()
}

// Sending implements intent.Executors. If this node's lease was not renewed in time, Sending waits for the renewal.
func (e *Executors) Sending(ctx context.Context, by registry.ExecutorKey) (done func(), err error) {
	e.session.awaitFirst(ctx) // else the first calls after a swap would fail without a lease
	if by.Node == "" {
		if err := e.awaitCommits(ctx); err != nil {
			return nil, err
		}
	}
	for {
		changed, valid := e.state.copy.changed.next(), e.session.valid.next()
		done = e.begin(by.Plugin)
		var executor registry.Executor
		err = e.state.View(ctx, func(v registry.View) (err error) {
			executor, err = e.Check(v, by)
			return err
		})
		// Without a holder, this node makes the calls for its own volume, and needs no lease.
		if err == nil && (executor.Holder == "" || executor.Lease == e.session.Lease()) {
			return done, nil
		}
		done()
		if err != nil {
			return nil, err
		}
		select {
		case <-changed:
		case <-valid:
		case <-ctx.Done():
			return nil, registry.Errorf(registry.ErrUnavailable, "node %s lost its lease in etcd, "+
				"so another node may be the executor of plugin %s: %s: %w",
				e.state.node, by.Plugin, e.state.silence(), context.Cause(ctx))
		}
	}
}

// awaitCommits waits for commits of this node without a known outcome, as one may have taken this node out of the
// senders of a call.
func (e *Executors) awaitCommits(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, intent.Grace)
	defer cancel()
	err := e.state.Settle(ctx)
	if err == nil || errors.Is(err, registry.ErrFenced) {
		return err
	}
	return registry.Errorf(registry.ErrUnavailable, "the outcome of a change in etcd is not known yet: %v", err)
}

// begin counts a call to a plugin as under way until done is called.
func (e *Executors) begin(plugin registry.PluginID) (done func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last++
	number := e.last
	if e.sending[plugin] == nil {
		e.sending[plugin] = map[uint64]bool{}
	}
	e.sending[plugin][number] = true
	return sync.OnceFunc(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if delete(e.sending[plugin], number); len(e.sending[plugin]) == 0 {
			delete(e.sending, plugin)
			e.changed.fire()
		}
	})
}

// Term returns the term of the executor, and whether this node is the executor. If the state cannot be read, here is
// false.
func (e *Executors) Term(ctx context.Context, by registry.ExecutorKey) (term uint64, here bool) {
	failed := e.state.View(ctx, func(v registry.View) error {
		executor, err := e.Check(v, by)
		term = executor.Term
		return err
	})
	return term, failed == nil
}

// Moved reports whether this node is not the executor, or has lost the role and regained it since the term. If so, a
// call that failed here may succeed at the executor.
func (e *Executors) Moved(ctx context.Context, by registry.ExecutorKey, since uint64) bool {
	term, here := e.Term(ctx, by)
	return !here || term != since
}

// idleUpTo reports whether all controller calls of the plugin with numbers up to last have ended here.
func (e *Executors) idleUpTo(plugin registry.PluginID, last uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for number := range e.sending[plugin] {
		if number <= last {
			return false
		}
	}
	return true
}

// lastCall returns the number of the last call that was begun here.
func (e *Executors) lastCall() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last
}

// Applied wakes Run and HandOver after a change of instances, leases or executors, or of a late call of this node.
func (e *Executors) Applied(a registry.Applied) {
	late := func(r registry.Record) bool {
		call, is := r.(registry.LateCall)
		return is && call.Node == e.state.node
	}
	if a.Change.Touches(registry.BucketInstances, registry.BucketNodeLeases, registry.BucketExecutors) ||
		slices.ContainsFunc(a.Change.Put, late) {
		e.changed.fire()
	}
}

// Run makes this node the executor of plugins, and ends that role, until ctx ends.
func (e *Executors) Run(ctx context.Context) error {
	e.session.awaitFirst(ctx)
	return e.session.runSteps(ctx, &e.changed, e.log, "cannot take or leave the execution of plugins", e.review)
}

// review ends this node's role as the executor of plugins whose controller is not healthy here. It takes the role for
// plugins that have no executor and whose controller is healthy here.
func (e *Executors) review(ctx context.Context) error {
	known, err := viewed(ctx, e.state, registry.View.Executors)
	if err != nil {
		return err
	}
	var failed error
	for _, executor := range known {
		if executor.Holder == e.state.node && !e.healthy(executor.Plugin) {
			failed = errors.Join(failed, e.leave(ctx, executor.Plugin))
		}
	}
	for _, instance := range e.plugins.All().Instances {
		if instance.Role == registry.RoleController && e.healthy(instance.Plugin) && !instance.Local() {
			failed = errors.Join(failed, e.take(ctx, instance.Plugin))
		}
	}
	return failed
}

// healthy reports whether a healthy instance on this node serves the plugin's controller service.
func (e *Executors) healthy(plugin registry.PluginID) bool {
	instance, found := e.plugins.Find(registry.RoleController, plugin)
	return found && instance.Health.State == registry.Healthy
}

// take makes this node the executor of the plugin, unless another node is. Before its first call, a new executor
// deletes the late calls of nodes that are no longer former executors, because such a node may become a former executor
// again later. take does nothing without a valid lease. It does not take the role while this node has to take down
// mounts because it was declared lost.
func (e *Executors) take(ctx context.Context, plugin registry.PluginID) error {
	lease := e.session.Lease()
	if lease == 0 { // Run reviews again once the lease is valid
		return nil
	}
	return registry.EnsureAll(ctx, e.state, func(v registry.View) (c registry.Change, err error) {
		executor, _ := v.Executor(plugin)
		executor.Plugin = plugin
		own, _ := v.NodeLease(e.state.node)
		held := v.Held(executor)
		if held && executor.Holder != e.state.node || own.Lease != lease {
			return c, nil
		}
		if c.Delete = v.PastLateCalls(executor); len(c.Delete) > registry.Batch {
			c.Delete = c.Delete[:registry.Batch]
			return c, nil
		}
		if held || e.state.mustTakeDown(v) && mayHaveMounts(v) {
			return c, nil
		}
		next := executor.Taken(e.state.node, lease, e.now())
		c.Put = []registry.Record{next}
		c.Events = []registry.Event{{
			Kind: registry.EventExecutor, Plugin: plugin, Detail: next.String(), At: e.now(),
		}}
		return c, nil
	})
}

// leave records that this node is no longer the executor of the plugin. While the plugin runs here, the node becomes a
// former executor, because a call may begin just now. HandOver settles such calls.
func (e *Executors) leave(ctx context.Context, plugin registry.PluginID) error {
	_, err := registry.Ensure(ctx, e.state, func(v registry.View) (registry.Change, error) {
		executor, _ := v.Executor(plugin)
		if executor.Holder != e.state.node || e.healthy(plugin) {
			return registry.Change{}, nil
		}
		executor = executor.Dropped(e.now())
		if e.idleUpTo(plugin, math.MaxUint64) && e.gone(plugin) && len(v.LateCalls(plugin, e.state.node)) == 0 {
			executor = executor.Settled(e.state.node) // nothing runs here any more
		}
		return registry.Change{Put: []registry.Record{executor}, Events: []registry.Event{{
			Kind: registry.EventExecutor, Plugin: plugin, Detail: executor.String(), At: e.now(),
		}}}, nil
	})
	return err
}
