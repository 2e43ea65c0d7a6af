package control

import (
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/registry"
)

// TestWaitNamesTheNodeThatMakesTheCall describes a wait for a controller call on one of two nodes.
func TestWaitNamesTheNodeThatMakesTheCall(t *testing.T) {
	node := func(name host.NodeName, alive bool, p registry.NodePluginStatus) host.NodeStatus {
		p.Plugin, p.NodePlugin.Node = "p", true
		return host.NodeStatus{Node: registry.Node{Name: name, State: registry.NodeReady}, Alive: alive,
			Plugins: []registry.NodePluginStatus{p}}
	}
	plain, executor := registry.NodePluginStatus{}, registry.NodePluginStatus{Executor: true}
	local := registry.NodePluginStatus{NodePlugin: registry.NodePlugin{Local: true}}
	here := node("a", true, plain)
	outOfService := node("b", false, local)
	outOfService.State = registry.NodeOutOfService
	for name, test := range map[string]struct {
		nodes  []host.NodeStatus
		volume *host.VolumeStatus
		want   string // empty: this node makes the call
	}{
		"one node":  {[]host.NodeStatus{here}, nil, ""},
		"this node": {[]host.NodeStatus{node("a", true, executor), node("b", true, plain)}, nil, ""},
		"another node": {[]host.NodeStatus{here, node("b", true, executor)}, nil,
			"no answer from node b, which makes"},
		"a suspect node": {[]host.NodeStatus{here, node("b", false, executor)}, nil, "is suspect"},
		"no node": {[]host.NodeStatus{here, node("b", true, plain)}, nil,
			"if none runs it, run the plugin's job on a node: holdfast job run FILE"},
		"a volume of this node": {[]host.NodeStatus{node("a", true, local), node("b", true, local)}, nil, ""},
		"a volume of another": {[]host.NodeStatus{node("a", true, local), node("b", true, local)},
			&host.VolumeStatus{Volume: registry.Volume{VolumeSpec: registry.VolumeSpec{Node: "b"}}},
			"no answer from node b"},
		"a volume of a node that is out of service": {[]host.NodeStatus{node("a", true, local), outOfService},
			&host.VolumeStatus{Volume: registry.Volume{VolumeSpec: registry.VolumeSpec{Node: "b"}}},
			"is out-of-service, and only that node can change the volume; to remove its record: holdfast volume " +
				"deregister"},
	} {
		got := executorText(test.nodes, "a", test.volume, "p")
		if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
