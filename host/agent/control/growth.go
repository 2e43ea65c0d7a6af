package control

import (
	"fmt"

	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/registry"
)

// growth is what an expansion waits for; nil: there is none, or it has come to its end.
func growth(name registry.VolumeName, e registry.Expansion) *Trouble {
	if !e.Pending() && (!e.Open() || e.RPC == "") { // one that is under way is told as an open call
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

// vagueHelp is for an expansion of which a controller's plugin has not said what became of it.
func vagueHelp(name registry.VolumeName, e registry.Expansion) Help {
	return Help{
		What:  fmt.Sprintf("whether volume %s was expanded to %d bytes is not known", name, e.Asked.Required),
		Means: "The plugin failed, and did not say whether it had done it before that.",
		Then:  "Nothing. When somebody asks for an expansion, this one is asked for again first.",
		Do: []Do{
			{"ask for it again", expandCommand(name, e.Asked.Required)},
			{"see what it is now", volumeCommand("status", name)},
		},
	}
}

// pendingHelp is for an expansion that the node has still to see to.
func pendingHelp(name registry.VolumeName, e registry.Expansion) Help {
	h := Help{
		What: fmt.Sprintf("volume %s is expanded to %d bytes, and not on this node yet", name, e.Node.Required),
		Then: "It is done when the volume is mounted next, before its tasks start. What is mounted for reading only cannot grow, " +
			"and waits for somebody who writes.",
	}
	if e.Refused == "" {
		return h
	}
	h.Means = "The plugin cannot do it now. Who uses the volume goes on with the size that it has here."
	h.Then = "It is tried again when the volume is mounted anew, after all who use it have ended."
	if e.Refused != "FAILED_PRECONDITION" { // which may not be tried again before
		h.Do = append(h.Do, Do{"have it tried now", expandCommand(name, e.Node.Required)})
	}
	h.Do = append(h.Do, Do{"see who uses it", volumeCommand("status", name)})
	return h
}

// unusable returns why a creation gave no usable volume; nil: it did, or it is being retried.
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
		Means: "The plugin may have made the volume, but did not give an answer that can be used.",
		Then:  "Nothing. The creation is not tried again.",
		Do: []Do{
			{"have it deleted, if the plugin has made it", volumeCommand("delete", v.VolumeName())},
			{"forget it here; the plugin may have it, and keeps it", volumeCommand("deregister", v.VolumeName())},
			{"or have it created once more", "holdfast volume create FILE"},
			{"see how the plugin does", display.Command("holdfast plugin status", string(v.Plugin))},
		},
	}
	return t
}
