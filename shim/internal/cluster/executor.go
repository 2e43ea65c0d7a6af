package cluster

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
)

// Executors makes this node the executor of plugins whose controller it runs, one node at a time for each plugin. All
// controller calls of a plugin are sent by its executor, because CSI calls carry no token by which a plugin could
// refuse the call of an earlier one.
type Executors struct {
	state   *State
	session *session
	plugins Plugins
	now     func() time.Time // wall time, for people
	log     hclog.Logger

	mu      sync.Mutex // guards sending and changed
	sending map[registry.PluginID]int
	changed chan struct{} // of capacity 1
}

// Plugins is the table of plugin instances of this node.
type Plugins interface {
	Find(registry.Role, registry.PluginID) (registry.Instance, bool)
	All() registry.Snapshot
}

func newExecutors(s *session, plugins Plugins, now func() time.Time, log hclog.Logger) *Executors {
	return &Executors{
		state: s.state, session: s, plugins: plugins, now: now, log: log, sending: map[registry.PluginID]int{},
		changed: make(chan struct{}, 1),
	}
}

// Check returns the executor of the plugin if it is this node, for a decision that begins a controller call. Else it
// returns an ErrUnavailable that names the executor.
func (e *Executors) Check(v registry.View, plugin registry.PluginID) (registry.Executor, error) {
	executor, _ := v.Executor(plugin)
	lease, _ := v.NodeLease(e.state.node)
	if executor.Holder == e.state.node && executor.Lease == lease.Lease && lease.Lease != 0 {
		return executor, nil
	}
	return executor, registry.Errorf(registry.ErrUnavailable, "%s, not node %s", executor, e.state.node)
}

// Sending is called directly before a controller call is sent. It returns an ErrUnavailable if another node may have
// become the executor of the plugin since. done must be called after the call.
func (e *Executors) Sending(ctx context.Context, plugin registry.PluginID) (done func(), err error) {
	e.mu.Lock()
	e.sending[plugin]++
	e.mu.Unlock()
	done = sync.OnceFunc(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.sending[plugin]--; e.sending[plugin] == 0 {
			delete(e.sending, plugin)
			e.wake()
		}
	})
	e.session.awaitFirst(ctx) // the calls that a swap has interrupted are repeated before
	var executor registry.Executor
	err = e.state.View(ctx, func(v registry.View) (err error) {
		executor, err = e.Check(v, plugin)
		return err
	})
	if lease := e.session.Lease(); err == nil && lease != executor.Lease {
		err = registry.Errorf(registry.ErrUnavailable,
			"node %s lost its lease in etcd, so another node may be the executor of plugin %s", e.state.node, plugin)
	}
	if err != nil {
		done()
		return nil, err
	}
	return done, nil
}

// idle reports whether no controller call of the plugin is under way here.
func (e *Executors) idle(plugin registry.PluginID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sending[plugin] == 0
}

func (e *Executors) wake() {
	select {
	case e.changed <- struct{}{}:
	default:
	}
}

// Applied looks again after a change of instances, leases or executors.
func (e *Executors) Applied(a registry.Applied) {
	if a.Change.Touches(registry.BucketInstances, registry.BucketNodeLeases, registry.BucketExecutors) {
		e.wake()
	}
}

// Run takes and leaves the execution of plugins until ctx ends.
func (e *Executors) Run(ctx context.Context) error {
	for {
		err := e.review(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, registry.ErrFenced) {
			return err
		}
		var again <-chan time.Time
		if err != nil {
			e.log.Warn("cannot take or leave the execution of plugins", "error", err)
			again = time.After(time.Second)
		}
		select {
		case <-e.changed:
		case <-again:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// review takes the plugins that this node can execute and that have no executor, and leaves those that it can no
// longer execute, or that another node executes.
func (e *Executors) review(ctx context.Context) error {
	var known []registry.Executor
	err := e.state.View(ctx, func(v registry.View) error { known = v.Executors(); return nil })
	if err != nil {
		return err
	}
	var failed error
	for _, executor := range known {
		former := slices.Contains(executor.Former, e.state.node)
		holds := executor.Holder == e.state.node && !e.healthy(executor.Plugin)
		if (former || holds) && e.idle(executor.Plugin) {
			failed = errors.Join(failed, e.leave(ctx, executor.Plugin, holds))
		}
	}
	for _, instance := range e.plugins.All().Instances {
		if instance.Role == registry.RoleController && e.healthy(instance.Plugin) {
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

// take makes this node the executor of the plugin, unless another one holds it.
func (e *Executors) take(ctx context.Context, plugin registry.PluginID) error {
	lease := e.session.Lease()
	if lease == 0 {
		return nil
	}
	_, err := registry.Ensure(ctx, e.state, func(v registry.View) (registry.Change, error) {
		executor, _ := v.Executor(plugin)
		executor.Plugin = plugin
		own, alive := v.NodeLease(e.state.node)
		if v.Held(executor) || !alive || own.Lease != lease || e.state.behind(v) && mounted(v) {
			return registry.Change{}, nil
		}
		next := executor.Taken(e.state.node, lease, e.now())
		return registry.Change{Put: []registry.Record{next}, Events: []registry.Event{{
			Kind: registry.EventExecutor, Plugin: plugin, Detail: next.String(), At: e.now(),
		}}}, nil
	})
	return err
}

// leave records that this node sends no controller call of the plugin any more. holds: it is the executor.
func (e *Executors) leave(ctx context.Context, plugin registry.PluginID, holds bool) error {
	_, err := registry.Ensure(ctx, e.state, func(v registry.View) (registry.Change, error) {
		executor, _ := v.Executor(plugin)
		if (executor.Holder == e.state.node) != holds || !holds && !slices.Contains(executor.Former, e.state.node) {
			return registry.Change{}, nil
		}
		return registry.Change{Put: []registry.Record{executor.Left(e.state.node, e.now())}}, nil
	})
	return err
}
