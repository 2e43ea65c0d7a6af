package lifecycle

import (
	"slices"

	"holdfast/config"
	"holdfast/registry"
)

// expectsPlugin reports whether the plugin has an instance in the role, or a task that will register one. A task that
// is starting, restarting or unhealthy counts until the host removes it.
func expectsPlugin(v registry.View, role registry.Role, id registry.PluginID) bool {
	if len(v.Instances(role, id)) > 0 {
		return true
	}
	return slices.ContainsFunc(v.Tasks(), func(t registry.Task) bool {
		spec, err := config.OpenRunning(t.Sealed)
		return err == nil && spec.Plugin.ID == id && slices.Contains(spec.Plugin.Type.Roles(), role)
	})
}
