package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/controller"
)

// repeatLimit bounds one repetition of a call of a former executor. The call is repeated until the plugin has answered.
const repeatLimit = 10 * time.Second

// lateBatch is how many late calls one transaction deletes. They have no index entries, and etcd allows 128 operations.
const lateBatch = 100

// HandOver settles the calls that this node has begun while it was the executor, until ctx ends. A call may run on at its
// plugin after its shim was killed, or after its deadline: CSI has no way to cancel it. Another executor sends a different
// call for its volume only once there is evidence that it has ended here. Evidence is one of:
//
//   - an answer to the same call by each controller instance of the plugin on this node. A repeated call continues where
//     the first one was; so the next executor repeats it too, but its own plugin cannot know what runs here.
//   - no such instance runs: the host has reported that their tasks have exited.
//   - the node was fenced or declared out of service (Node.lost).
//
// A probe that is answered, a lease that has ended and a deadline that has passed are none.
func (e *Executors) HandOver(ctx context.Context) error {
	e.session.awaitFirst(ctx)
	return e.session.follow(ctx, &e.changed, e.log, "calls of this node as a former executor have not ended yet", e.settleAll)
}

// settleAll settles the calls for all plugins that this node has executed and does not execute now.
func (e *Executors) settleAll(ctx context.Context) error {
	var former []registry.PluginID
	err := e.state.View(ctx, func(v registry.View) error {
		for _, executor := range v.Executors() {
			if slices.Contains(executor.Former, e.state.node) && e.idle(executor.Plugin) {
				former = append(former, executor.Plugin)
			}
		}
		return nil
	})
	for _, plugin := range former {
		err = errors.Join(err, e.settle(ctx, plugin))
	}
	return err
}

// settle records which calls of this node as a former executor have ended at the plugin, once there is evidence of that.
func (e *Executors) settle(ctx context.Context, plugin registry.PluginID) error {
	var calls []registry.LateCall
	err := e.state.View(ctx, func(v registry.View) error {
		executor, _ := v.Executor(plugin)
		calls = e.begun(v, executor)
		return nil
	})
	if err != nil {
		return err
	}
	ended, err := e.repeatAll(ctx, plugin, calls)
	for more := true; more; {
		_, failed := registry.Ensure(ctx, e.state, func(v registry.View) (change registry.Change, err error) {
			change, more = e.settled(v, plugin, ended)
			return change, nil
		})
		if err = errors.Join(err, failed); failed != nil {
			break
		}
	}
	return err
}

// settled returns the change that deletes the late calls of this node that have ended, and takes the node out of the
// former executors if they are the last ones. more: they are too many for one commit.
func (e *Executors) settled(
	v registry.View, plugin registry.PluginID, ended map[registry.Key]bool,
) (change registry.Change, more bool) {
	executor, _ := v.Executor(plugin)
	if !slices.Contains(executor.Former, e.state.node) || !e.idle(plugin) {
		return change, false
	}
	all := true
	for _, call := range e.begun(v, executor) {
		switch key := call.Key(); {
		case !ended[key]:
			all = false
		case v.Get(key) != nil: // else the call is open
			change.Delete = append(change.Delete, key)
		}
	}
	switch {
	case len(change.Delete) > lateBatch:
		change.Delete, more = change.Delete[:lateBatch], true
	case all:
		change.Put = []registry.Record{executor.Settled(e.state.node)}
	}
	return change, more
}

// begun returns the calls of this node as a former executor that may still run at its plugin. Those that are open belong
// to it again if it is the executor. No other node changes which calls this one has begun.
func (e *Executors) begun(v registry.View, executor registry.Executor) (list []registry.LateCall) {
	list = v.LateCalls(executor.Plugin, e.state.node)
	if executor.Holder != e.state.node {
		list = append(list, controller.Begun(v.Aside(), executor.Plugin, e.state.node)...)
	}
	return list
}

// repeatAll repeats calls at each instance of the plugin's controller on this node, and returns those that all of them
// have answered: all calls if there is no instance.
func (e *Executors) repeatAll(
	ctx context.Context, plugin registry.PluginID, calls []registry.LateCall,
) (ended map[registry.Key]bool, err error) {
	var all sync.WaitGroup
	errs := make([]error, len(calls))
	for i, call := range calls {
		all.Go(func() {
			for _, instance := range e.instances(plugin) {
				errs[i] = errors.Join(errs[i], e.repeatOne(ctx, instance, call))
			}
		})
	}
	all.Wait()
	ended = map[registry.Key]bool{}
	for i, call := range calls {
		ended[call.Key()] = errs[i] == nil
	}
	return ended, errors.Join(errs...)
}

func (e *Executors) repeatOne(ctx context.Context, at registry.Instance, call registry.LateCall) error {
	ctx, cancel := context.WithTimeout(ctx, repeatLimit)
	defer cancel()
	if err := e.repeat(ctx, at, call); err != nil {
		return fmt.Errorf("%s of %s may still run at plugin %s: %w", call.RPC, call.For, at.Plugin, err)
	}
	return nil
}

// Repeating implements intent.Executors. Others may send another call if this node may have been declared lost, if the call
// is an open one and this node is the executor again, or if a deletion has been refused meanwhile.
func (e *Executors) Repeating(ctx context.Context, plugin registry.PluginID, call registry.LateCall) error {
	return e.state.View(ctx, func(v registry.View) error {
		executor, _ := v.Executor(plugin)
		own, _ := v.NodeLease(e.state.node)
		same := func(l registry.LateCall) bool { return l.Same(call) && l.Failed == call.Failed }
		switch {
		case own.Lease == 0 || own.Lease != e.session.Lease():
			return registry.Errorf(registry.ErrUnavailable, "node %s has no lease in etcd", e.state.node)
		case !slices.Contains(executor.Former, e.state.node) || !slices.ContainsFunc(e.begun(v, executor), same):
			return registry.Errorf(registry.ErrConflict, "%s of %s is not repeated: its records have changed", call.RPC, call.For)
		}
		return nil
	})
}

// instances returns the instances of the plugin's controller on this node.
func (e *Executors) instances(plugin registry.PluginID) []registry.Instance {
	return slices.DeleteFunc(slices.Clone(e.plugins.All().Instances), func(i registry.Instance) bool {
		return i.Role != registry.RoleController || i.Plugin != plugin
	})
}

// gone reports whether no controller of the plugin runs on this node.
func (e *Executors) gone(plugin registry.PluginID) bool { return len(e.instances(plugin)) == 0 }
