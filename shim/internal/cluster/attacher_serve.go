package cluster

import (
	"context"
	"encoding/json"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Serve carries out a call of another node's Attacher. It returns an ErrConflict if the call's record is gone or has an
// answer by the time that Serve holds the volume's lock. It returns an ErrUnsupported if this release does not know the
// method. A call to provide a volume is different: ProvideIf takes the lock, and checks the call's record only before
// it records a new volume.
func (a *Attacher) Serve(ctx context.Context, method string, text []byte) error {
	var r request
	if err := json.Unmarshal(text, &r); err != nil {
		return registry.Invalid("request to %s: %w", method, err)
	}
	open := func(view registry.View) error {
		if c, found := view.RemoteCall(idOf(method, text)); !found || c.Done {
			return registry.Errorf(registry.ErrConflict, "the call was withdrawn")
		}
		return nil
	}
	if method == provideMethod {
		_, err := a.Controller.ProvideIf(ctx, r.Call, r.Spec, r.Origin, open)
		return err
	}
	unlock, err := a.calls.Locks.Lock(ctx, r.Volume, method+" for node "+string(r.To.Node))
	if err != nil {
		return err
	}
	defer unlock()
	if err := a.calls.State.View(ctx, open); err != nil {
		return err
	}
	if method == attachMethod || method == detachMethod {
		if err := a.settleOther(ctx, r); err != nil {
			return err
		}
	}
	switch method {
	case attachMethod:
		return a.serveAttach(ctx, r)
	case detachMethod:
		return a.Controller.Detach(ctx, intent.Caller{}, r.Volume, r.To.Node)
	case abandonMethod:
		at := registry.AttachmentKey{Volume: r.Volume, Node: r.To.Node}
		return a.Controller.DetachOrAbandon(ctx, intent.Caller{}, at, r.Forced)
	case settleMethod:
		return a.settle(ctx, r)
	case leaveMethod:
		_, err := a.Controller.LeaveAlteration(ctx, r.Volume)
		return err
	}
	return registry.Errorf(registry.ErrUnsupported, "the shim of node %s does not know the call %q; update it",
		a.remote.state.node, method)
}

// serveAttach attaches a volume for another node.
func (a *Attacher) serveAttach(ctx context.Context, r request) error {
	var v registry.Volume
	err := a.calls.State.View(ctx, func(view registry.View) error {
		var found bool
		if v, found = view.VolumeByKey(r.Volume); !found {
			return registry.Errorf(registry.ErrNotFound, "volume %s not found", r.Volume)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return a.Controller.Attach(ctx, intent.Caller{}, v, r.Usage, r.To)
}

// settleOther settles the open call of the volume if that call is for another node than the request.
func (a *Attacher) settleOther(ctx context.Context, r request) error {
	var open registry.Intent
	var other bool
	if err := a.calls.State.View(ctx, func(view registry.View) error {
		at, _ := view.Attachment(registry.AttachmentKey{Volume: r.Volume, Node: r.To.Node})
		open, _ = view.Intent(r.Volume)
		other = open.Node != "" && open.Node != r.To.ID && open.Node != at.NodeID
		return nil
	}); err != nil || !other {
		return err
	}
	return a.Controller.Settle(ctx, intent.Caller{}, open)
}

// settle settles the open call of a volume, unless the call was settled meanwhile.
func (a *Attacher) settle(ctx context.Context, r request) error {
	same, err := viewed(ctx, a.calls.State, func(view registry.View) bool {
		open, found := view.Intent(r.Volume)
		return found && open.RPC == r.Intent.RPC && open.Hash == r.Intent.Hash
	})
	if err != nil || !same {
		return err
	}
	return a.Controller.Settle(ctx, intent.Caller{}, r.Intent)
}
