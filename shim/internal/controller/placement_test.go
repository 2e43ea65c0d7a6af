package controller

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"holdfast/registry"
)

// onNode returns a table with one node plugin that reports the topology and the limit.
func onNode(where registry.Topology, limit int64, caps ...registry.Capability) table {
	i := with(caps...)
	i.Role, i.Fingerprint.Topology, i.Fingerprint.MaxVolumes = registry.RoleNode, where, limit
	return table{registry.RoleNode: i}
}

// The topology of a volume is compared as CSI says, and only if the plugin has VOLUME_ACCESSIBILITY_CONSTRAINTS.
func TestClaimNeedsAccessFromTheNode(t *testing.T) {
	a, b := registry.Topology{"example.org/zone": "a"}, registry.Topology{"example.org/zone": "b"}
	both := registry.Topology{"example.org/zone": "a", "example.org/rack": "r1"}
	topology := []registry.Capability{registry.PluginTopology}
	for name, c := range map[string]struct {
		volume  []registry.Topology
		node    registry.Topology
		caps    []registry.Capability
		refused bool
	}{
		"the same":                      {[]registry.Topology{a}, a, topology, false},
		"another zone":                  {[]registry.Topology{b}, a, topology, true},
		"one of several":                {[]registry.Topology{b, a}, a, topology, false},
		"the node has more segments":    {[]registry.Topology{a}, both, topology, false},
		"the node has fewer segments":   {[]registry.Topology{both}, a, topology, true},
		"keys in another case":          {[]registry.Topology{{"Example.org/ZONE": "a"}}, a, topology, false},
		"values in another case":        {[]registry.Topology{{"example.org/zone": "A"}}, a, topology, true},
		"a volume without a topology":   {nil, a, topology, false},
		"a node without a topology":     {[]registry.Topology{a}, nil, topology, true},
		"a plugin without the ability":  {[]registry.Topology{b}, a, nil, false},
		"neither has one, with ability": {nil, nil, topology, false},
	} {
		v := volume()
		v.Accessible = c.volume
		d := open(t, onNode(c.node, 0, c.caps...), v)
		_, err := d.Controller.Claim(t.Context(), wanted("a1", registry.SingleNodeWriter))
		switch {
		case !c.refused && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.refused && !errors.Is(err, registry.ErrUnsupported):
			t.Errorf("%s: %v", name, err)
		case c.refused && !(strings.Contains(err.Error(), registry.Topologies(c.volume)) &&
			strings.Contains(err.Error(), c.node.String())):
			t.Errorf("%s: the segments are not named: %v", name, err)
		}
	}
}

// A node gets max_volumes_per_node volumes of a plugin, each counted once, and the refusal names them.
func TestClaimKeepsTheVolumeLimit(t *testing.T) {
	at := func(i int) registry.VolumeKey {
		return registry.VolumeKey{Plugin: key.Plugin, External: registry.ExternalID(fmt.Sprintf("vol-%d", i))}
	}
	d := open(t, onNode(nil, 4))
	for i := range 6 {
		v := volume()
		v.ID, v.External = registry.VolumeID(fmt.Sprintf("v%d", i)), at(i).External
		d.put(v)
	}
	claim := func(i int, alloc registry.AllocID) error {
		c := wanted(alloc, registry.MultiNodeMultiWriter)
		c.Volume = at(i)
		_, err := d.Controller.Claim(t.Context(), c)
		return err
	}
	d.put(registry.Alloc{ID: "a0", Job: "web", State: registry.AllocReady},
		registry.Attachment{Volume: at(2), Name: registry.VolumeName{Namespace: "default", ID: "v2"}, Node: "n1",
			State: registry.MarkDone},
		registry.Attachment{Volume: at(5), Node: "n2", State: registry.MarkDone},
		registry.EndpointUse{
			Volume: registry.VolumeKey{Plugin: key.Plugin, External: "foreign"},
			Node:   "n1", Target: "n1", Call: registry.NodeStageRPC,
		})
	for _, err := range []error{claim(0, "a0"), claim(0, "a1"), claim(1, "a2"), claim(2, "a3"), claim(0, "a0")} {
		noErr(t, "", err)
	}
	err := claim(3, "a4")
	if !errors.Is(err, registry.ErrExhausted) {
		t.Fatalf("%v", err)
	}
	for _, part := range []string{"v3", "4 volumes on node n1", "4 are there", "v0 (alloc a0 of job web, alloc a1)",
		"v2 (alloc a3)", `"foreign" (a client of the CSI endpoint)`} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in: %v", part, err)
		}
	}
	gone := wanted("a2", "")
	gone.Volume = at(1)
	noErr(t, "", errOf(d.Controller.Unclaim(t.Context(), gone.ClaimKey(), true)))
	noErr(t, "after a place is free", claim(3, "a4"))
}

// A required topology that does not include the only node is refused before CreateVolume.
func TestRequiredTopologyOfNoNodeIsRefused(t *testing.T) {
	s := spec()
	s.Required = []registry.Topology{{"zone": "b"}, {"zone": "c"}}
	plugins := of(registry.CreateDelete, registry.PluginTopology)
	plugins[registry.RoleNode] = onNode(registry.Topology{"zone": "a"}, 0, registry.PluginTopology)[registry.RoleNode]
	d := open(t, plugins)
	_, err := d.Controller.Create(t.Context(), call, s)
	wantErr(t, "", err, registry.ErrInvalid, "allows zone=b or zone=c, but plugin ebs reports zone=a")
	d.expect()
	s.Required = append(s.Required, registry.Topology{"ZONE": "a"})
	noErr(t, "", errOf(d.Controller.Create(t.Context(), call, s)))

	plugins[registry.RoleNode] = onNode(nil, 0)[registry.RoleNode] // it lacks the capability: its topology is not known
	d, s = open(t, plugins), spec()
	s.Required = []registry.Topology{{"zone": "b"}}
	noErr(t, "with a node plugin that reports no topology", errOf(d.Controller.Create(t.Context(), call, s)))

	plugins[registry.RoleNode] = onNode(registry.Topology{"zone": "a"}, 0, registry.PluginTopology)[registry.RoleNode]
	d = open(t, plugins)
	d.thisNode = "n1"
	noErr(t, "for another node of a cluster", errOf(d.Controller.Create(t.Context(), call, s)))
}

// A volume that is older than its plugin's controller_scope = "node" has no known node. The plugin of another node
// would answer OK to its deletion, so the call is not sent.
func TestVolumeWithoutItsNodeIsNotDeleted(t *testing.T) {
	for _, node := range []registry.NodeName{"", "n1"} {
		synctest.Test(t, func(t *testing.T) {
			plugins := of(registry.CreateDelete)
			inst := plugins[registry.RoleController]
			inst.Options = map[string]string{registry.OptionScope: registry.ScopeNode}
			plugins[registry.RoleController] = inst
			v := ready()
			v.Node = node
			d := open(t, plugins, v)
			d.thisNode = "n1"
			err := d.Controller.Delete(t.Context(), registry.Call{}, name)
			if node != "" {
				noErr(t, "its node is known", err)
				d.expect("DeleteVolume vol-data")
				return
			}
			wantErr(t, "its node is not known", err, registry.ErrConflict, "register it with node = NAME")
			if now, _ := d.stored(); now.State != registry.VolumeReady {
				t.Errorf("it is %s", now.State)
			}
			d.expect()
		})
	}
}
