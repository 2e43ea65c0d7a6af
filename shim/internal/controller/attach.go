package controller

import (
	"context"
	"fmt"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Attach has the plugin attach the volume to the node, where the plugin does that at all (PUBLISH_UNPUBLISH_VOLUME). What is
// attached already for the same usage stays as it is. The volume has a claim, whose usage u is.
//
// An attachment is shared by all users of the volume on the node, so it is read-only only where the access mode allows no write.
func (m *Controller) Attach(ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage, node registry.NodeID) error {
	p, wanted, err := m.placed(ctx, v)
	if err != nil || !wanted {
		return err
	}
	if p.Attach == registry.MarkDone && p.Attached.Staging() == u.Staging() && p.Node == node {
		return nil
	}
	inst, has, err := m.attacher(ctx, v, p)
	if err != nil {
		return fmt.Errorf("attach volume %s: %w", v.VolumeName(), err)
	}
	if p.Attach == registry.MarkNone && !(has && inst.Fingerprint.Has(registry.AttachDetach)) {
		return nil
	}
	if node == "" {
		return registry.Invalid("volume %s has to be attached, and its plugin %s did not say what this node is called",
			v.VolumeName(), v.Plugin)
	}
	if err := intent.Supports(inst, u); err != nil {
		return err
	}
	u = u.Staging()
	u.ReadOnly = u.Access.ReaderOnly() && inst.Fingerprint.Has(registry.AttachReadOnly)
	if p.Attach != registry.MarkNone && p.Attached.Staging() == u.Staging() {
		u = p.Attached // as it was sent
	}
	if err := m.attach(ctx, by, v, u, node); err != nil {
		return fmt.Errorf("attach volume %s to node %s: %w", v.VolumeName(), node, err)
	}
	return nil
}

// attacher is the plugin's controller; false: it has none that would have to be waited for.
func (m *Controller) attacher(ctx context.Context, v registry.Volume, p registry.Placement) (inst registry.Instance, has bool, err error) {
	if v.Unattached && !p.Attaches && !m.there(v.Plugin) {
		return inst, false, nil
	}
	return m.controller(ctx, v.Plugin, m.attaches(v, p))
}

// placed is the volume's placement, and whether it may be attached at all: what was staged or published without being attached
// was so by a plugin that did not attach, and stays so.
func (m *Controller) placed(ctx context.Context, v registry.Volume) (p registry.Placement, wanted bool, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		p, _ = view.Placement(v.VolumeKey())
		wanted = !v.Ephemeral && (p.Attach != registry.MarkNone || p.Stage == registry.MarkNone && len(view.Refs(v.VolumeKey())) == 0)
		return nil
	})
	return p, wanted, err
}

func (m *Controller) attach(ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage, node registry.NodeID) (err error) {
	request := csi.AttachRequest{VolumeID: v.External, Node: node, Usage: u, VolumeContext: v.Context}
	if request.Secrets, err = m.Resolve(ctx, v.VolumeSpec); err != nil {
		return err
	}
	open := base(registry.ControllerPublishRPC, by.Call, v, intent.Hash(registry.ControllerPublishRPC, request))
	var answer map[string]string
	return m.Send(ctx, intent.Call{
		Intent: open, RetryUntil: by.RetryUntil,
		Before: func(view registry.View) (registry.Change, error) { return attaching(view, v, u, node) },
		Renew:  func(ctx context.Context) { request.Secrets = m.Renew(ctx, v.VolumeSpec, request.Secrets) },
		Do: func(ctx context.Context) error {
			inst, err := m.Await(ctx, by, registry.RoleController, v.Plugin)
			if err != nil {
				return err
			}
			if answer, err = m.driver.Attach(ctx, inst.InstanceKey, request); err != nil {
				return err
			}
			if err := checkMap("publish context", answer); err != nil {
				return broken(open.RPC, inst.InstanceKey, registry.ErrInternal, "the plugin's answer cannot be used: %v", err)
			}
			return nil
		},
		Done: func(view registry.View) registry.Change {
			p, _ := view.Placement(v.VolumeKey())
			p.Attach, p.Publish = registry.MarkDone, answer
			attached := intent.Event(registry.EventAttached, open, m.Now())
			attached.Detail = fmt.Sprintf("to node %s", node)
			return registry.Change{Put: []registry.Record{p}, Events: []registry.Event{attached}}
		},
	})
}

