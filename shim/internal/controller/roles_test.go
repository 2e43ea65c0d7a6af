package controller

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"holdfast/registry"
)

// If a healthy plugin lacks a role, the error of a call soon names it. If a task may still serve the role, the call
// waits.
func TestMissingRoleIsNamedSoon(t *testing.T) {
	instance := func(role registry.Role, state registry.HealthState, caps ...registry.Capability) registry.Instance {
		i := with(caps...)
		i.Role, i.Health.State = role, state
		return i
	}
	node := instance(registry.RoleNode, registry.Healthy, registry.PluginController)
	calls := map[string]func(*desk, context.Context, registry.VolumeSpec) error{
		"create": func(d *desk, ctx context.Context, s registry.VolumeSpec) error {
			_, err := d.Controller.Create(ctx, call, s)
			return err
		},
		"register": func(d *desk, ctx context.Context, s registry.VolumeSpec) error {
			_, err := d.Controller.Register(ctx, s)
			return err
		},
		"delete": func(d *desk, ctx context.Context, s registry.VolumeSpec) error {
			return d.Controller.Delete(ctx, call, s.VolumeName())
		},
		"expand": func(d *desk, ctx context.Context, s registry.VolumeSpec) error {
			_, err := d.Controller.Expand(ctx, call, s.VolumeName(), upTo(large, 0))
			return err
		},
	}
	for what, c := range map[string]struct {
		plugins table
		plugin  registry.PluginID
		of      []string
		says    string
	}{
		"only a node": {table{registry.RoleNode: node}, "ebs",
			[]string{"create", "register", "delete", "expand"}, `type = "controller"`},
		"only a controller": {table{registry.RoleController: instance(registry.RoleController,
			registry.Healthy, registry.NodeExpand)}, "ebs", []string{"expand"}, `type = "node"`},
		"nothing": {table{}, "ebs", []string{"create", "delete", "expand"}, ""},
		"a sick node": {table{registry.RoleNode: instance(registry.RoleNode, registry.Unhealthy)},
			"ebs", []string{"delete", "expand"}, ""},
		"a controller that is to come": {table{registry.RoleNode: node}, "split",
			[]string{"create", "register", "delete", "expand"}, ""},
	} {
		for _, name := range c.of {
			runInBubble(t, what+", "+name, func(t *testing.T) {
				s := ready().VolumeSpec
				s.Plugin = c.plugin
				v := registry.Volume{VolumeSpec: s, State: registry.VolumeReady, Created: true, Capacity: 1 << 20}
				d := open(t, c.plugins)
				switch name {
				case "create":
					s.External = ""
				case "delete", "expand":
					d.put(v)
				}
				const limit = 30 * time.Second
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				begin := time.Now()
				err := calls[name](d, ctx, s)
				took := time.Since(begin)
				if !errors.Is(err, registry.ErrUnavailable) || (took < limit) != (c.says != "") {
					t.Errorf("after %v: %v", took, err)
				}
				if c.says != "" && !strings.Contains(err.Error(), c.says) {
					t.Errorf("%v does not say %s", err, c.says)
				}
				d.expect()
			})
		}
	}
}
