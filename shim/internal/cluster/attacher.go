package cluster

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/intent"
)

// Attacher attaches and detaches this node's volumes. It passes the controller calls to the executors of their plugins.
type Attacher struct {
	*controller.Controller
	calls  intent.Calls
	remote *Remote
}

// NewAttacher returns an Attacher. c makes the calls to plugins whose executor is this node.
func NewAttacher(c *controller.Controller, calls intent.Calls, n *Node) *Attacher {
	return &Attacher{c, calls, n.Remote}
}

// The methods of an Attacher's remote calls.
const (
	provideMethod = "create"
	attachMethod  = "attach"
	detachMethod  = "detach"
	abandonMethod = "detach by force"
	settleMethod  = "settle"
	leaveMethod   = "leave"
)

// request is the request of an Attacher's remote calls. Each method needs some of its fields.
type request struct {
	Volume registry.VolumeKey
	Usage  registry.Usage
	To     intent.AttachTo
	Forced registry.Forced
	Call   registry.Call
	Spec   registry.VolumeSpec
	Origin registry.Origin
	Intent registry.Intent
}

// SettleClaims waits as State.Settle does.
func (a *Attacher) SettleClaims(ctx context.Context) error { return a.remote.state.Settle(ctx) }

// FeasibleAttach returns why no node can attach the volume now; nil: one can, or the volume need not be attached.
func (a *Attacher) FeasibleAttach(
	view registry.View, v registry.Volume, u registry.Usage, to intent.AttachTo,
) []registry.Infeasible {
	at, _ := view.Attachment(registry.AttachmentKey{Volume: v.VolumeKey(), Node: to.Node})
	by := v.ExecutedBy()
	to.ID = at.NodeID // an attached node keeps its ID
	if needsNoAttach(view, v, u, to) || executorReady(view, by) {
		return nil
	}
	if by.Node == "" && !view.Executed(by.Plugin) && !controller.AwaitsAttacher(v, at) {
		node, _ := view.Node(to.Node)
		served, _ := node.Find(registry.RoleNode, by.Plugin)
		if !served.Fingerprint.Has(registry.PluginController) {
			return nil // the plugin has no controller, so its volumes need not be attached
		}
	}
	return []registry.Infeasible{{Kind: registry.InfeasibleUnhealthy,
		Detail: "no node can attach the volume now: " + describe(view, by)}}
}

// executorReady reports whether the executor's node can make controller calls now.
func executorReady(view registry.View, by registry.ExecutorKey) bool {
	if by.Node == "" {
		executor, _ := view.Executor(by.Plugin)
		return view.Held(executor)
	}
	node, _ := view.Node(by.Node)
	instance, _ := node.Find(registry.RoleController, by.Plugin)
	_, alive := view.NodeLease(by.Node)
	return alive && instance.Health.State == registry.Healthy
}

// needsNoAttach reports whether the volume is attached as asked for, or needs no attachment.
func needsNoAttach(view registry.View, v registry.Volume, u registry.Usage, to intent.AttachTo) bool {
	if v.Ephemeral {
		return true
	}
	at, found := view.Attachment(registry.AttachmentKey{Volume: v.VolumeKey(), Node: to.Node})
	if !found {
		return to.Used || v.Unattached
	}
	return at.State == registry.MarkDone && at.Usage.Staging() == u.Staging() && at.NodeID == to.ID
}

// FeasibleCreate is Controller.FeasibleCreate, with the executor in place of this node's controller.
func (a *Attacher) FeasibleCreate(view registry.View, s registry.VolumeSpec) (reasons []registry.Infeasible) {
	if !view.Executed(s.Plugin) {
		return a.Controller.FeasibleCreate(view, s)
	}
	if by := (registry.ExecutorKey{Plugin: s.Plugin}); !executorReady(view, by) {
		reasons = append(reasons, registry.Infeasible{Kind: registry.InfeasibleUnhealthy, Detail: describe(view, by)})
	}
	return append(reasons, controller.FeasibleSpec(view, s)...)
}

// AwaitAttach and AwaitDetach do not wait: Attach and Detach wait for the executor.
func (a *Attacher) AwaitAttach(context.Context, registry.Volume, intent.AttachTo, func(what string)) error {
	return nil
}

