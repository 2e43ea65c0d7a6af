package intent

import (
	"context"
	"fmt"

	"holdfast/registry"
)

// Plugins is the live table of plugin instances.
type Plugins interface {
	// Find returns the active instance of the plugin in the role.
	Find(registry.Role, registry.PluginID) (registry.Instance, bool)
	// Await waits for a healthy instance until ctx ends.
	Await(context.Context, registry.Role, registry.PluginID) (registry.Instance, error)
	// Members returns all instances of the plugin in the role, newest first.
	Members(registry.Role, registry.PluginID) []registry.Instance
}

// Secrets resolves references to secrets. The values are for one call.
type Secrets interface {
	Resolve(context.Context, map[string]registry.Secret) (map[string]registry.SecretValue, error)
}

// Calls holds what a package needs to make CSI calls for volumes.
type Calls struct {
	Sender
	Plugins Plugins
	Secrets Secrets
	Locks   *Locks
	// Expected reports whether the plugin has a task in the role, with or without an instance. If it is nil, no plugin
	// has one.
	Expected func(registry.View, registry.Role, registry.PluginID) bool
}

// AttachTo is the node to attach a volume to.
type AttachTo struct {
	Node registry.NodeName
	ID   registry.NodeID // the plugin's ID of the node
	Used bool            // the node has staged or published the volume
}

// Await waits for the plugin's healthy instance in the role until ctx ends or by.RetryUntil has passed.
func (c Calls) Await(
	ctx context.Context, by Caller, role registry.Role, id registry.PluginID,
) (registry.Instance, error) {
	ctx, cancel := by.WaitContext(ctx)
	defer cancel()
	inst, err := c.Plugins.Await(ctx, role, id)
	switch {
	case err == nil:
		return inst, nil
	case role == registry.RoleController:
		return inst, fmt.Errorf("controller of plugin %s: %w", id, err)
	}
	return inst, fmt.Errorf("node plugin %s: %w", id, err)
}

// AwaitFor returns the instance for a call for one volume. If the plugin has several instances, and a healthy one is
// bound to the volume, AwaitFor returns that one at once: an open call for the volume may still run there, it got a
// call for the volume from a client of the CSI endpoint, or it serves a mount of the volume. Otherwise AwaitFor waits
// as Await does.
func (c Calls) AwaitFor(
	ctx context.Context, by Caller, role registry.Role, key registry.VolumeKey,
) (registry.Instance, error) {
	if inst, found := c.boundInstance(ctx, role, key); found {
		return inst, nil
	}
	return c.Await(ctx, by, role, key.Plugin)
}

// boundInstance returns the healthy instance that is bound to the volume as described at AwaitFor, if there is one.
func (c Calls) boundInstance(
	ctx context.Context, role registry.Role, key registry.VolumeKey,
) (inst registry.Instance, found bool) {
	members := c.Plugins.Members(role, key.Plugin)
	if len(members) < 2 {
		return inst, false
	}
	var tasks []registry.TaskKey
	// If the state cannot be read, the active instance gets the call.
	_ = c.State.View(ctx, func(view registry.View) error {
		if open, is := registry.OpenIntent(view, key); is && RoleOf(open.RPC) == role && MayRun(open) {
			tasks = append(tasks, open.At)
		}
		for _, use := range view.EndpointUses(key) {
			if RoleOf(use.Call) == role {
				tasks = append(tasks, use.Server)
			}
		}
		if role != registry.RoleNode {
			return nil
		}
		if p, staged := view.Staging(key); staged {
			tasks = append(tasks, p.Server)
		}
		for _, r := range view.Refs(key) {
			tasks = append(tasks, r.Server)
		}
		return nil
	})
	for _, task := range tasks {
		for _, m := range members {
			if m.TaskKey() == task && m.Health.State == registry.Healthy {
				return m, true
			}
		}
	}
	return inst, false
}

// FindFor returns the instance that gets a call for the volume now. It may be unhealthy.
func (c Calls) FindFor(
	ctx context.Context, role registry.Role, key registry.VolumeKey,
) (inst registry.Instance, found bool) {
	if inst, found = c.boundInstance(ctx, role, key); found {
		return inst, true
	}
	return c.Plugins.Find(role, key.Plugin)
}

// Send sends a call as Sender.Send does. To chooses the instance for each try.
func (c Calls) Send(
	ctx context.Context, by Caller, call Call, do func(context.Context, registry.Instance) error,
) error {
	return c.Sender.Send(ctx, c.To(ctx, by, call, do))
}

