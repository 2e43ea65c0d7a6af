package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Attach attaches the volume to a node if its plugin attaches volumes (PUBLISH_UNPUBLISH_VOLUME). u is the usage of the
// volume's claim. An attachment for the same usage stays as it is. If the node already uses the volume without an
// attachment, Attach does nothing: the plugin did not attach when the volume was staged.
//
// All users of the volume on the node share one attachment. It is read-only only if the access mode allows no writes.
func (m *Controller) Attach(
	ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage, to intent.AttachTo,
) error {
	at, err := m.attachment(ctx, v.VolumeKey(), to.Node)
	if err != nil || !attachable(v, at, to.Used) {
		return err
	}
	if at.State == registry.MarkDone && at.Usage.Staging() == u.Staging() && at.NodeID == to.ID {
		return nil
	}
	if v.Unattached && at.State == registry.MarkNone && !m.controllerHealthy(v.Plugin) {
		return nil // do not wait for a controller that does not attach volumes
	}
	inst, err := m.controllerOf(ctx, v.Plugin, AwaitsAttacher(v, at))
	if err != nil {
		return fmt.Errorf("attach volume %s: %w", v.VolumeName(), err)
	}
	if at.State == registry.MarkNone && !inst.Fingerprint.Has(registry.AttachDetach) {
		return nil
	}
	if to.ID == "" {
		return registry.Invalid("volume %s must be attached, but plugin %s did not report a node id",
			v.VolumeName(), v.Plugin)
	}
	if err := intent.Supports(inst, u); err != nil {
		return err
	}
	u = u.Staging()
	u.ReadOnly = u.Access.ReaderOnly() && inst.Fingerprint.Has(registry.AttachReadOnly)
	if at.State != registry.MarkNone && at.Usage.Staging() == u.Staging() {
		u = at.Usage // a repeated call must be the same call
	}
	if err := m.attach(ctx, by, v, u, to); err != nil {
		return fmt.Errorf("attach volume %s to node %s: %w", v.VolumeName(), to.ID, err)
	}
	return nil
}

// attachable reports whether the volume may be attached. An inline volume never is. A volume that the node already uses
// without an attachment stays as it is.
func attachable(v registry.Volume, at registry.Attachment, used bool) bool {
	return !v.Ephemeral && (at.State != registry.MarkNone || !used)
}

// attachment returns the attachment of the volume to a node. It returns the zero value if there is none.
func (m *Controller) attachment(
	ctx context.Context, key registry.VolumeKey, node registry.NodeName,
) (at registry.Attachment, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		at, _ = view.Attachment(registry.AttachmentKey{Volume: key, Node: node})
		return nil
	})
	return at, err
}

// attach sends ControllerPublishVolume and stores the publish context.
func (m *Controller) attach(
	ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage, to intent.AttachTo,
) error {
	request := csi.AttachRequest{VolumeID: v.External, Node: to.ID, Usage: u, VolumeContext: v.Context}
	open := newIntent(registry.ControllerPublishRPC, by.Call, v, intent.Hash(registry.ControllerPublishRPC, request))
	open.Node = to.ID
	var answer map[string]string
	return m.sendTo(ctx, by, v.VolumeSpec, &request.Secrets, intent.Call{
		Intent: open,
		Before: func(view registry.View) (registry.Change, error) { return attachChange(view, v, u, to) },
		Done: func(view registry.View) registry.Change {
			at, _ := view.Attachment(registry.AttachmentKey{Volume: v.VolumeKey(), Node: to.Node})
			at.State, at.PublishContext = registry.MarkDone, answer
			attached := intent.Event(registry.EventAttached, open, m.Now())
			attached.Detail = fmt.Sprintf("to node %s", to.ID)
			return registry.Change{Put: []registry.Record{at}, Events: []registry.Event{attached}}
		},
	}, func(ctx context.Context, inst registry.InstanceKey) (err error) {
		if answer, err = m.driver.Attach(ctx, inst, request); err != nil {
			return err
		}
		if err := checkMap("publish context", answer); err != nil {
			return badResponse(open.RPC, inst, registry.ErrInternal, "the plugin's answer cannot be used: %v", err)
		}
		return nil
	})
}