// attaching marks the attachment as sent, unless it contradicts what is.
func attaching(view registry.View, v registry.Volume, u registry.Usage, node registry.NodeID) (registry.Change, error) {
	p, _ := view.Placement(v.VolumeKey())
	switch {
	case len(view.Claims(v.VolumeKey())) == 0:
		return registry.Change{}, registry.Errorf(registry.ErrConflict, "volume %s has no claim; it is attached for claims only",
			v.VolumeName())
	case p.Attach != registry.MarkNone && p.Node != node:
		return registry.Change{}, registry.Errorf(registry.ErrConflict, "volume %s is attached to node %s, which is now called %s; it has to be detached first",
			v.VolumeName(), p.Node, node)
	case p.Attach != registry.MarkNone && p.Attached != u:
		return registry.Change{}, registry.Errorf(registry.ErrConflict, "volume %s is attached to node %s for another usage: %s; it has to be detached first",
			v.VolumeName(), p.Node, p.Attached)
	}
	p.Volume, p.Name = v.VolumeKey(), v.VolumeName()
	p.Attach, p.Attaches, p.Attached, p.Node = registry.MarkSent, true, u, node
	return registry.Change{Put: []registry.Record{p}}, nil
}

// Detach has the plugin detach the volume from the node that it was attached to. Nothing happens if it is not attached, or while
// it is published: its last user detaches it. ErrConflict: it is still staged.
func (m *Controller) Detach(ctx context.Context, by intent.Caller, key registry.VolumeKey) error {
	var p registry.Placement
	var v registry.Volume
	var users int
	err := m.State.View(ctx, func(view registry.View) error {
		p, _ = view.Placement(key)
		v, _ = view.VolumeByKey(key)
		users = len(view.Refs(key))
		return nil
	})
	switch {
	case err != nil:
		return err
	case p.Attach == registry.MarkNone || users > 0:
		return nil
	case p.Node == "":
		return registry.Errorf(registry.ErrDamaged, "volume %s is attached to a node that was not recorded; without its id the call would detach all nodes",
			p.Name)
	}
	if err := m.detach(ctx, by, p, v); err != nil {
		return fmt.Errorf("detach volume %s from node %s: %w", p.Name, p.Node, err)
	}
	return nil
}

func (m *Controller) detach(ctx context.Context, by intent.Caller, p registry.Placement, v registry.Volume) error {
	secrets, err := m.Resolve(ctx, v.VolumeSpec)
	if err != nil {
		return err
	}
	request := csi.DetachRequest{
		VolumeID: p.Volume.External, Node: p.Node, Secrets: secrets,
		Private: csi.Private{MountFlags: p.Attached.MountFlags, Contexts: []map[string]string{v.Context, p.Publish}},
	}
	if _, err := m.Await(ctx, by, registry.RoleController, p.Volume.Plugin); err != nil {
		return err
	}
	open := registry.Intent{
		Volume: p.Volume, Name: p.Name, RPC: registry.ControllerUnpublishRPC, Operation: by.ID,
		Hash: intent.Hash(registry.ControllerUnpublishRPC, request),
	}
	return m.Send(ctx, intent.Call{
		Intent: open, RetryUntil: by.RetryUntil,
		Before: func(view registry.View) (registry.Change, error) { return detaching(view, p.Volume) },
		Renew:  func(ctx context.Context) { request.Secrets = m.Renew(ctx, v.VolumeSpec, request.Secrets) },
		Do: func(ctx context.Context) error {
			inst, err := m.Await(ctx, by, registry.RoleController, p.Volume.Plugin)
			if err != nil {
				return err
			}
			return m.driver.Detach(ctx, inst.InstanceKey, request)
		},
		Done: func(view registry.View) registry.Change {
			detached := intent.Event(registry.EventDetached, open, m.Now())
			detached.Detail = fmt.Sprintf("from node %s", p.Node)
			return registry.Change{Delete: []registry.Key{p.Key()}, Events: []registry.Event{detached}}
		},
	})
}

