package node

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
	"holdfast/shim/internal/controller"
)

// everyCap are the capabilities of all versions of CSI. A plugin built on one version announces those of its version.
var everyCap = strings.Join(append(slices.Clone(csifake.AllCaps), "expansion/ONLINE", "VOLUME_CONDITION", "GET_VOLUME",
	"GET_SNAPSHOT", "SINGLE_NODE_MULTI_WRITER", "GET_VOLUME_HEALTH", "LIST_VOLUME_HEALTH", "GET_STORAGE_HEALTH"), " ")

// rpcsSince has the RPCs in the life of a volume, with the minor version of CSI that added each. If later versions use
// another RPC instead, the last version that uses this RPC follows.
var rpcsSince = map[string][2]int{
	"CreateVolume": {}, "ControllerPublishVolume": {}, "NodeStageVolume": {}, "NodePublishVolume": {},
	"NodeGetVolumeStats": {}, "CreateSnapshot": {}, "DeleteSnapshot": {}, "NodeUnpublishVolume": {},
	"NodeUnstageVolume": {}, "ControllerUnpublishVolume": {}, "DeleteVolume": {}, "GetCapacity": {},
	"ControllerExpandVolume": {1}, "NodeExpandVolume": {1},
	"ListVolumes":                {3, 12}, // for the health of volumes
	"ControllerListVolumeHealth": {13}, "NodeGetVolumeHealth": {13}, "NodeGetStorageHealth": {13},
}

// A plugin that is built on any version of CSI, from 1.0 to a future one, serves a volume from its creation to its
// deletion. It gets no call that its version does not have, so no answer is UNIMPLEMENTED.
func TestPluginsOfEveryVersionOfCSI(t *testing.T) {
	for minor, version := range csifake.Versions() {
		t.Run(version, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newEnv(t, everyCap)
				n.spec = version
				n.start()
				n.liveWith(minor)
				n.settle()
				n.judge()
				n.wantVersion(minor)
			})
		})
	}
}

// liveWith runs a volume from its creation to its deletion.
func (n *env) liveWith(minor int) {
	ctx, call := n.shim.ctx, registry.Call{}
	spec := n.volume(3, "").VolumeSpec
	spec.CapacityMin = gib
	ok := func(what string, err error) {
		n.t.Helper()
		if err != nil {
			n.t.Errorf("%s: %v", what, err)
		}
	}
	created, err := n.shim.volumes.Create(ctx, call, spec)
	ok("create", err)
	_, err = n.shim.volumes.Capacity(ctx, registry.CapacityQuery{Plugin: pluginID})
	ok("capacity", err)
	n.up("a1", wish{volumes: []int{3}})
	_, err = n.shim.stager.Stats(ctx, created.VolumeName())
	ok("stats", err)
	_, err = n.shim.volumes.Expand(ctx, call, created.VolumeName(), registry.CapacityRange{Required: 2 * gib})
	if minor == 0 {
		wantErr(n.t, err, registry.ErrUnsupported)
	} else {
		ok("expand", err)
	}
	snapshots := controller.NewSnapshots(n.shim.volumes, n.shim.fleet)
	snapshot := registry.SnapshotSpec{Namespace: "default", ID: "s", Volume: "v3"}
	_, err = snapshots.Create(ctx, call, snapshot)
	ok("snapshot", err)
	ok("delete snapshot", snapshots.Delete(ctx, call, snapshot.SnapshotName()))
	for _, rpc := range healthCalls {
		n.script(csifake.Rule{RPC: rpc, Condition: &csifake.Condition{Abnormal: true, Message: "m"}})
	}
	time.Sleep(7 * time.Minute)
	n.view(func(v registry.View) {
		vol, _ := v.VolumeByKey(created.VolumeKey())
		p, _ := v.Staging(created.VolumeKey())
		in, _ := n.shim.table.Find(registry.RoleNode, pluginID)
		told := minor >= 3
		if vol.Health.Abnormal() != told || p.Condition.Abnormal != told || in.Storage.Abnormal != (minor >= 13) {
			n.t.Errorf("health: %+v, on the node %+v, storage %+v", vol.Health, p.Condition, in.Storage)
		}
		if future := in.Fingerprint.Has("node.9999"); future != (minor > 13) {
			n.t.Errorf("capabilities: %q", in.Fingerprint.Capabilities)
		}
	})
	n.script()
	n.down("a1")
	ok("delete", n.shim.volumes.Delete(ctx, call, created.VolumeName()))
}

// wantVersion checks which RPCs the plugin got, and that it knew each.
func (n *env) wantVersion(minor int) {
	got := map[string]bool{}
	for _, c := range journal.Calls(n.journal.Lines()) {
		got[c.RPC] = true
		if c.End == nil || c.End.Code != "OK" {
			n.t.Errorf("%s: %+v", c.RPC, c.End)
		}
	}
	for rpc, since := range rpcsSince {
		until := max(since[1], since[0])
		if since[1] == 0 {
			until = 99
		}
		if want := minor >= since[0] && minor <= until; got[rpc] != want {
			n.t.Errorf("the plugin got %s: %v", rpc, got[rpc])
		}
	}
}
