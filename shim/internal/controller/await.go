package controller

import (
	"context"
	"fmt"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// AwaitAttach returns once the plugin can be asked to attach the volume, or has not to be. It calls waits before it waits. Nobody needs to
// hold the volume's lane for it.
func (m *Mediator) AwaitAttach(ctx context.Context, v registry.Volume, waits func(what string)) error {
	p, wanted, err := m.placed(ctx, v)
	if err != nil || !wanted || p.Attach == registry.MarkDone || m.there(v.Plugin) {
		return err
	}
	if v.Unattached && !p.Attaches {
		return nil
	}
	certain := m.attaches(v, p)
	if node, found := m.plugins.Find(registry.RoleNode, v.Plugin); found && !certain && !node.Fingerprint.Has(registry.PluginController) {
		if certain, err = m.expected(ctx, registry.RoleController, v.Plugin); err != nil || !certain {
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
func (m *Mediator) AwaitDetach(ctx context.Context, by intent.Caller, key registry.VolumeKey, waits func(what string)) error {
	var p registry.Placement
	if err := m.log.View(ctx, func(view registry.View) error { p, _ = view.Placement(key); return nil }); err != nil {
		return err
	}
	if p.Attach == registry.MarkNone || m.there(key.Plugin) {
		return nil
	}
	waits(fmt.Sprintf("the controller of plugin %s", key.Plugin))
	if _, err := m.await(ctx, by, key.Plugin); err != nil {
		return fmt.Errorf("detach volume %s: %w", p.Name, err)
	}
	return nil
}

// await is the plugin's healthy controller.
func (m *Mediator) await(ctx context.Context, by intent.Caller, id registry.PluginID) (registry.Instance, error) {
	ctx, cancel := by.Waiting(ctx)
	defer cancel()
	inst, err := m.plugins.Await(ctx, registry.RoleController, id)
	if err != nil {
		return inst, fmt.Errorf("controller of plugin %s: %w", id, err)
	}
	return inst, nil
}

// there says whether a healthy controller can be asked now.
func (m *Mediator) there(id registry.PluginID) bool {
	inst, found := m.plugins.Find(registry.RoleController, id)
	return found && inst.Health.State == registry.Healthy
}

// attaches says whether the volume's plugin is known to have a controller that is to be waited for: one made the volume, unless that one said
// that it attaches nothing.
func (m *Mediator) attaches(v registry.Volume, p registry.Placement) bool {
	return p.Attaches || v.Created && !v.Unattached
}

// Settle has an open ControllerPublishVolume, ControllerUnpublishVolume or ControllerExpandVolume come to a certain end, by the same call
// again. nil says that it has one, whichever. Whoever calls it holds the volume's lane.
func (m *Mediator) Settle(ctx context.Context, by intent.Caller, open registry.Intent) error {
	var p registry.Placement
	var v registry.Volume
	err := m.log.View(ctx, func(view registry.View) error {
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