// To returns the call with Select and Do set. Before each try, Select waits for the instance as AwaitFor does, and do
// then sends the try to that instance.
func (c Calls) To(
	ctx context.Context, by Caller, call Call, do func(context.Context, registry.Instance) error,
) Call {
	role, key := RoleOf(call.Intent.RPC), call.Intent.Volume
	inst, _ := c.FindFor(ctx, role, key)
	call.Intent.At = inst.TaskKey()
	call.RetryUntil = by.RetryUntil
	call.Select = func(ctx context.Context) (at registry.TaskKey, err error) {
		inst, err = c.AwaitFor(ctx, by, role, key)
		return inst.TaskKey(), err
	}
	call.Do = func(ctx context.Context) error { return do(ctx, inst) }
	return call
}

// Expects reports whether a record says that the plugin has a task in the role.
func (c Calls) Expects(ctx context.Context, role registry.Role, id registry.PluginID) (expected bool, err error) {
	if c.Expected == nil {
		return false, nil
	}
	err = c.State.View(ctx, func(view registry.View) error {
		expected = c.Expected(view, role, id)
		return nil
	})
	return expected, err
}

// Resolve returns the volume's secrets for one call.
func (c Calls) Resolve(ctx context.Context, s registry.VolumeSpec) (map[string]registry.SecretValue, error) {
	if len(s.Secrets) == 0 {
		return nil, nil
	}
	values, err := c.Secrets.Resolve(ctx, s.Secrets)
	if err != nil {
		return nil, fmt.Errorf("secrets of volume %s: %w", s.VolumeName(), err)
	}
	return values, nil
}

// Renew returns the volume's secrets for a further try of a call, because they may have been replaced since. If they
// cannot be resolved now, it returns last.
func (c Calls) Renew(
	ctx context.Context, s registry.VolumeSpec, last map[string]registry.SecretValue,
) map[string]registry.SecretValue {
	values, err := c.Resolve(ctx, s)
	if err != nil {
		return last
	}
	return values
}

// Supports returns an ErrUnsupported if the instance lacks a capability that the usages need in its role.
func Supports(inst registry.Instance, usages ...registry.Usage) error {
	multi := registry.SingleNodeMulti
	if inst.Role == registry.RoleController {
		multi = registry.ControllerMulti
	}
	for _, u := range usages {
		needsMulti := u.Access == registry.SingleNodeSingleWriter || u.Access == registry.SingleNodeMultiWriter
		switch {
		case needsMulti && !inst.Fingerprint.Has(multi):
			return registry.Errorf(registry.ErrUnsupported,
				"plugin %s does not know the access mode %s (it lacks %s); use %s",
				inst.Plugin, u.Access, multi, registry.SingleNodeWriter)
		case u.MountGroup != "" && inst.Role == registry.RoleNode && !inst.Fingerprint.Has(registry.VolumeMountGroup):
			return registry.Errorf(registry.ErrUnsupported,
				"plugin %s cannot give a volume to a group (it lacks %s); remove mount_group",
				inst.Plugin, registry.VolumeMountGroup)
		}
	}
	return nil
}

// FeasibleAt returns the reasons why the plugin cannot serve the usage in the role on this node now.
func FeasibleAt(
	plugins Plugins, role registry.Role, id registry.PluginID, u registry.Usage,
) []registry.Infeasible {
	inst, found := plugins.Find(role, id)
	return infeasibleReasons(inst, found, "this node", role, id, u)
}

// FeasibleOn returns the reasons of FeasibleAt for another node.
func FeasibleOn(
	node registry.Node, role registry.Role, id registry.PluginID, u registry.Usage,
) []registry.Infeasible {
	inst, found := node.Find(role, id)
	return infeasibleReasons(inst, found, "node "+string(node.Name), role, id, u)
}

// infeasibleReasons returns the reasons why the instance cannot serve the usage. If found is false, there is no
// instance. where names the node for people.
func infeasibleReasons(
	inst registry.Instance, found bool, where string, role registry.Role, id registry.PluginID, u registry.Usage,
) (reasons []registry.Infeasible) {
	add := func(kind registry.InfeasibleKind, format string, args ...any) {
		reasons = append(reasons, registry.Infeasible{Kind: kind, Plugin: id, Detail: fmt.Sprintf(format, args...)})
	}
	switch {
	case !found:
		add(registry.InfeasibleNoPlugin, "no task on %s serves plugin %s as %s", where, id, role)
		return reasons
	case inst.Health.State != registry.Healthy && inst.Health.Cause == "": // the record of another node has no cause
		add(registry.InfeasibleUnhealthy, "plugin %s is %s as %s on %s", id, inst.Health.State, role, where)
	case inst.Health.State != registry.Healthy:
		add(registry.InfeasibleUnhealthy, "plugin %s is %s as %s: %s", id, inst.Health.State, role, inst.Health.Cause)
	}
	if err := Supports(inst, u); err != nil {
		add(registry.InfeasibleUnsupported, "%v", err)
	}
	return reasons
}