// detaching marks the attachment as uncertain, unless something of the node's part is still up.
func detaching(view registry.View, key registry.VolumeKey) (registry.Change, error) {
	p, _ := view.Placement(key)
	if p.Stage != registry.MarkNone || len(view.Refs(key)) > 0 {
		return registry.Change{}, registry.Errorf(registry.ErrConflict, "volume %s is still staged at %s; it has to be unstaged first",
			p.Name, p.StagedAt.Host)
	}
	p.Attach = registry.MarkSent
	return registry.Change{Put: []registry.Record{p}}, nil
}

// AwaitAttach returns once the plugin can be asked to attach the volume, or has not to be. It calls waits before it waits. Nobody needs to
// hold the volume's lane for it.
func (m *Controller) AwaitAttach(ctx context.Context, v registry.Volume, waits func(what string)) error {
	p, wanted, err := m.placed(ctx, v)
	if err != nil || !wanted || p.Attach == registry.MarkDone || m.there(v.Plugin) {
		return err
	}
	if v.Unattached && !p.Attaches {
		return nil
	}
	certain := m.attaches(v, p)
	if node, found := m.Plugins.Find(registry.RoleNode, v.Plugin); found && !certain && !node.Fingerprint.Has(registry.PluginController) {
		if certain, err = m.Expects(ctx, registry.RoleController, v.Plugin); err != nil || !certain {
			return err
		}
	}
	waits(fmt.Sprintf("the controller of plugin %s", v.Plugin))
	if _, _, err := m.controller(ctx, v.Plugin, certain); err != nil {
		return fmt.Errorf("attach volume %s: %w", v.VolumeName(), err)
	}
	return nil
}

// AwaitDetach returns once the plugin can be asked to detach the volume, or has not to be.
func (m *Controller) AwaitDetach(ctx context.Context, by intent.Caller, key registry.VolumeKey, waits func(what string)) error {
	var p registry.Placement
	if err := m.State.View(ctx, func(view registry.View) error { p, _ = view.Placement(key); return nil }); err != nil {
		return err
	}
	if p.Attach == registry.MarkNone || m.there(key.Plugin) {
		return nil
	}
	waits(fmt.Sprintf("the controller of plugin %s", key.Plugin))
	if _, err := m.Await(ctx, by, registry.RoleController, key.Plugin); err != nil {
		return fmt.Errorf("detach volume %s: %w", p.Name, err)
	}
	return nil
}

// there says whether a healthy controller can be asked now.
func (m *Controller) there(id registry.PluginID) bool {
	inst, found := m.Plugins.Find(registry.RoleController, id)
	return found && inst.Health.State == registry.Healthy
}

// attaches says whether the volume's plugin is known to have a controller that is to be waited for: one made the volume, unless that one said
// that it attaches nothing.
func (m *Controller) attaches(v registry.Volume, p registry.Placement) bool {
	return p.Attaches || v.Created && !v.Unattached
}

// Settle has an open ControllerPublishVolume, ControllerUnpublishVolume or ControllerExpandVolume come to a certain end, by the same call
// again. nil says that it has one, whichever. Whoever calls it holds the volume's lane.
func (m *Controller) Settle(ctx context.Context, by intent.Caller, open registry.Intent) error {
	var p registry.Placement
	var v registry.Volume
	err := m.State.View(ctx, func(view registry.View) error {
		p, _ = view.Placement(open.Volume)
		v, _ = view.VolumeByKey(open.Volume)
		return nil
	})
	if err != nil {
		return err
	}
	switch open.RPC {
	case registry.ControllerPublishRPC:
		err = m.attach(ctx, by, v, p.Attached, p.Node)
	case registry.ControllerUnpublishRPC:
		err = m.detach(ctx, by, p, v)
	case registry.ControllerExpandRPC:
		err = m.enlarge(ctx, by, v, v.Expansion.Asked, way{controller: true, online: true}, intent.PolicyOf(open.RPC))
	default:
		return registry.Errorf(registry.ErrInternal, "%s is no call of a controller for a volume in use", open.RPC)
	}
	return intent.Settled(err)
}
