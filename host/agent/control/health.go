package control

import (
	"fmt"

	"holdfast/internal/display"
	"holdfast/registry"
)

// unhealthy is what the volume's plugin says is wrong with it, one entry for each role in which it says so.
func unhealthy(name registry.VolumeName, plugin registry.PluginID, h registry.VolumeHealth) (list []Trouble) {
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		c := h.Of(role)
		if !c.Abnormal {
			continue
		}
		list = append(list, Trouble{Found: c.Message, Since: c.Since, Help: Help{
			What:  fmt.Sprintf("plugin %s (%s) says that volume %s is unhealthy", plugin, role, name),
			Means: "Who uses the volume may get errors, or may have lost data. Holdfast changes nothing because of it.",
			Then:  "It is told when the plugin says that the volume is healthy again.",
			Do: []Do{
				{"see how the plugin does", display.Command("holdfast plugin status", string(plugin))},
				{"see who uses the volume", volumeCommand("status", name)},
			},
		}})
	}
	return list
}
