package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/intent"
)

// Attacher is the controller for this node's volumes: it has the executors of their plugins attach and detach them.
type Attacher struct {
	*controller.Controller
	calls  intent.Calls
	remote *Remote
}

// NewAttacher returns an Attacher. c carries out the calls for plugins that this node executes.
func NewAttacher(c *controller.Controller, calls intent.Calls, n *Node) *Attacher {
	return &Attacher{c, calls, n.Remote}
}

// The methods of an Attacher's remote calls.
const (
	attachMethod = "attach"
	detachMethod = "detach"
)

// attachment is the request of an Attacher's remote calls.
type attachment struct {
	Volume registry.VolumeKey
	Usage  registry.Usage
	To     intent.AttachTo
}

// SettleClaims is Settle of the State.
func (a *Attacher) SettleClaims(ctx context.Context) error { return a.remote.state.Settle(ctx) }

// FeasibleAttach returns nothing: another node may attach the volume.
func (a *Attacher) FeasibleAttach(
	registry.View, registry.Volume, registry.Usage, intent.AttachTo,
) []registry.Infeasible {
	return nil
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

// Attach is Attach of a Controller. A detach that an earlier shim of this node has asked for ends before.
func (a *Attacher) Attach(
	ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage, to intent.AttachTo,
) error {
	ctx, cancel := by.Waiting(ctx)
	defer cancel()
	if !to.Used && !v.Ephemeral {
		if err := a.endDetach(ctx, v.VolumeKey(), to.Node); err != nil {
			return err
		}
	}
	var settled bool
	if err := a.calls.State.View(ctx, func(view registry.View) error {
		at, found := view.Attachment(registry.AttachmentKey{Volume: v.VolumeKey(), Node: to.Node})
		settled = v.Ephemeral || !found && (to.Used || v.Unattached) ||
			at.State == registry.MarkDone && at.Usage.Staging() == u.Staging() && at.NodeID == to.ID
		return nil
	}); err != nil || settled {
		return err
	}
	err := a.call(ctx, attachMethod, attachment{v.VolumeKey(), u, to})
	if errors.Is(err, ErrHere) {
		err = a.Controller.Attach(ctx, by, v, u, to)
	}
	return err
}

// endDetach waits until no call to detach the volume is under way for this node.
func (a *Attacher) endDetach(ctx context.Context, key registry.VolumeKey, node registry.NodeName) error {
	if err := a.remote.state.awaitReady(ctx); err != nil {
		return err
	}
	if open, err := a.open(ctx, detachMethod, detachOf(key, node)); err != nil || !open {
		return err
	}
	if err := a.call(ctx, detachMethod, detachOf(key, node)); !errors.Is(err, ErrHere) {
		return err
	}
	return nil
}

func detachOf(key registry.VolumeKey, node registry.NodeName) attachment {
	return attachment{Volume: key, To: intent.AttachTo{Node: node}}
}

// Detach is Detach of a Controller. then is of no effect if another node detaches the volume.
func (a *Attacher) Detach(
	ctx context.Context, by intent.Caller, key registry.VolumeKey, node registry.NodeName, then ...registry.Decision,
) error {
	ctx, cancel := by.Waiting(ctx)
	defer cancel()
	if err := a.remote.state.awaitReady(ctx); err != nil {
		return err
	}
	var attached bool
	if err := a.calls.State.View(ctx, func(view registry.View) error {
		_, attached = view.Attachment(registry.AttachmentKey{Volume: key, Node: node})
		return nil
	}); err != nil || !attached {
		return err
	}
	err := a.call(ctx, detachMethod, detachOf(key, node))
	if errors.Is(err, ErrHere) {
		err = a.Controller.Detach(ctx, by, key, node, then...)
	}
	return err
}

func (a *Attacher) call(ctx context.Context, method string, request attachment) error {
	call, err := newCall(method, request)
	if err == nil {
		_, err = a.remote.Call(ctx, call, true)
	}
	if err == nil || errors.Is(err, ErrHere) {
		return err
	}
	return fmt.Errorf("%s volume %s: %w", method, request.Volume, wire.Error(err))
}

// open reports whether the call has a record without an answer.
func (a *Attacher) open(ctx context.Context, method string, request attachment) (open bool, err error) {
	call, err := newCall(method, request)
	if err != nil {
		return false, err
	}
	err = a.calls.State.View(ctx, func(view registry.View) error {
		earlier, found := view.RemoteCall(call.ID)
		open = found && !earlier.Done
		return nil
	})
	return open, err
}

// newCall returns a call whose ID is that of each call with the same request.
func newCall(method string, request attachment) (registry.RemoteCall, error) {
	text, err := json.Marshal(request)
	if err != nil {
		return registry.RemoteCall{}, registry.Errorf(registry.ErrInternal, "encode a call to %s: %w", method, err)
	}
	sum := sha256.Sum256(append([]byte(method), text...))
	return registry.RemoteCall{ID: registry.OperationID(hex.EncodeToString(sum[:])), Plugin: request.Volume.Plugin,
		Method: method, Request: text}, nil
}

// Serve carries out a call of another node's Attacher.
func (a *Attacher) Serve(ctx context.Context, method string, text []byte) error {
	var request attachment
	if err := json.Unmarshal(text, &request); err != nil {
		return registry.Invalid("request to %s: %w", method, err)
	}
	unlock, err := a.calls.Locks.Lock(ctx, request.Volume, method+" for node "+string(request.To.Node))
	if err != nil {
		return err
	}
	defer unlock()
	if open, err := a.open(ctx, method, request); err != nil || !open {
		return err
	}
	if method == detachMethod {
		return a.Controller.Detach(ctx, intent.Caller{}, request.Volume, request.To.Node)
	}
	var v registry.Volume
	err = a.calls.State.View(ctx, func(view registry.View) error {
		var found bool
		if v, found = view.VolumeByKey(request.Volume); !found {
			return registry.Errorf(registry.ErrNotFound, "volume %s not found", request.Volume)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return a.Controller.Attach(ctx, intent.Caller{}, v, request.Usage, request.To)
}
