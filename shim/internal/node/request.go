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

// turn acquires the volume's lock, and records the wait for it if that is long. The caller must call leave. settle
// clears the recorded wait.
func (req *request) turn(ctx context.Context, what string) (leave func(), err error) {
	req.step = registry.StepTurn
	over := func() {}
	if busy := req.Locks.Busy(req.key.Volume); busy != "" {
		over = req.recordLongWait(ctx, registry.Wait{For: busy})
	}
	defer func() { over() }()
	return req.Locks.Lock(ctx, req.key.Volume, what)
}

// awaitNode waits for a healthy node instance of the volume's plugin, and records the wait.
func (req *request) awaitNode(ctx context.Context, plugin registry.PluginID) (registry.Instance, error) {
	if node, ok := req.Plugins.Find(registry.RoleNode, plugin); ok && node.Health.State == registry.Healthy {
		return node, nil
	}
	ctx, cancel := req.bounded(ctx)
	defer cancel()
	what := fmt.Sprintf("plugin %s to be healthy on this node", plugin)
	if _, serves := req.Plugins.Find(registry.RoleNode, plugin); !serves {
		if _, other := req.Plugins.Find(registry.RoleController, plugin); other {
			what = fmt.Sprintf("plugin %s to serve %s on this node: it serves only %s here", plugin, registry.RoleNode,
				registry.RoleController)
		}
	}
	req.awaits(ctx, registry.RoleNode)(what)
	node, err := req.Plugins.Await(ctx, registry.RoleNode, plugin)
	if err == nil {
		req.waited(ctx)
	}
	return node, err
}

// awaits returns a function that records a wait for a plugin in a role.
func (req *request) awaits(ctx context.Context, role registry.Role) func(what string) {
	return func(what string) {
		req.step = registry.StepPlugin
		req.waits(ctx, registry.Wait{For: what, Role: role})
	}
}

// bounded returns a context for a wait for a plugin. It ends at RetryUntil, and has a deadline even if the caller set
// none.
func (req *request) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	waiting, cancel := req.by.Waiting(ctx)
	if _, has := waiting.Deadline(); has {
		return waiting, cancel
	}
	cancel()
	return context.WithTimeout(ctx, pluginWait)
}

// settle brings the volume's open call to a certain outcome. It does nothing if follows reports that the next call may
// follow the open one. While the outcome is unknown, only the same call or its undo may be sent (TestHistories).
func (req *request) settle(ctx context.Context, follows func(registry.Intent) bool) error {
	open, found := registry.Intent{}, false
	err := req.State.View(ctx, func(v registry.View) error {
		open, found = req.OpenCall(v, registry.Intent{Volume: req.key.Volume, RPC: registry.NodeStageRPC})
		return nil
	})
	if err != nil {
		return err
	}
	if !found || !open.RPC.Alters() && follows(open) { // an expansion or modification has no undo
		req.waited(ctx)
		return nil
	}
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
		req.waited(ctx)
	}
	return err
}

// settleDown is settle for a release. If an earlier shim left the open call and it may still run, settleDown repeats it
// for one round before it is undone. It waits for an expansion for one round at most. Then the outcome counts as vague,
// and the next mount or expansion sends the call again.
func (req *request) settleDown(ctx context.Context, follows func(registry.Intent) bool) error {
	var round *time.Timer // nil: no call may still run
	limited, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	err := req.settle(limited, func(open registry.Intent) bool {
		undoes := follows(open)
		if undoes && req.mayRun(open) {
			round = time.AfterFunc(roundLimit, func() { cancel(errRound) })
		}
		return undoes && round == nil
	})
	if round != nil {
		round.Stop()
	}
	if err == nil || ctx.Err() != nil {
		return err
	}
	if round != nil {
		req.waited(ctx)
		return nil
	}
	left, store := req.leaveAlteration(ctx)
	if store != nil || !left {
		return errors.Join(err, store)
	}
	req.logger.Warn("stopped waiting for an expansion or modification: its volume is being released",
		"volume", req.name.String(), "error", err)
	req.waited(ctx)
	return nil
}

var errRound = fmt.Errorf("it has had no certain outcome for %s", roundLimit)

