package control

import (
	"fmt"

	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/registry"
)

// growth explains a pending or uncertain expansion; nil if there is none.
func growth(name registry.VolumeName, e registry.Expansion) *Trouble {
	if !e.Pending() && (!e.Open() || e.RPC == "") { // a running expansion is shown as an open call
		return nil
	}
	t := &Trouble{Since: e.Since}
	switch {
	case e.RPC != "":
		t.Found = fmt.Sprintf("%s: %s: %s", e.RPC, e.Code, e.Detail)
	case e.Refused != "":
		t.Found = fmt.Sprintf("%s: %s", registry.NodeExpandRPC, e.Refused)
	}
	if e.Open() {
		t.Help = vagueHelp(name, e)
		return t
	}
	t.Help = pendingHelp(name, e)
	return t
}

// vagueHelp explains an expansion whose controller call has an unknown outcome.
func vagueHelp(name registry.VolumeName, e registry.Expansion) Help {
	return Help{
		What:  fmt.Sprintf("volume %s may or may not have been expanded to %d bytes", name, e.Asked.Required),
		Means: "The plugin failed without reporting whether the expansion was done.",
		Then:  "Holdfast repeats this call before the next expansion of the volume.",
		Do: []Do{
			{"repeat the expansion", expandCommand(name, e.Asked.Required)},
			{"see the current size", volumeCommand("status", name)},
		},
	}
}

// pendingHelp explains an expansion whose node call is pending.
func pendingHelp(name registry.VolumeName, e registry.Expansion) Help {
	h := Help{
		What: fmt.Sprintf("volume %s is expanded to %d bytes, but not on this node yet", name, e.Node.Required),
		Then: "It is expanded on this node at the next mount, before the tasks start. A read-only mount cannot grow, " +
			"so the expansion waits for a writer.",
	}
	if e.Refused == "" {
		return h
	}
	h.Means = "The plugin cannot expand it now. Users of the volume keep the present size."
	h.Then = "Holdfast retries at the next mount, after all users have ended."
	if e.Refused != "FAILED_PRECONDITION" { // which may not be tried again before
		h.Do = append(h.Do, Do{"retry now", expandCommand(name, e.Node.Required)})
	}
	h.Do = append(h.Do, Do{"list its users", volumeCommand("status", name)})
	return h
}

// unusable explains a creation without a usable volume; nil if it succeeded or is being retried.
func unusable(v host.VolumeStatus) *Trouble {
	f := v.Failure
	if v.State != registry.VolumeUncertain || v.Intent != nil {
		return nil
	}
	t := &Trouble{Found: fmt.Sprintf("%s: %s: %s", f.RPC, f.Code, f.Detail), Since: f.Since}
	if f.Code == "OK" {
		t.Found = fmt.Sprintf("%s: %s", f.RPC, f.Detail)
	}
	t.Help = Help{
		What:  fmt.Sprintf("volume %s may or may not have been created, and cannot be used", v.VolumeName()),
		Means: "The plugin may have created the volume, but its answer was unusable.",
		Then:  "Holdfast does not retry the creation.",
		Do: []Do{
			{"delete it, if the plugin created it", volumeCommand("delete", v.VolumeName())},
			{"remove the record only; the plugin may keep the volume", volumeCommand("deregister", v.VolumeName())},
			{"repeat the creation", "holdfast volume create FILE"},
			{"inspect the plugin", display.Command("holdfast plugin status", string(v.Plugin))},
		},
	}
	return t
}

// unhealthy explains the health reports of a volume's plugin, one per role.
func unhealthy(name registry.VolumeName, plugin registry.PluginID, h registry.VolumeHealth) (list []*Trouble) {
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		c := h.Of(role)
		if !c.Abnormal {
			continue
		}
		list = append(list, &Trouble{Found: c.Message, Since: c.Since, Help: Help{
			What:  fmt.Sprintf("plugin %s (%s) reports volume %s as unhealthy", plugin, role, name),
			Means: "Users of the volume may get errors or may have lost data. Holdfast changes nothing.",
			Then:  "An event reports when the volume is healthy again.",
			Do: []Do{
				{"inspect the plugin", display.Command("holdfast plugin status", string(plugin))},
				{"list its users", volumeCommand("status", name)},
			},
		}})
	}
	return list
}