func (a *Attacher) AwaitDetach(
	context.Context, intent.Caller, registry.VolumeKey, registry.NodeName, func(what string),
) error {
	return nil
}

// Attach is Controller.Attach at the executor. Before the node uses the volume, Attach waits for the end of this node's
// earlier calls (awaitEarlier): an old detach must not take effect while the volume is in use.
func (a *Attacher) Attach(
	ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage, to intent.AttachTo,
) error {
	ctx, cancel := by.WaitContext(ctx)
	defer cancel()
	if !to.Used && !v.Ephemeral {
		if err := a.awaitEarlier(ctx, v.VolumeKey(), to.Node); err != nil {
			return err
		}
	}
	done, err := viewed(ctx, a.calls.State, func(view registry.View) bool { return needsNoAttach(view, v, u, to) })
	if err != nil || done {
		return err
	}
	return a.execute(ctx, attachMethod, v.ExecutedBy(), request{Volume: v.VolumeKey(), Usage: u, To: to}, func() error {
		return a.Controller.Attach(ctx, by, v, u, to)
	})
}

// Detach is Controller.Detach at the executor. The decisions in then are dropped if the executor is another node.
func (a *Attacher) Detach(
	ctx context.Context, by intent.Caller, key registry.VolumeKey, node registry.NodeName, then ...registry.Decision,
) error {
	ctx, cancel := by.WaitContext(ctx)
	defer cancel()
	if err := a.deleteUnbegun(ctx, key, node); err != nil {
		return err
	}
	if err := a.awaitEarlier(ctx, key, node); err != nil {
		return err
	}
	executor, attached, err := a.executor(ctx, key, node)
	if err != nil || !attached {
		return err
	}
	return a.execute(ctx, detachMethod, executor, request{Volume: key, To: intent.AttachTo{Node: node}}, func() error {
		return a.Controller.Detach(ctx, by, key, node, then...)
	})
}

// executor returns the executor of a volume's controller calls, and whether the volume is attached to the node.
func (a *Attacher) executor(
	ctx context.Context, key registry.VolumeKey, node registry.NodeName,
) (by registry.ExecutorKey, attached bool, err error) {
	err = a.calls.State.View(ctx, func(view registry.View) error {
		v, _ := view.VolumeByKey(key)
		by = registry.ExecutorKey{Plugin: key.Plugin, Node: v.Node}
		_, attached = view.Attachment(registry.AttachmentKey{Volume: key, Node: node})
		return nil
	})
	return by, attached, err
}

// Provide is Controller.Provide at the executor. A volume that is ready already needs no executor. If ctx ends first,
// Provide deletes the record of the call, as its caller needs no volume any more.
func (a *Attacher) Provide(
	ctx context.Context, call registry.Call, spec registry.VolumeSpec, from registry.Origin,
) (v registry.Volume, err error) {
	by := registry.ExecutorKey{Plugin: spec.Plugin, Node: spec.Node}
	found := false
	readVolume := func(view registry.View) error {
		if v, found = view.Volume(spec.VolumeName()); found {
			by = v.ExecutedBy()
		}
		return nil
	}
	if err := a.calls.State.View(ctx, readVolume); err != nil {
		return v, err
	}
	if found && v.State == registry.VolumeReady && !v.Unwanted() {
		return a.Controller.Provide(ctx, call, spec, from)
	}
	var doneHere bool // v is the result of this node's own call
	r := request{Call: call, Spec: spec, Origin: from}
	err = a.execute(ctx, provideMethod, by, r, func() (err error) {
		v, err = a.Controller.Provide(ctx, call, spec, from)
		doneHere = err == nil
		return err
	})
	if err != nil && ctx.Err() != nil {
		if c, failed := newCall(provideMethod, by, r); failed == nil {
			a.remote.deleteCall(ctx, c.ID)
		}
	}
	if err != nil || doneHere {
		return v, err
	}
	if err = a.calls.State.View(ctx, readVolume); err == nil && !found {
		err = registry.Errorf(registry.ErrConflict, "volume %s was deleted as soon as it was created",
			spec.VolumeName())
	}
	return v, err
}

