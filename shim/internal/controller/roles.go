package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
)

// roleWait bounds the wait for a role that no task of the plugin serves yet. Such a task may be about to start.
const roleWait = 5 * time.Second

// errNoRole ends a wait for a role that no known task will serve.
type errNoRole struct{ error }

// withRole runs f, which waits for the plugin's role. Every roleWait it checks whether the plugin is healthy in its
// other role and no known task serves this one. If so, it cancels f and returns an ErrUnavailable that names the role.
func (m *Controller) withRole(
	ctx context.Context, role registry.Role, id registry.PluginID, f func(context.Context) error,
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for m.pauses(ctx, roleWait) {
			if err := m.checkRole(ctx, role, id); err != nil {
				cancel(err)
			}
		}
	}()
	err := f(ctx)
	var lacking errNoRole
	missing := err != nil && errors.As(context.Cause(ctx), &lacking)
	cancel(nil)
	<-ended
	if missing {
		return lacking.error
	}
	return err
}

// pauses reports whether d passed before ctx ended.
func (m *Controller) pauses(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// checkRole returns an errNoRole if the plugin is healthy here in its other role and no known task serves this one.
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
	return errNoRole{registry.Errorf(registry.ErrUnavailable, "plugin %s serves only %s here, and %s is needed: "+
		"run a task of it with type = %q or %q in its csi_plugin block, and ask again", id, other, role, typeOf(role),
		"monolith")}
}

// typeOf returns the type that a csi_plugin block has for a task that serves the role alone.
func typeOf(role registry.Role) string {
	if role == registry.RoleController {
		return "controller"
	}
	return "node"
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
