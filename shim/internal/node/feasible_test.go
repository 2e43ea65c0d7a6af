package node

import (
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/registry"
)

// Feasible returns in one call all reasons why a prepare of the alloc would fail or wait. It returns none if the
// prepare would succeed. It changes nothing and calls no plugin.
func TestFeasibleSaysWhatPrepareWouldMeet(t *testing.T) {
	edit := func(n *env, change func(*registry.Instance)) {
		n.view(func(v registry.View) {
			for _, i := range v.AllInstances() {
				change(&i)
				defer n.commit(registry.PutChange(v, time.Now(), i))
			}
		})
	}
	type kinds = []registry.InfeasibleKind
	for name, c := range map[string]struct {
		before  func(n *env)
		asks    wish
		reasons kinds
		says    string
	}{
		"nothing":     {func(*env) {}, wish{volumes: []int{0, 1, 2}, inline: true}, nil, ""},
		"what it has": {func(n *env) { n.up("a1", wish{volumes: []int{2}}) }, wish{volumes: []int{2}}, nil, ""},
		"unknown volumes": {func(*env) {}, wish{volumes: []int{7, 0, 8}},
			kinds{registry.InfeasibleNoVolume, registry.InfeasibleNoVolume}, "volume v7 is not known"},
		"a claim": {func(n *env) { n.up("a2", wish{volumes: []int{2}}) }, wish{volumes: []int{2}},
			kinds{registry.InfeasibleClaimed}, "alloc a2"},
		"a volume that is deleted": {func(n *env) {
			v := n.volume(0, "x-v0")
			v.State = registry.VolumeDeleting
			n.put(v)
		}, wish{volumes: []int{0}}, kinds{registry.InfeasibleNotReady}, "deleting"},
		"another mode": {func(n *env) {
			v := n.volume(0, "x-v0")
			v.Capabilities = v.Capabilities[:1]
			n.put(v)
		}, wish{volumes: []int{0}, block: true}, kinds{registry.InfeasibleUnsupported}, "does not support"},
		"no plugin": {(*env).removePlugin, wish{volumes: []int{0}},
			kinds{registry.InfeasibleNoPlugin, registry.InfeasibleNoPlugin},
			"no task on this node serves plugin p as csi-node"},
		"an unhealthy plugin": {func(n *env) {
			edit(n, func(i *registry.Instance) {
				i.Health = registry.Health{State: registry.Unhealthy, Cause: registry.CauseMissed}
			})
		}, wish{volumes: []int{0}}, kinds{registry.InfeasibleUnhealthy, registry.InfeasibleUnhealthy},
			"plugin p is unhealthy as csi-node: heartbeats missed"},
		"another zone, in a full node": {func(n *env) {
			n.up("a2", wish{volumes: []int{1}})
			v := n.volume(0, "x-v0")
			v.Accessible = []registry.Topology{{"zone": "b"}}
			n.put(v)
			edit(n, func(i *registry.Instance) {
				i.Fingerprint.MaxVolumes, i.Fingerprint.Topology = 1, registry.Topology{"zone": "a"}
				i.Fingerprint.Capabilities = append(i.Fingerprint.Capabilities, registry.PluginTopology)
				slices.Sort(i.Fingerprint.Capabilities)
			})
		}, wish{volumes: []int{0}}, kinds{registry.InfeasibleTopology, registry.InfeasibleLimit}, "zone=b"},
		"room for one, and an inline volume": {func(n *env) {
			edit(n, func(i *registry.Instance) { i.Fingerprint.MaxVolumes = 1 })
		}, wish{volumes: []int{0}, inline: true}, nil, ""},
		"a volume that the plugin cannot create": {func(*env) {}, makes("keep"), kinds{registry.InfeasibleUnsupported},
			"plugin p cannot create volumes"},
		"room for one of two": {func(n *env) {
			edit(n, func(i *registry.Instance) { i.Fingerprint.MaxVolumes = 1 })
		}, wish{volumes: []int{0, 1}}, kinds{registry.InfeasibleLimit}, "v0 (alloc a1)"},
	} {
		t.Run(name, func(t *testing.T) {
			inEnv(t, attaches+stages, func(t *testing.T, n *env) {
				c.before(n)
				n.rpcs()
				var before registry.Seq
				n.view(func(v registry.View) { before = v.Index() })
				reasons, at, err := n.shim.allocs.Feasible(t.Context(), n.group("a1", c.asks))
				var got kinds
				var says []string
				for _, r := range reasons {
					got, says = append(got, r.Kind), append(says, r.Detail)
				}
				if err != nil || !slices.Equal(got, c.reasons) ||
					!strings.Contains(strings.Join(says, "\n"), c.says) {
					t.Errorf("%v, %q, %v", got, says, err)
				}
				n.view(func(v registry.View) {
					if v.Index() != before || at != before {
						t.Errorf("index %d, answered for %d, before %d", v.Index(), at, before)
					}
				})
				n.want("asked")
				if err := n.tryUp("a1", c.asks); (err == nil) != (len(reasons) == 0) {
					t.Errorf("prepared: %v", err)
				}
				n.put(n.volume(0, "x-v0"))
				n.removePlugin()
				n.introduce()
			})
		})
	}
}
