package node

import (
	"errors"
	"slices"
	"testing"

	"holdfast/registry"
)

// owns returns the wish for an alloc that requests an ownership of the files of v0.
func owns(options string) wish {
	return wish{volumes: []int{0}, options: "mount_options {\n" + options + "\n}"}
}

// wantOwned checks the ownerships that were set since the last check.
func (n *env) wantOwned(when string, want ...string) {
	n.t.Helper()
	n.machine.mu.Lock()
	defer n.machine.mu.Unlock()
	if !slices.Equal(n.machine.owned, want) {
		n.t.Errorf("%s: the node set %q, want %q", when, n.machine.owned, want)
	}
	n.machine.owned = nil
}

// The ownership is set once, before the first use: not again after a death, a reboot or for the next alloc.
// Recursively, it is set again whenever a request has another owner.
func TestOwnershipIsSetOnce(t *testing.T) {
	inEnv(t, stages, func(t *testing.T, n *env) {
		const first = "owner = 1000\n group = 1000\n mode = \"0770\""
		n.machine.partFault = func(string) (error, bool) { return errors.New("no answer in time"), false }
		if err := n.tryUp("a1", owns(first)); err == nil {
			t.Error("the alloc is up with the wrong owner")
		}
		if w := n.status("a1").Waiting; len(w) != 1 || w[0].Step != registry.StepOwn {
			t.Errorf("the alloc waits for %+v", w)
		}
		n.machine.partFault = nil
		n.up("a1", owns(first))
		n.wantOwned("first use", "owner 1000, group 1000, mode 0770")
		n.up("a1", owns(first))
		n.restart()
		n.up("a1", owns(first))
		n.reboot()
		n.up("a1", owns(first))
		n.down("a1")
		n.up("a2", owns("owner = 1"))
		n.down("a2")
		n.wantOwned("later uses")
		recursive := owns("owner = 2\n ownership = \"recursive\"")
		n.up("a3", recursive)
		n.up("a3", recursive)
		n.wantOwned("recursively", "owner 2, recursive")
		if len(n.events(registry.EventOwnership)) != 2 {
			t.Error("events do not say what was set")
		}
	})
}

// A volume with files keeps its ownership, even when it is empty later. A read-only use does not set the ownership.
func TestOwnershipOfFilesIsLeft(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		read := owns("owner = 1")
		read.options += "\nread_only = true"
		n.up("a1", read)
		n.down("a1")
		n.machine.full = true
		n.up("a2", owns("owner = 1"))
		n.down("a2")
		n.machine.full = false
		n.up("a3", owns("owner = 1"))
		n.wantOwned("all uses")
		n.wantEvent(registry.EventOwnership, "has files")
	})
}

// A plugin with VOLUME_MOUNT_GROUP sets a group by itself. If the plugin loses or gets this capability, a mounted
// volume stays as it is.
func TestGroupIsSetByAPluginThatCan(t *testing.T) {
	const groups = "VOLUME_MOUNT_GROUP "
	asked := func(n *env) string {
		var group string
		n.view(func(v registry.View) {
			for _, r := range v.Refs(v0) {
				group = r.Usage.MountGroup
			}
		})
		return group
	}
	inEnv(t, stages+groups, func(t *testing.T, n *env) {
		n.up("a1", owns("group = 7"))
		if group := asked(n); group != "7" {
			t.Errorf("the plugin was asked for group %q", group)
		}
		n.restartPlugin(stages + groups)
		n.up("a1", owns("group = 7"))
		n.down("a1")
		n.wantOwned("with the capability")
		n.restartPlugin(stages)
		n.up("a2", owns("group = 7"))
		n.wantOwned("without it", "group 7")
		n.restartPlugin(stages + groups)
		n.up("a2", owns("group = 7"))
		if group := asked(n); group != "" {
			t.Errorf("the plugin was asked for group %q", group)
		}
	})
}
