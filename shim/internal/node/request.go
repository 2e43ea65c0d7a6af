package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// request mounts or releases one volume request of an alloc. step is the current step.
type request struct {
	*Allocs
	by    intent.Caller
	key   registry.ClaimKey // Volume is empty until the volume of the request is known
	name  registry.VolumeName
	parts []hooks.Part      // parts of the volume that tasks mount instead of the whole volume
	node  registry.NodeName // of the claim
	step  registry.Step
	// then adds to the commit that ends the last step; nil: nothing. See intent.Call.Then.
	then  func(registry.View, hooks.Published) (registry.Change, error)
	round time.Duration // limit for waits and retries in one try to release the volume
}

// lock locks the volume, and records a long wait for the lock. The next settle clears that record.
func (req *request) lock(ctx context.Context, what string) (unlock func(), err error) {
	req.step = registry.StepTurn
	if busy := req.Locks.Busy(req.key.Volume); busy != "" {
		defer req.recordLongWait(ctx, registry.Wait{For: busy})()
	}
	return req.Locks.Lock(ctx, req.key.Volume, what)
}

// awaitNode waits for a healthy node instance of the plugin, and records the wait.
func (req *request) awaitNode(ctx context.Context, plugin registry.PluginID) (registry.Instance, error) {
	what := fmt.Sprintf("plugin %s to be healthy on this node", plugin)
	if _, serves := req.Plugins.Find(registry.RoleNode, plugin); !serves {
		if _, other := req.Plugins.Find(registry.RoleController, plugin); other {
			what = fmt.Sprintf("plugin %s to serve %s on this node: it serves only %s here", plugin, registry.RoleNode,
				registry.RoleController)
		}
	}
	return req.awaitPlugin(ctx, registry.RoleNode, plugin, what)
}

// awaitPlugin waits for a healthy instance of a plugin. It records what it waits for.
func (req *request) awaitPlugin(
	ctx context.Context, role registry.Role, plugin registry.PluginID, what string,
) (registry.Instance, error) {
	if inst, found := req.Plugins.Find(role, plugin); found && inst.Health.State == registry.Healthy {
		return inst, nil
	}
	ctx, cancel := req.waitContext(ctx)
	defer cancel()
	req.recordPluginWait(ctx, role, what)
	inst, err := req.Plugins.Await(ctx, role, plugin)
	if err == nil {
		req.clearWait(ctx)
	}
	return inst, err
}

// recordPluginWait records a wait for a plugin in a role.
func (req *request) recordPluginWait(ctx context.Context, role registry.Role, what string) {
	req.step = registry.StepPlugin
	req.recordWait(ctx, registry.Wait{For: what, Role: role})
}

// recordControllerWait returns a function that records a wait for the controller of the plugin.
func (req *request) recordControllerWait(ctx context.Context) func(what string) {
	return func(what string) { req.recordPluginWait(ctx, registry.RoleController, what) }
}

// waitContext returns a context for a wait. It ends with the caller's deadline or at RetryUntil. If there is neither,
// it ends after pluginWait.
func (req *request) waitContext(ctx context.Context) (context.Context, context.CancelFunc) {
	waiting, cancel := req.by.WaitContext(ctx)
	if _, has := waiting.Deadline(); has {
		return waiting, cancel
	}
	cancel()
	return context.WithTimeout(ctx, pluginWait)
}

// openCall returns the open call of the volume. It needs a certain outcome before the next call, unless the next call
// repeats or undoes it.
func (req *request) openCall(ctx context.Context) (open registry.Intent, found bool, err error) {
	err = req.State.View(ctx, func(v registry.View) error {
		open, found = req.OpenCall(v, registry.Intent{Volume: req.key.Volume, RPC: registry.NodeStageRPC})
		return nil
	})
	return open, found, err
}

// settleForMount brings the volume's open call to a certain outcome. While the outcome is unknown, only the same call
// or its undo may be sent (TestHistories). An open publish of this request stays open, because Publish repeats it.
func (req *request) settleForMount(ctx context.Context) error {
	open, found, err := req.openCall(ctx)
	if err != nil {
		return err
	}
	if !found || open.RPC == registry.NodePublishRPC && req.madeOpenCall(open) {
		req.clearWait(ctx)
		return nil
	}
	return req.settle(ctx, open)
}