// attachChange marks the attachment as sent, unless it contradicts what is recorded.
func attachChange(
	view registry.View, v registry.Volume, u registry.Usage, to intent.AttachTo,
) (registry.Change, error) {
	at, _ := view.Attachment(registry.AttachmentKey{Volume: v.VolumeKey(), Node: to.Node})
	node, _ := view.Node(to.Node)
	switch {
	case node.Lost():
		return registry.Change{}, registry.Errorf(registry.ErrUnavailable,
			"no volume is attached to a lost node: %s", node)
	case !slices.ContainsFunc(view.Claims(v.VolumeKey()), func(c registry.Claim) bool { return c.Node == to.Node }):
		return registry.Change{}, registry.Errorf(registry.ErrConflict,
			"volume %s has no claim of node %s; only claimed volumes are attached", v.VolumeName(), to.Node)
	case at.State != registry.MarkNone && at.NodeID != to.ID:
		return registry.Change{}, registry.Errorf(registry.ErrConflict,
			"volume %s is attached to node %s, whose id is now %s; detach the volume first",
			v.VolumeName(), at.NodeID, to.ID)
	case at.State != registry.MarkNone && at.Usage != u:
		return registry.Change{}, registry.Errorf(registry.ErrConflict,
			"volume %s is attached to node %s with another usage: %s; detach the volume first",
			v.VolumeName(), at.NodeID, at.Usage)
	}
	at.Volume, at.Name, at.Node, at.NodeID = v.VolumeKey(), v.VolumeName(), to.Node, to.ID
	at.State, at.Usage, at.Detaching = registry.MarkSent, u, registry.Detaching{}
	return registry.Change{Put: []registry.Record{at}}, nil
}

// Detach detaches the volume from a node. It does nothing if the volume is not attached, or if the node is this one and
// has the volume staged or published. then becomes intent.Call.Then.
func (m *Controller) Detach(
	ctx context.Context, by intent.Caller, key registry.VolumeKey, node registry.NodeName, then ...registry.Decision,
) error {
	at, err := m.attachment(ctx, key, node)
	switch {
	case err != nil || at.State == registry.MarkNone:
		return err
	case at.NodeID == "":
		return registry.Errorf(registry.ErrDamaged, "the record of the attachment of volume %s has no node id; "+
			"without it the call would detach all nodes", at.Name)
	}
	if !m.ofOtherNode(at) {
		if local, err := m.node.Uses(ctx, key); err != nil || len(local) > 0 {
			return err
		}
	}
	if err := m.detach(ctx, by, at, then...); err != nil {
		return fmt.Errorf("detach volume %s from node %s: %w", at.Name, at.NodeID, err)
	}
	return nil
}

// errDetached means that an earlier executor of the plugin has detached the volume meanwhile.
var errDetached = errors.New("the volume is detached already")

// detach sends ControllerUnpublishVolume and deletes the record of the attachment. It needs no record of the volume,
// which may be deregistered.
func (m *Controller) detach(
	ctx context.Context, by intent.Caller, at registry.Attachment, then ...registry.Decision,
) error {
	var v registry.Volume
	err := m.State.View(ctx, func(view registry.View) error { v, _ = view.VolumeByKey(at.Volume); return nil })
	if err != nil {
		return err
	}
	v.Plugin = at.Volume.Plugin // the volume may be deregistered
	request := csi.DetachRequest{
		VolumeID: at.Volume.External, Node: at.NodeID,
		Private: csi.Private{MountFlags: at.Usage.MountFlags,
			Contexts: []map[string]string{v.Context, at.PublishContext}},
	}
	if _, err := m.Await(ctx, by, registry.RoleController, at.Volume.Plugin); err != nil {
		return err
	}
	open := registry.Intent{
		Volume: at.Volume, Name: at.Name, RPC: registry.ControllerUnpublishRPC, Node: at.NodeID,
		Operation: by.ID, Hash: intent.Hash(registry.ControllerUnpublishRPC, request),
	}
	err = m.sendTo(ctx, by, v.VolumeSpec, &request.Secrets, intent.Call{
		Intent: open,
		Then:   then,
		Before: func(view registry.View) (registry.Change, error) {
			at, found := view.Attachment(at.AttachmentKey())
			if !found {
				return registry.Change{}, errDetached
			}
			at.State = registry.MarkSent
			return registry.Change{Put: []registry.Record{at}}, nil
		},
		Done: func(registry.View) registry.Change {
			detached := intent.Event(registry.EventDetached, open, m.Now())
			detached.Detail = fmt.Sprintf("from node %s", at.NodeID)
			return registry.Change{Delete: []registry.Key{at.Key()}, Events: []registry.Event{detached}}
		},
	}, func(ctx context.Context, at registry.InstanceKey) error { return m.driver.Detach(ctx, at, request) })
	if errors.Is(err, errDetached) {
		return nil
	}
	return err
}

// AwaitAttach waits until the plugin can attach the volume. If no controller has to attach it, AwaitAttach returns at
// once. Before it blocks, it calls onWait with what it waits for. It needs no lock.
func (m *Controller) AwaitAttach(
	ctx context.Context, v registry.Volume, to intent.AttachTo, onWait func(what string),
) error {
	var awaits, certain bool
	err := m.State.View(ctx, func(view registry.View) error {
		awaits, certain = m.awaitsController(view, v, to)
		return nil
	})
	if err != nil || !awaits {
		return err
	}
	onWait(fmt.Sprintf("the controller of plugin %s", v.Plugin))
	if _, err := m.controllerOf(ctx, v.Plugin, certain); err != nil {
		return fmt.Errorf("attach volume %s: %w", v.VolumeName(), err)
	}
	return nil
}