// mayRun reports whether the open call may still run, so that its undo has to wait. A call does not run any more if its
// plugin was restarted after it.
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

// own reports whether the call was made for this request.
func (req *request) own(open registry.Intent) bool {
	return open.Alloc == req.key.Alloc && open.Request == req.key.Request
}

// failed records why the current step failed, and when it is tried again. If next is zero, the step is tried again at
// the next request of the host.
func (req *request) failed(ctx context.Context, err error, next time.Time) {
	w := registry.Wait{Next: next, Detail: err.Error()}
	if call, ok := errors.AsType[*registry.CallError](err); ok {
		// a ControllerExpandVolume may block the current step, but is not a step of an alloc itself
		req.step = cmp.Or(call.RPC.Step(), req.step)
		w.For, w.RPC, w.Code, w.Detail = "plugin "+string(req.key.Volume.Plugin), call.RPC, call.Code, call.Detail
		w.Attempt, w.Advice = max(call.Attempt, 1), intent.PolicyOf(call.RPC).Row(call.Code).Advice
	}
	req.waits(ctx, w)
}

// waited clears the request's recorded wait for a plugin, a lock or a creation, even if an earlier shim recorded it.
func (req *request) waited(ctx context.Context) {
	over := func(w registry.Wait) bool {
		return w.Request == req.key.Request &&
			(w.Step == registry.StepPlugin || w.Step == registry.StepTurn || w.Step == registry.StepCreate)
	}
	req.rewait(ctx, func(list []registry.Wait) ([]registry.Wait, bool) {
		next := slices.DeleteFunc(slices.Clone(list), over)
		return next, len(next) < len(list)
	})
}

// waits records w as the wait of the current step.
func (req *request) waits(ctx context.Context, w registry.Wait) { req.record(ctx, req.waiting(w)) }

// waiting returns w with the fields of the current step.
func (req *request) waiting(w registry.Wait) registry.Wait {
	w.Alloc, w.Request, w.Volume, w.Step, w.Since = req.key.Alloc, req.key.Request, req.name, req.step, req.Now()
	return w
}

// record adds a wait to the alloc's record.
func (req *request) record(ctx context.Context, w registry.Wait) {
	req.rewait(ctx, func(list []registry.Wait) ([]registry.Wait, bool) { return waitingFor(list, w) })
}

// long is the duration from which a wait is recorded. After a swap there are many shorter waits.
const long = 100 * time.Millisecond

// recordLongWait records w if the wait becomes long. The caller must call ended when the wait ends; after that nothing
// is recorded.
func (req *request) recordLongWait(ctx context.Context, w registry.Wait) (ended func()) {
	w = req.waiting(w)
	recorded := make(chan struct{})
	timer := time.AfterFunc(long, func() {
		defer close(recorded)
		req.record(ctx, w)
	})
	return func() {
		if !timer.Stop() {
			<-recorded
		}
	}
}

// rewait changes the recorded waits of the alloc. Only people read them, so a failed commit is logged.
func (req *request) rewait(ctx context.Context, change func([]registry.Wait) (next []registry.Wait, changed bool)) {
	if intent.Released(ctx) {
		return
	}
	ctx = context.WithoutCancel(ctx)
	_, err := registry.Ensure(ctx, req.State, func(v registry.View) (out registry.Change, err error) {
		al, known := v.Alloc(req.key.Alloc)
		if next, changed := change(al.Waiting); known && changed {
			al.Waiting = next
			out.Put = []registry.Record{al}
		}
		return out, nil
	})
	if err != nil {
		req.logger.Warn("cannot record what an alloc waits for", "alloc", req.key.Alloc, "error", err)
	}
}

// waitingFor returns the list with w in place of the earlier wait of its request.
func waitingFor(list []registry.Wait, w registry.Wait) (next []registry.Wait, changed bool) {
	changed = true
	for _, old := range list {
		if old.Request != w.Request {
			next = append(next, old)
			continue
		}
		w = retrying(old, w)
		changed = old != w
	}
	return append(next, w), changed
}

// retrying returns w as the continuation of old, if both are about the same step. It adds the time and the attempts of
// old, and keeps the last response until there is a newer one.
func retrying(old, w registry.Wait) registry.Wait {
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
