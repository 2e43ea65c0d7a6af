package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/intent"
)

// repeatLimit bounds one repetition of a call of a former executor. The call is repeated until the plugin has answered.
const repeatLimit = 10 * time.Second

// repeatsAtOnce is how many calls of one plugin are repeated at the same time.
const repeatsAtOnce = 32

// repeatBackoff is the wait between two repetitions of a call.
var repeatBackoff = intent.Backoff{First: 500 * time.Millisecond, Max: time.Minute}

// HandOver settles the calls that this node began while it was the executor, until ctx ends. A call may run on at its
// plugin after its shim was killed, or after its deadline: CSI has no way to cancel it. Another executor sends a
// different call for the same volume only once there is evidence that the earlier call has ended here. Evidence is one
// of:
//
//   - each controller instance of the plugin on this node has answered a repetition of the call. A repetition continues
//     the earlier call, so its answer ends both. The next executor also repeats the call, but its instance cannot know
//     what runs here.
//   - no such instance runs: the host has reported that their tasks have exited.
//   - the node was fenced or declared out of service (registry.Node.Lost).
//
// A probe that is answered, a lease that has ended and a deadline that has passed are no evidence.
func (e *Executors) HandOver(ctx context.Context) error {
	e.session.awaitFirst(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	begun := map[registry.PluginID]bool{}
	const failing = "calls of this node as a former executor have not ended yet"
	return e.session.runSteps(ctx, &e.changed, e.log, failing, func(ctx context.Context) error {
		return e.state.View(ctx, func(v registry.View) error {
			for _, executor := range v.Executors() {
				if !begun[executor.Plugin] && slices.Contains(executor.Former, e.state.node) {
					begun[executor.Plugin] = true
					h := &handOver{Executors: e, plugin: executor.Plugin}
					all.Go(func() { _ = e.session.runSteps(ctx, &e.changed, e.log, failing, h.settle) })
				}
			}
			return nil
		})
	})
}

// handOver is the hand-over of one plugin. A plugin that does not answer delays no other.
type handOver struct {
	*Executors
	plugin   registry.PluginID
	holder   registry.NodeName             // the executor when settle last ran
	term     uint64                        // the executor's term when settle last ran
	known    map[registry.Key]registry.Seq // the ModifyIndex of the calls when settle last ran
	earlier  uint64                        // calls of this shim up to this number may be among the known ones
	attempts map[attemptKey]attempt        // of calls that have not ended
}

// attemptKey names a call. If the Failed of a call changes, its attempts begin again.
type attemptKey struct {
	registry.Key
	failed bool
}

// attempt is the latest repetition of a call.
type attempt struct {
	tries uint64
	due   time.Time // when the next repetition is due
	err   error
}

// settle records which calls of this node as a former executor have ended at the plugin, once there is evidence. It
// waits for calls that this shim has under way when it learns of them, as they may reach the plugin after the
// repetitions. It does not wait for calls that this node begins later, as the executor again.
func (h *handOver) settle(ctx context.Context) error {
	var executor registry.Executor
	var calls []registry.LateCall
	err := h.state.View(ctx, func(v registry.View) error {
		if executor, _ = v.Executor(h.plugin); slices.Contains(executor.Former, h.state.node) {
			calls = h.begunCalls(v, executor)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if !slices.Contains(executor.Former, h.state.node) {
		h.known, h.attempts = nil, nil
		return nil
	}
	if h.known == nil || h.holder != executor.Holder || h.term != executor.Term ||
		slices.ContainsFunc(calls, h.unknown) {
		h.holder, h.term, h.earlier = executor.Holder, executor.Term, h.lastCall()
	}
	h.known = map[registry.Key]registry.Seq{}
	for _, c := range calls {
		h.known[c.Key()] = c.ModifyIndex
	}
	if !h.idleUpTo(h.plugin, h.earlier) {
		return fmt.Errorf("this shim has calls to plugin %s under way, which may be among them", h.plugin)
	}
	if h.session.Lease() == 0 && len(calls) > 0 && !h.gone(h.plugin) {
		return fmt.Errorf("calls to plugin %s are not repeated without a lease in etcd", h.plugin)
	}
	ended, notEnded := h.repeatAll(ctx, calls)
	return errors.Join(notEnded, registry.EnsureAll(ctx, h.state, func(v registry.View) (registry.Change, error) {
		return h.settleChange(v, ended), nil
	}))
}

// unknown reports whether settle has not seen the call yet, or the call has been given up again since.
func (h *handOver) unknown(c registry.LateCall) bool {
	at, known := h.known[c.Key()]
	return !known || at != c.ModifyIndex
}

// settleChange returns the change that deletes the late calls of this node that have ended. If no other calls are left,
// the change also takes the node out of the former executors. If the calls are too many for one commit, it deletes some
// of them. It is empty if the executor has changed since settle began.
func (h *handOver) settleChange(v registry.View, ended map[registry.Key]bool) (change registry.Change) {
	executor, _ := v.Executor(h.plugin)
	if !slices.Contains(executor.Former, h.state.node) || h.holder != executor.Holder || h.term != executor.Term {
		return change
	}
	allEnded := true
	for _, call := range h.begunCalls(v, executor) {
		switch key := call.Key(); {
		case !ended[key]:
			allEnded = false
		case v.Get(key) != nil: // else it is an open call, which has no record as a late call
			change.Delete = append(change.Delete, key)
		}
	}
	switch {
	case len(change.Delete) > registry.Batch:
		change.Delete = change.Delete[:registry.Batch]
	case allEnded:
		change.Put = []registry.Record{executor.Settled(h.state.node)}
	}
	return change
}

// repeatAll repeats the calls that are due at each instance of the plugin's controller on this node. It returns which
// calls all instances have answered, and why others may still run. If there is no instance, all calls have ended.
func (h *handOver) repeatAll(ctx context.Context, calls []registry.LateCall) (ended map[registry.Key]bool, why error) {
	instances := h.instances(h.plugin)
	last := h.attempts
	h.attempts, ended = map[attemptKey]attempt{}, map[registry.Key]bool{}
	tries := make([]attempt, len(calls))
	slots := make(chan struct{}, repeatsAtOnce)
	var all sync.WaitGroup
	for i, call := range calls {
		try := last[attemptKey{call.Key(), call.Failed}]
		tries[i] = try
		if len(instances) > 0 && time.Now().Before(try.due) {
			continue
		}
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			var err error
			for _, instance := range instances {
				err = errors.Join(err, h.repeatOne(ctx, instance, call))
			}
			wait := repeatBackoff.Delay(try.tries+1, rand.Float64())
			tries[i] = attempt{try.tries + 1, time.Now().Add(wait), err}
		})
	}
	all.Wait()
	var errs []error
	for i, call := range calls {
		ended[call.Key()] = tries[i].err == nil
		if tries[i].err != nil {
			h.attempts[attemptKey{call.Key(), call.Failed}] = tries[i]
			errs = append(errs, tries[i].err)
		}
	}
	if more := len(errs) - 1; more > 0 {
		errs = []error{errs[0], fmt.Errorf("%d other calls may still run too", more)}
	}
	return ended, errors.Join(errs...)
}

// begunCalls returns the calls that this node has sent as the executor of a plugin, and that may still run there. If
// this node is the executor again, calls that are still open are left out.
func (e *Executors) begunCalls(v registry.View, executor registry.Executor) (list []registry.LateCall) {
	list = v.LateCalls(executor.Plugin, e.state.node)
	if executor.Holder != e.state.node {
		list = append(list, controller.OpenCallsAt(v.Aside(), executor.Plugin, e.state.node)...)
	}
	return list
}

func (e *Executors) repeatOne(ctx context.Context, at registry.Instance, call registry.LateCall) error {
	ctx, cancel := context.WithTimeout(ctx, repeatLimit)
	defer cancel()
	if err := e.repeat(ctx, at, call); err != nil {
		return fmt.Errorf("%s of %s may still run at plugin %s: %w", call.RPC, call.For, at.Plugin, err)
	}
	return nil
}

// Repeating implements intent.Executors. It returns an error if another node may meanwhile send a different call. That
// is so if this node may have been declared lost, or if the records of the call have changed.
func (e *Executors) Repeating(ctx context.Context, plugin registry.PluginID, call registry.LateCall) error {
	return e.state.View(ctx, func(v registry.View) error {
		executor, _ := v.Executor(plugin)
		own, _ := v.NodeLease(e.state.node)
		late, found := v.Get(call.Key()).(registry.LateCall)
		switch {
		case own.Lease == 0 || own.Lease != e.session.Lease():
			return registry.Errorf(registry.ErrUnavailable, "node %s has no lease in etcd", e.state.node)
		case found && late.Failed == call.Failed && slices.Contains(executor.Former, e.state.node): // unchanged
		case found || !slices.Contains(executor.Former, e.state.node) ||
			!slices.ContainsFunc(e.begunCalls(v, executor), call.Same):
			return registry.Errorf(registry.ErrConflict, "%s of %s is not repeated: its records have changed",
				call.RPC, call.For)
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

// OneInstance implements intent.Executors.
func (e *Executors) OneInstance(plugin registry.PluginID) bool { return len(e.instances(plugin)) == 1 }

// gone reports whether no controller of the plugin runs on this node.
func (e *Executors) gone(plugin registry.PluginID) bool { return len(e.instances(plugin)) == 0 }
