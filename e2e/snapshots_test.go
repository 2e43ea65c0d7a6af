package e2e

import (
	"testing"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// A snapshot that its plugin is still processing is created once the plugin says that it is ready, also by another shim
// than the one that took it. A volume is created from it only then.
func TestSnapshotBecomesReady(t *testing.T) {
	t.Parallel()
	e := newEnv(t, append([]string{"CREATE_DELETE_SNAPSHOT"}, allCaps...)...)
	plugin := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	plugin.On("CreateSnapshot").NotReady()
	spec := host.SnapshotSpec{Namespace: "default", ID: "snap", Volume: "vol"}
	created := background(func() error { return errOf(e.host.CreateSnapshot(e.ctx(), spec)) })
	state := func() host.Snapshot {
		list, _, err := e.host.Snapshots(e.ctx(), host.SnapshotQuery{Name: spec.SnapshotName()})
		e.must(err)
		if len(list) == 0 {
			return host.Snapshot{}
		}
		return list[0]
	}
	e.waitUntil("the snapshot is processed", func() bool { return state().State == "processing" })
	e.wantConflict(e.createWith(e.ctx(), "early", `snapshot_id = "snap"`), "which is processing")
	e.swap()
	e.replaceShimByKill()
	plugin.ClearScript()
	e.must(e.result("the creation of the snapshot", created))
	if snap := state(); snap.State != "ready" || snap.External == "" {
		t.Errorf("%+v", snap)
	}
	e.wantOneRequest("CreateSnapshot", 3)
	e.must(e.createWith(e.ctx(), "restored", `snapshot_id = "snap"`))
	e.must(e.delete("restored"))
	e.must(e.host.DeleteSnapshot(e.ctx(), spec.SnapshotName()))
	e.must(e.delete("vol"))
	e.stopPlugin(plugin)
}
