package control

import (
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/registry"
)

// TestLostHolderIsDescribedAsItIs describes nodes that hold a volume and are lost, with the facts that are known about
// them.
func TestLostHolderIsDescribedAsItIs(t *testing.T) {
	v := host.VolumeStatus{Volume: registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "vol"}}}
	stored := v
	stored.Node = "a"
	for name, test := range map[string]struct {
		state  registry.NodeState
		alive  bool
		volume host.VolumeStatus
		wants  []string
		gone   bool // the description must not say that the volume may still be in use
	}{
		"suspect": {registry.NodeReady, false, v,
			[]string{"Tasks may still run there", "node out-of-service --confirm=a a"}, false},
		"out of service": {registry.NodeOutOfService, false, v,
			[]string{"as was declared", "then releases its claims"}, false},
		"fenced": {registry.NodeFenced, false, v, []string{"nothing there can write"}, true},
		"back": {registry.NodeFenced, true, v,
			[]string{"The node is back", "keep this one busy", "alloc status"}, false},
		"out with the volume": {registry.NodeOutOfService, false, stored, []string{"volume deregister vol"}, false},
	} {
		node := host.NodeStatus{Node: registry.Node{Name: "a", State: test.state}, Alive: test.alive}
		n := lostHolder(node, test.volume, []host.Claim{{Name: v.VolumeName(), Alloc: "alloc", Node: "a"}})
		if n == nil {
			t.Fatalf("%s: no notice", name)
		}
		text := n.Summary + " " + n.Meaning + " " + n.Next
		for _, c := range n.Commands {
			text += " " + c.Line
		}
		for _, want := range test.wants {
			if !strings.Contains(text, want) {
				t.Errorf("%s: no %q in %s", name, want, text)
			}
		}
		if gone := !strings.Contains(text, "may "); gone != test.gone {
			t.Errorf("%s: %s", name, text)
		}
	}
}