// awaitsController reports whether the volume cannot be attached before its plugin has a healthy controller. certain
// means that the plugin is known to have a controller.
func (m *Controller) awaitsController(
	view registry.View, v registry.Volume, to intent.AttachTo,
) (awaits, certain bool) {
	at, _ := view.Attachment(registry.AttachmentKey{Volume: v.VolumeKey(), Node: to.Node})
	if !attachable(v, at, to.Used) || at.State == registry.MarkDone || m.controllerHealthy(v.Plugin) ||
		v.Unattached && at.State == registry.MarkNone {
		return false, false
	}
	certain = AwaitsAttacher(v, at)
	node, found := m.Plugins.Find(registry.RoleNode, v.Plugin)
	if found && !certain && !node.Fingerprint.Has(registry.PluginController) {
		certain = m.Expected != nil && m.Expected(view, registry.RoleController, v.Plugin)
		return certain, certain
	}
	return true, certain
}

// FeasibleAttach returns the reasons why the volume cannot be attached to the node for the usage now.
func (m *Controller) FeasibleAttach(
	view registry.View, v registry.Volume, u registry.Usage, to intent.AttachTo,
) []registry.Infeasible {
	at, _ := view.Attachment(registry.AttachmentKey{Volume: v.VolumeKey(), Node: to.Node})
	inst, found := m.Plugins.Find(registry.RoleController, v.Plugin)
	attaches := found && inst.Fingerprint.Has(registry.AttachDetach) && attachable(v, at, to.Used) &&
		at.State != registry.MarkDone
	if awaits, _ := m.awaitsController(view, v, to); awaits || attaches {
		return intent.FeasibleAt(m.Plugins, registry.RoleController, v.Plugin, u)
	}
	return nil
}

// AwaitDetach waits until the plugin can detach the volume. If no controller has to detach it, AwaitDetach returns at
// once. Before it blocks, it calls onWait with what it waits for.
func (m *Controller) AwaitDetach(
	ctx context.Context, by intent.Caller, key registry.VolumeKey, node registry.NodeName, onWait func(what string),
) error {
	at, err := m.attachment(ctx, key, node)
	if err != nil || at.State == registry.MarkNone || m.controllerHealthy(key.Plugin) {
		return err
	}
	onWait(fmt.Sprintf("the controller of plugin %s", key.Plugin))
	if _, err := m.Await(ctx, by, registry.RoleController, key.Plugin); err != nil {
		return fmt.Errorf("detach volume %s: %w", at.Name, err)
	}
	return nil
}

// controllerHealthy reports whether the plugin has a healthy controller now.
func (m *Controller) controllerHealthy(id registry.PluginID) bool {
	inst, found := m.Plugins.Find(registry.RoleController, id)
	return found && inst.Health.State == registry.Healthy
}

// AwaitsAttacher reports whether Attach must wait for a controller of the plugin: the volume has an attachment, or was
// created by a controller that attaches volumes.
func AwaitsAttacher(v registry.Volume, at registry.Attachment) bool {
	return at.State != registry.MarkNone || v.Created && !v.Unattached
}

// Settle repeats an open attach, detach, expansion or modification until its outcome is certain. It returns nil if the
// call is done or has certainly failed. The caller holds the volume's lock.
func (m *Controller) Settle(ctx context.Context, by intent.Caller, open registry.Intent) error {
	var at registry.Attachment
	var v registry.Volume
	err := m.State.View(ctx, func(view registry.View) error {
		for _, a := range view.Attachments(open.Volume) {
			if a.State == registry.MarkSent && a.NodeID == open.Node {
				at = a
			}
		}
		v, _ = view.VolumeByKey(open.Volume)
		return nil
	})
	if err != nil {
		return err
	}
	switch open.RPC {
	case registry.ControllerPublishRPC:
		err = m.attach(ctx, by, v, at.Usage, intent.AttachTo{Node: at.Node, ID: at.NodeID})
	case registry.ControllerUnpublishRPC:
		err = m.detach(ctx, by, at)
	case registry.ControllerExpandRPC, registry.ControllerModifyRPC:
		err = m.repeatAlteration(ctx, by, v, intent.PolicyOf(open.RPC), open.RPC)
	default:
		return registry.Errorf(registry.ErrInternal, "%s is not a call that Settle repeats", open.RPC)
	}
	return intent.Unsettled(err)
}