// Settle is Controller.Settle at the executor.
func (a *Attacher) Settle(ctx context.Context, by intent.Caller, open registry.Intent) error {
	ctx, cancel := by.WaitContext(ctx)
	defer cancel()
	executor, _, err := a.executor(ctx, open.Volume, "")
	if err != nil {
		return err
	}
	req := request{Volume: open.Volume, Intent: open, To: a.thisNode()}
	return a.execute(ctx, settleMethod, executor, req, func() error {
		return a.Controller.Settle(ctx, by, open)
	})
}

// LeaveAlteration is Controller.LeaveAlteration at the executor. If another node is the executor, left is true whenever
// an alteration was open before the call.
func (a *Attacher) LeaveAlteration(ctx context.Context, key registry.VolumeKey) (left bool, err error) {
	open, err := viewed(ctx, a.calls.State, func(view registry.View) bool {
		open, _ := view.Intent(key)
		return open.RPC.Alters()
	})
	if err != nil || !open {
		return false, err
	}
	executor, _, err := a.executor(ctx, key, "")
	if err != nil {
		return false, err
	}
	left = true
	err = a.execute(ctx, leaveMethod, executor, request{Volume: key, To: a.thisNode()}, func() (err error) {
		left, err = a.Controller.LeaveAlteration(ctx, key)
		return err
	})
	return left && err == nil, err
}

// DetachOrAbandon is Controller.DetachOrAbandon at the executor. If the executor does not answer within abandonLimit,
// this node abandons the attachment. It then withdraws its calls for it, because the node may attach the volume again.
func (a *Attacher) DetachOrAbandon(
	ctx context.Context, by intent.Caller, k registry.AttachmentKey, f registry.Forced,
) error {
	executor, attached, err := a.executor(ctx, k.Volume, k.Node)
	if err != nil || !attached {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, abandonLimit)
	defer cancel()
	r := request{Volume: k.Volume, To: intent.AttachTo{Node: k.Node}, Forced: f}
	err = a.execute(limited, abandonMethod, executor, r, func() error {
		return a.Controller.DetachOrAbandon(ctx, by, k, f)
	})
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		if err = a.Controller.Abandon(ctx, k, f, err.Error()); err == nil {
			err = a.deleteUnbegun(ctx, k.Volume, k.Node)
		}
	}
	return err
}

// AbandonSteps is Controller.AbandonSteps, as the plugin's executor would take the steps.
func (a *Attacher) AbandonSteps(ctx context.Context, k registry.AttachmentKey) ([]registry.ReleaseStep, error) {
	steps, err := a.Controller.AbandonSteps(ctx, k)
	if err != nil || len(steps) == 0 {
		return steps, err
	}
	by, _, err := a.executor(ctx, k.Volume, k.Node)
	if err == nil {
		err = a.calls.State.View(ctx, func(view registry.View) error {
			steps[0] = atExecutor(view, by, steps[0])
			return nil
		})
	}
	return steps, err
}

// atExecutor returns the step as the plugin's executor would take it.
func atExecutor(view registry.View, by registry.ExecutorKey, step registry.ReleaseStep) registry.ReleaseStep {
	switch {
	case by.Node == "" && !view.Executed(by.Plugin): // this node would make the calls
	case executorReady(view, by):
		step.Action, step.Detail = registry.ReleaseSend, "skipped if it fails"
	default:
		step.Action, step.Detail = registry.ReleaseSkip, describe(view, by)
	}
	return step
}

// abandonLimit bounds a detach by force at the executor, with its retries there. Tests shorten it.
var abandonLimit = 30 * time.Second

// execute has the plugin's executor carry out a call. If this node is the executor, it calls the function here instead.
// If the function fails and this node has lost the role meanwhile, execute asks the executor again.
func (a *Attacher) execute(
	ctx context.Context, method string, by registry.ExecutorKey, r request, here func() error,
) error {
	for {
		err := a.call(ctx, method, by, r)
		if !errors.Is(err, ErrHere) {
			return err
		}
		term, _ := a.remote.executors.Term(ctx, by)
		if err = here(); err == nil || ctx.Err() != nil {
			return err
		}
		executed, unknown := a.hasExecutor(ctx, by)
		if unknown != nil || !executed || !a.remote.executors.Moved(ctx, by, term) {
			return err
		}
	}
}

