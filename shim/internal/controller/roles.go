package controller

import (
	"context"
	"fmt"
	"sync"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
)

// roleWait bounds the wait for a role that no task of the plugin serves yet. Such a task may be about to start.
const roleWait = 5 * time.Second

// withRole runs f, which waits for the plugin's role. Every roleWait it checks whether the plugin is healthy in its
// other role and no known task serves this role. If so, it cancels f, and returns an ErrUnavailable that names the
// role.
func (m *Controller) withRole(
	ctx context.Context, role registry.Role, id registry.PluginID, f func(context.Context) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var missing error
	var checks sync.WaitGroup
	checks.Go(func() {
		for missing == nil {
			select {
			case <-time.After(roleWait):
				missing = m.checkRole(ctx, role, id)
			case <-ctx.Done():
				return
			}
		}
		cancel()
	})
	err := f(ctx)
	cancel()
	checks.Wait()
	if err != nil && missing != nil {
		return missing
	}
	return err
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

// awaitController is like controller, but fails after roleWait if no task will serve the controller role.
func (m *Controller) awaitController(
	ctx context.Context, id registry.PluginID, certain bool,
) (inst registry.Instance, has bool, err error) {
	err = m.withRole(ctx, registry.RoleController, id, func(ctx context.Context) (err error) {
		inst, has, err = m.controller(ctx, id, certain)
		return err
	})
	return inst, has, err
}

// awaitNode waits for a healthy node instance of the plugin. It fails after roleWait if no task will serve the role.
func (m *Controller) awaitNode(ctx context.Context, id registry.PluginID) (inst registry.Instance, err error) {
	err = m.withRole(ctx, registry.RoleNode, id, func(ctx context.Context) (err error) {
		if inst, err = m.Plugins.Await(ctx, registry.RoleNode, id); err != nil {
			err = fmt.Errorf("node plugin %s: %w", id, err)
		}
		return err
	})
	return inst, err
}
