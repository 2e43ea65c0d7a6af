package registry

import "testing"

func TestEventsAreDescribedOnOneLine(t *testing.T) {
	for want, e := range map[string]Event{
		"plugin loopfs unhealthy as csi-node: heartbeats missed: no answer": {
			Kind: EventUnhealthy, Plugin: "loopfs", Role: "csi-node", Alloc: "a",
			Cause: CauseMissed, Detail: "no answer",
		},
		"volume data published as csi-node for alloc 0a1b2c3d": {
			Kind: EventPublished, Role: "csi-node", Alloc: "0a1b2c3d-4e5f",
			Volume: VolumeName{ID: "data"},
		},
		"node reconciled: orphan: /s is mounted": {Kind: EventReconciled, Detail: "orphan: /s is mounted"},
		"volume mine/data deleted": {Kind: EventVolumeDeleted,
			Volume: VolumeName{Namespace: "mine", ID: "data"}},
		"volume data deregistered: its plugin was not asked to delete it": {
			Kind: EventVolumeDeregistered, Volume: VolumeName{ID: "data"},
			Detail: "its plugin was not asked to delete it",
		},
	} {
		if got := e.Describe(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