// settle brings an open call to a certain outcome, success or failure.
func (req *request) settle(ctx context.Context, open registry.Intent) (err error) {
	req.step = registry.StepTurn
	ended := req.recordLongWait(ctx, registry.Wait{For: intent.Describe(open)})
	switch open.RPC {
	case registry.ControllerPublishRPC, registry.ControllerUnpublishRPC, registry.ControllerExpandRPC,
		registry.ControllerModifyRPC:
		err = req.controller.Settle(ctx, req.by, open)
	case registry.NodeStageRPC, registry.NodeUnstageRPC, registry.NodePublishRPC, registry.NodeUnpublishRPC,
		registry.NodeExpandRPC:
		err = req.stager.Settle(ctx, req.by, open)
	default:
		err = registry.Errorf(registry.ErrConflict, "volume %s cannot be used now: %s", req.name, intent.Describe(open))
	}
	if ended(); err == nil {
		req.clearWait(ctx)
	}
	return err
}

// settleForRelease brings the volume's open call to a certain outcome before a release, with two exceptions. A call
// that the release undoes (undoes) may stay open. If it may still run (mayRun), it is repeated first, for at most
// roundLimit. An expansion or modification, which has no undo, is closed when the caller's retries end. The next mount
// or expansion sends it again.
func (req *request) settleForRelease(ctx context.Context, u use) error {
	open, found, err := req.openCall(ctx)
	if err != nil {
		return err
	}
	undone := found && !open.RPC.Alters() && req.undoes(open, u)
	switch {
	case !found, undone && !req.mayRun(open):
	case undone:
		limited, cancel := context.WithTimeoutCause(ctx, roundLimit, errRound)
		defer cancel()
		if err := req.settle(limited, open); ctx.Err() != nil {
			return err
		}
	default:
		err := req.settle(ctx, open)
		if err == nil || ctx.Err() != nil {
			return err
		}
		left, leaveErr := req.leaveAlteration(ctx)
		if leaveErr != nil || !left {
			return errors.Join(err, leaveErr)
		}
		req.logger.Warn("stopped waiting for an expansion or modification: its volume is being released",
			"volume", req.name.String(), "error", err)
	}
	req.clearWait(ctx)
	return nil
}

// errRound is the cause of a context that settleForRelease has ended after roundLimit.
var errRound = fmt.Errorf("it has had no certain outcome for %s", roundLimit)

// mayRun reports whether the open call may still run, so that its undo has to wait. A call does not run any more if its
// plugin was restarted after the call began.
func (req *request) mayRun(open registry.Intent) bool {
	if !intent.UndoOverlaps(open) {
		return false
	}
	members := req.Plugins.Members(intent.RoleOf(open.RPC), open.Volume.Plugin)
	earlier := func(inst registry.Instance) bool {
		return inst.CreateIndex < open.ModifyIndex && (open.At == registry.TaskKey{} || open.At == inst.TaskKey())
	}
	return len(members) == 0 || slices.ContainsFunc(members, earlier)
}

// leaveAlteration closes an open expansion or modification without waiting for its outcome.
func (req *request) leaveAlteration(ctx context.Context) (left bool, err error) {
	if left, err = req.stager.LeaveExpansion(ctx, req.key.Volume); left || err != nil {
		return left, err
	}
	return req.controller.LeaveAlteration(ctx, req.key.Volume)
}

// madeOpenCall reports whether the open call was made for this request.
func (req *request) madeOpenCall(open registry.Intent) bool {
	return open.Alloc == req.key.Alloc && open.Request == req.key.Request
}

