package lifecycle

import (
	"slices"

	"holdfast/config"
	"holdfast/registry"
)

// expected says whether the plugin has an instance in the role, or a task that is to have one: a task that is starting,
// restarting or sick is known as well, until the host says that it will not be started again.
func expected(v registry.View, role registry.Role, id registry.PluginID) bool {
	if len(v.Instances(role, id)) > 0 {
		return true
	}
	return slices.ContainsFunc(v.Tasks(), func(t registry.Task) bool {
		spec, err := config.OpenRunning(t.Sealed)
		return err == nil && spec.Plugin.ID == id && slices.Contains(spec.Plugin.Type.Roles(), role)
	})
}
