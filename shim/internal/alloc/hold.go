package alloc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// hold is one request of an alloc for a volume, on its way up or down. step is what is being done for it now.
type hold struct {
	*Allocs
	call registry.Call
	key  registry.ClaimKey // its Volume is not known before the request's volume is
	name registry.VolumeName
	step registry.Step
}

// turn waits for the volume's lane, and says so if it has to. The lane has to be left.
func (h *hold) turn(ctx context.Context, what string) (leave func(), err error) {
	h.step = registry.StepTurn
	if busy := h.lanes.Busy(h.key.Volume); busy != "" {
		h.waits(ctx, registry.Wait{For: busy})
	}
	return h.lanes.Enter(ctx, h.key.Volume, what)
}

// awaitNode waits for a healthy node instance of the volume's plugin, and says so if it has to.
func (h *hold) awaitNode(ctx context.Context, plugin registry.PluginID) (registry.Instance, error) {
	if node, ok := h.plugins.Find(registry.RoleNode, plugin); ok && node.Health.State == registry.Healthy {
		return node, nil
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	h.awaits(ctx)(fmt.Sprintf("plugin %s to be healthy on this node", plugin))
	return h.plugins.Await(ctx, registry.RoleNode, plugin)
}

// awaits is what a use case calls that has to wait for a plugin.
func (h *hold) awaits(ctx context.Context) func(what string) {
	return func(what string) {
		h.step = registry.StepPlugin
		h.waits(ctx, registry.Wait{For: what})
	}
}

// bounded is ctx for a wait for a plugin: it ends with the round on the way down, and has a deadline where the caller has set none.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	waiting, cancel := intent.Waiting(ctx)
	if _, has := waiting.Deadline(); has {
		return waiting, cancel
	}
	cancel()
	return context.WithTimeout(ctx, pluginWait)
}

// settle has the call come to a certain end that is open for the volume, unless it is one that what comes now may follow: nothing but the same
// call or its undo may be sent before (A4. TestOpenCallIsSettledFirst).
func (h *hold) settle(ctx context.Context, follows func(registry.Intent) bool) error {
	open, found := registry.Intent{}, false
	err := h.log.View(ctx, func(v registry.View) error { open, found = v.Intent(h.key.Volume); return nil })
	if err != nil || !found || follows(open) {
		return err
	}
	h.step = registry.StepTurn
	h.waits(ctx, registry.Wait{For: intent.Describe(open)})
	switch open.RPC {
	case registry.ControllerPublishRPC, registry.ControllerUnpublishRPC:
		return h.controller.Settle(ctx, h.call, open)
	case registry.NodeStageRPC, registry.NodeUnstageRPC, registry.NodePublishRPC, registry.NodeUnpublishRPC:
		return h.node.Settle(ctx, h.call, open)
	}
	return registry.Errorf(registry.ErrConflict, "volume %s cannot be used now: %s", h.name, intent.Describe(open))
}

// own says whether the call was made for this request.
func (h *hold) own(open registry.Intent) bool {
	return open.Alloc == h.key.Alloc && open.Request == h.key.Request
}

// failed records why the step under way did not succeed, and when it is tried again; the zero time: when the host asks for it.
func (h *hold) failed(ctx context.Context, err error, next time.Time) {
	w := registry.Wait{Next: next, Detail: err.Error()}
	if call, ok := errors.AsType[*registry.CallError](err); ok {
		h.step = call.RPC.Step()
		w.For, w.RPC, w.Code, w.Detail = "plugin "+string(h.key.Volume.Plugin), call.RPC, call.Code, call.Detail
		w.Attempt, w.Advice = max(h.attempts(ctx), 1), intent.Advice(call.RPC, call.Code)
	}
	h.waits(ctx, w)
}

// attempts is how often the volume's open call was sent.
func (h *hold) attempts(ctx context.Context) (tries uint64) {
	_ = h.log.View(context.WithoutCancel(ctx), func(v registry.View) error {
		open, _ := v.Intent(h.key.Volume)
		tries = open.Attempt
		return nil
	})
	return tries
}

// waits records for whom or what the step under way waits. It is for people: a failure to write it is not one of the alloc.
func (h *hold) waits(ctx context.Context, w registry.Wait) {
	w.Alloc, w.Request, w.Volume, w.Step, w.Since = h.key.Alloc, h.key.Request, h.name, h.step, h.clock.Now()
	_, err := h.log.Commit(context.WithoutCancel(ctx), func(v registry.View) (registry.Change, error) {
		al, known := v.Alloc(h.key.Alloc)
		if !known {
			return registry.Change{}, nil
		}
		var change bool
		if al.Waiting, change = waitingFor(al.Waiting, w); !change {
			return registry.Change{}, nil
		}
		return registry.Change{Put: []registry.Record{al}}, nil
	})
	if err != nil {
		h.logger.Warn("cannot record what an alloc waits for", "alloc", h.key.Alloc, "error", err)
	}
}

// waitingFor is the list with w in place of what its request waited for before. Who waits in the same step goes on waiting since then.
func waitingFor(list []registry.Wait, w registry.Wait) (next []registry.Wait, change bool) {
	change = true
	for _, old := range list {
		if old.Request != w.Request {
			next = append(next, old)
			continue
		}
		if old.Step == w.Step && old.RPC == w.RPC {
			w.Since = old.Since
		}
		change = old != w
	}
	return append(next, w), change
}