// recordFailure records why the current step failed, and when it is tried again. If next is zero, the step is tried
// again at the next request of the host.
func (req *request) recordFailure(ctx context.Context, err error, next time.Time) {
	w := registry.Wait{Next: next, Detail: err.Error()}
	if call, ok := errors.AsType[*registry.CallError](err); ok {
		// a ControllerExpandVolume may block the current step, but is not a step of an alloc itself
		req.step = cmp.Or(call.RPC.Step(), req.step)
		w.For, w.RPC, w.Code, w.Detail = "plugin "+string(req.key.Volume.Plugin), call.RPC, call.Code, call.Detail
		w.Attempt, w.Advice = max(call.Attempt, 1), intent.PolicyOf(call.RPC).Row(call.Code).Advice
	}
	req.recordWait(ctx, w)
}

// recordWait records w as the wait of the current step.
func (req *request) recordWait(ctx context.Context, w registry.Wait) {
	req.storeWait(ctx, req.waitOfStep(w))
}

// waitOfStep returns w with the fields of the current step.
func (req *request) waitOfStep(w registry.Wait) registry.Wait {
	w.Alloc, w.Request, w.Volume, w.Step, w.Since = req.key.Alloc, req.key.Request, req.name, req.step, req.Now()
	return w
}

// storeWait stores w in place of the earlier wait of the request.
func (req *request) storeWait(ctx context.Context, w registry.Wait) {
	req.editWaits(ctx, func(waits []registry.Wait) []registry.Wait {
		i := slices.IndexFunc(waits, func(old registry.Wait) bool { return old.Request == w.Request })
		if i < 0 {
			return append(waits, w)
		}
		waits[i] = continueWait(waits[i], w)
		return waits
	})
}

// clearWait clears the request's recorded wait for a plugin, a lock or a creation, even if an earlier shim recorded it.
func (req *request) clearWait(ctx context.Context) {
	req.editWaits(ctx, func(waits []registry.Wait) []registry.Wait {
		return slices.DeleteFunc(waits, func(w registry.Wait) bool {
			return w.Request == req.key.Request &&
				(w.Step == registry.StepPlugin || w.Step == registry.StepTurn || w.Step == registry.StepCreate)
		})
	})
}

// longWait is the duration from which a wait is recorded. After a swap there are many shorter waits.
const longWait = 100 * time.Millisecond

// recordLongWait records w if the wait becomes long. The caller must call ended when the wait ends; after that nothing
// is recorded.
func (req *request) recordLongWait(ctx context.Context, w registry.Wait) (ended func()) {
	w = req.waitOfStep(w)
	recorded := make(chan struct{})
	timer := time.AfterFunc(longWait, func() {
		defer close(recorded)
		req.storeWait(ctx, w)
	})
	return func() {
		if !timer.Stop() {
			<-recorded
		}
	}
}

// editWaits changes the recorded waits of the alloc. edit may change its argument. Only people read the waits, so a
// failed commit is logged.
func (req *request) editWaits(ctx context.Context, edit func(waits []registry.Wait) []registry.Wait) {
	if intent.Released(ctx) {
		return // the next shim repeats the calls
	}
	ctx = context.WithoutCancel(ctx)
	_, err := registry.Ensure(ctx, req.State, func(v registry.View) (change registry.Change, err error) {
		al, known := v.Alloc(req.key.Alloc)
		if next := edit(slices.Clone(al.Waiting)); known && !slices.Equal(next, al.Waiting) {
			al.Waiting = next
			change.Put = []registry.Record{al}
		}
		return change, nil
	})
	if err != nil {
		req.logger.Warn("cannot record what an alloc waits for", "alloc", req.key.Alloc, "error", err)
	}
}

// continueWait returns w as the continuation of old, if both are about the same step. It adds the time and the attempts
// of old, and keeps the last response until there is a newer one.
func continueWait(old, w registry.Wait) registry.Wait {
	if old.Step != w.Step || old.RPC != w.RPC {
		return w
	}
	if old.Since.Before(w.Since) {
		w.Since = old.Since
	}
	if w.For == "" {
		w.For = old.For
	}
	if w.RPC == "" {
		return w
	}
	if intent.OutcomeOf(old.RPC, old.Code) == registry.OutcomeFailed {
		w.Attempt += old.Attempt
	}
	w.Attempt = max(w.Attempt, old.Attempt)
	if w.Code == "" && w.Detail == "" {
		w.Code, w.Detail, w.Advice = old.Code, old.Detail, old.Advice
	}
	return w
}