// hasExecutor reports whether the plugin's controller calls have an executor, or wait for one.
func (a *Attacher) hasExecutor(ctx context.Context, by registry.ExecutorKey) (bool, error) {
	return viewed(ctx, a.calls.State, func(view registry.View) bool {
		return by.Node != "" || view.Executed(by.Plugin)
	})
}

// call has the plugin's executor carry out a call. ErrHere means that this node makes the plugin's calls.
func (a *Attacher) call(ctx context.Context, method string, by registry.ExecutorKey, r request) error {
	if executed, err := a.hasExecutor(ctx, by); err != nil || !executed {
		return cmp.Or(err, ErrHere)
	}
	call, err := newCall(method, by, r)
	if err == nil {
		_, err = a.remote.Call(ctx, call, Anew)
	}
	if err == nil || errors.Is(err, ErrHere) {
		return err
	}
	volume := r.Volume.String()
	if r.Volume.External == "" {
		volume = r.Spec.VolumeName().String()
	}
	return fmt.Errorf("%s volume %s: %w", method, volume, wire.Error(err))
}

// thisNode is part of each request. It makes the requests of two nodes differ, so that both get an answer.
func (a *Attacher) thisNode() intent.AttachTo { return intent.AttachTo{Node: a.remote.state.node} }

// newCall returns a call. Calls with the same method and request have the same ID.
func newCall(method string, by registry.ExecutorKey, r request) (registry.RemoteCall, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return registry.RemoteCall{}, registry.Errorf(registry.ErrInternal, "encode a call to %s: %w", method, err)
	}
	return registry.RemoteCall{
		ID: idOf(method, text), Plugin: by.Plugin, To: by.Node, Method: method, Request: text,
	}, nil
}

// idOf returns the ID of a call, which depends on its method and request only.
func idOf(method string, text []byte) registry.OperationID {
	sum := sha256.Sum256(append([]byte(method), text...))
	return registry.OperationID(hex.EncodeToString(sum[:]))
}

// awaitEarlier waits for the end of this node's earlier calls that attach the volume to the node or detach it. Their
// callers have given up. Without the wait, the executor might carry out an earlier call after the next one.
func (a *Attacher) awaitEarlier(ctx context.Context, key registry.VolumeKey, node registry.NodeName) error {
	if err := a.remote.state.awaitReady(ctx); err != nil {
		return err
	}
	earlier, err := viewed(ctx, a.calls.State, func(view registry.View) []registry.RemoteCall {
		return a.earlierCalls(view, key, node)
	})
	if err != nil {
		return err
	}
	for _, c := range earlier {
		_, err := a.remote.Call(ctx, c, Anew) // the outcome does not matter
		if ctx.Err() != nil {
			return err
		}
	}
	return nil
}

// earlierCalls returns this node's unfinished calls that attach the volume to the node or detach it.
func (a *Attacher) earlierCalls(
	view registry.View, key registry.VolumeKey, node registry.NodeName,
) (list []registry.RemoteCall) {
	methods := []string{attachMethod, detachMethod, abandonMethod}
	for _, c := range view.RemoteCalls() {
		var r request
		if c.From == a.remote.state.node && slices.Contains(methods, c.Method) && !c.Done &&
			json.Unmarshal(c.Request, &r) == nil && r.Volume == key && r.To.Node == node {
			list = append(list, c)
		}
	}
	return list
}

// deleteUnbegun deletes the records of earlier calls for a volume that has no attachment to the node: no executor has
// begun to attach it. An executor that begins just now records an attachment. While the attachment exists, no claim of
// the node is released.
func (a *Attacher) deleteUnbegun(ctx context.Context, key registry.VolumeKey, node registry.NodeName) error {
	if err := a.remote.state.awaitReady(ctx); err != nil {
		return err
	}
	_, err := registry.Ensure(ctx, a.calls.State, func(view registry.View) (change registry.Change, err error) {
		if _, begun := view.Attachment(registry.AttachmentKey{Volume: key, Node: node}); begun {
			return change, nil
		}
		for _, c := range a.earlierCalls(view.Aside(), key, node) {
			if now, found := view.RemoteCall(c.ID); found && !now.Done {
				change.Delete = append(change.Delete, c.Key())
			}
		}
		return change, nil
	})
	return err
}
