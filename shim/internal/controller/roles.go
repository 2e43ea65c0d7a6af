package controller

import (
	"context"
	"fmt"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// roleWait bounds the wait for a role that no task of the plugin serves yet. Such a task may be about to start.
const roleWait = 5 * time.Second

// controllerOf waits for the active controller of the plugin until ctx ends. If the plugin has no controller, it
// returns a node instance. certain means that the plugin is known to have a controller, so a missing one is awaited.
func (m *Controller) controllerOf(
	ctx context.Context, id registry.PluginID, certain bool,
) (inst registry.Instance, err error) {
	if !certain {
		if certain, err = m.Expects(ctx, registry.RoleController, id); err != nil {
			return inst, err
		}
	}
	if !certain {
		if inst, err = m.anyInstance(ctx, id); err != nil {
			return inst, fmt.Errorf("plugin %s: %w", id, err)
		}
		if inst.Role == registry.RoleController || !inst.Fingerprint.Has(registry.PluginController) {
			return inst, nil
		}
	}
	return m.Await(ctx, intent.Caller{}, registry.RoleController, id)
}

// anyInstance waits for an instance that knows whether the plugin has a controller: the controller or a node plugin.
func (m *Controller) anyInstance(ctx context.Context, id registry.PluginID) (registry.Instance, error) {
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		if _, found := m.Plugins.Find(role, id); found {
			return m.Plugins.Await(ctx, role, id)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		registry.Instance
		error
	}
	answers := make(chan answer, 2)
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		go func() {
			inst, err := m.Plugins.Await(ctx, role, id)
			answers <- answer{inst, err}
		}()
	}
	first := <-answers
	cancel()
	second := <-answers
	if first.error != nil && second.error == nil {
		first = second
	}
	return first.Instance, first.error
}

// awaitController is like controllerOf, but fails after roleWait if no task will serve the controller role.
func (m *Controller) awaitController(
	ctx context.Context, id registry.PluginID, certain bool,
) (inst registry.Instance, err error) {
	err = m.withRole(ctx, registry.RoleController, id, func(ctx context.Context) (err error) {
		inst, err = m.controllerOf(ctx, id, certain)
		return err
	})
	return inst, err
}

// capableController is awaitController, but fails with ErrUnsupported if the plugin has no controller, or one without
// the capability. lacks is the format of that error. Its operands are the plugin and the capability.
func (m *Controller) capableController(
	ctx context.Context, id registry.PluginID, certain bool, c registry.Capability, lacks string,
) (registry.Instance, error) {
	inst, err := m.awaitController(ctx, id, certain)
	if err == nil && (inst.Role != registry.RoleController || !inst.Fingerprint.Has(c)) {
		err = registry.Errorf(registry.ErrUnsupported, lacks, id, c)
	}
	return inst, err
}

// awaitNode returns a healthy node instance of the plugin, of this node or else of any other. If there is none, it
// waits for one on this node, and fails after roleWait if no task will serve the role here.
func (m *Controller) awaitNode(ctx context.Context, id registry.PluginID) (inst registry.Instance, err error) {
	healthy := false
	err = m.State.View(ctx, func(view registry.View) error {
		for _, node := range append([]registry.Node{{Name: m.Node}}, view.Nodes()...) {
			if !healthy {
				inst, _ = m.nodeInstance(view, node.Name, id)
				healthy = inst.Health.State == registry.Healthy
			}
		}
		return nil
	})
	if err != nil || healthy {
		return inst, err
	}
	err = m.withRole(ctx, registry.RoleNode, id, func(ctx context.Context) (err error) {
		if inst, err = m.Plugins.Await(ctx, registry.RoleNode, id); err != nil {
			err = fmt.Errorf("node plugin %s: %w", id, err)
		}
		return err
	})
	return inst, err
}

// withRole runs f, which waits for the plugin's role. Every roleWait it interrupts f and checks whether the plugin is
// healthy in its other role and no known task serves this role. If so, it returns an ErrUnavailable that names the
// role.
func (m *Controller) withRole(
	ctx context.Context, role registry.Role, id registry.PluginID, f func(context.Context) error,
) error {
	for {
		limited, cancel := context.WithTimeout(ctx, roleWait)
		err := f(limited)
		interrupted := limited.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil || !interrupted {
			return err
		}
		if missing := m.checkRole(ctx, role, id); missing != nil {
			return missing
		}
	}
}

// checkRole returns an ErrUnavailable if the plugin is healthy here in its other role and no known task serves this
// one.
func (m *Controller) checkRole(ctx context.Context, role registry.Role, id registry.PluginID) error {
	other := registry.RoleNode
	if role == registry.RoleNode {
		other = registry.RoleController
	}
	inst, found := m.Plugins.Find(other, id)
	_, serves := m.Plugins.Find(role, id)
	if !found || serves || inst.Health.State != registry.Healthy {
		return nil
	}
	if expected, err := m.Expects(ctx, role, id); expected || err != nil {
		return nil
	}
	alone := hooks.TypeNode
	if role == registry.RoleController {
		alone = hooks.TypeController
	}
	return registry.Errorf(registry.ErrUnavailable, "plugin %s serves only %s here, and %s is needed: "+
		"run a task of it with type = %q or %q in its csi_plugin block, and run the command again",
		id, other, role, alone, hooks.TypeMonolith)
}
