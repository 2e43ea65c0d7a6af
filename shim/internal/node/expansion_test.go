package node_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// An expansion that comes to no end holds up who gives the volume back for a round, and not for ever, whichever half it
// is and however its plugin fails. What it was to do is done at the next use.
func TestReleaseDoesNotWaitForAnExpansion(t *testing.T) {
	for what, rule := range map[string]csifake.Rule{
		"the node's plugin is not there for it": {RPC: "NodeExpandVolume", Code: "UNAVAILABLE"},
		"the node's plugin breaks off":          {RPC: "NodeExpandVolume", Drop: true},
		"the node's plugin hangs":               {RPC: "NodeExpandVolume", Hang: csifake.UntilCancelled},
		"the controller says later":             {RPC: "ControllerExpandVolume", Code: "ABORTED"},
		"the controller hangs":                  {RPC: "ControllerExpandVolume", Hang: csifake.UntilCancelled},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newHistoryEnv(t, 1)
				n.caps = []string{"STAGE_UNSTAGE_VOLUME", "EXPAND_VOLUME", "expansion/ONLINE"}
				n.startPlugin()
				n.startShim()
				n.introduce()
				if _, err := n.shim.allocs.Prepare(t.Context(), registry.Call{},
					n.group("alloc-0", wish{volumes: []int{0}})); err != nil {
					t.Fatal(err)
				}
				if err := n.plugin.Load().Script(rule); err != nil {
					t.Fatal(err)
				}
				n.expandFor(t, time.Minute)
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				if err := n.shim.allocs.Release(ctx, registry.Call{}, "alloc-0"); err != nil {
					t.Errorf("%v", err)
				}
				n.plugin.Load().ClearScript()
				n.settle()
				n.judge()
			})
		})
	}
}

// expandFor asks for a volume to be made larger, and gives up after a while.
func (n *historyEnv) expandFor(t *testing.T, limit time.Duration) {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	name := registry.VolumeName{Namespace: "default", ID: "v0"}
	if _, err := n.shim.volumes.Expand(ctx, registry.Call{}, name,
		registry.CapacityRange{Required: 2 << 30}); err == nil {
		t.Error("it was expanded")
	}
}
