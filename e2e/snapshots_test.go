package e2e

import (
	"slices"
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

// TestListOfBlocksIsContinued cuts off a list of blocks in the middle: by a swap, the death of the shim or a lost
// connection. The list continues after the last block, so each block comes once.
func TestListOfBlocksIsContinued(t *testing.T) {
	t.Parallel()
	e := newEnv(t, append([]string{"CREATE_DELETE_SNAPSHOT", "SNAPSHOT_METADATA_SERVICE"}, allCaps...)...)
	plugin := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	written := []int64{1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233}
	volumes, _, err := e.host.Volumes(e.ctx(), host.VolumeQuery{})
	e.must(err)
	external := string(volumes[0].External)
	e.must(plugin.Backend().Write(external, 1, 2, 4, 6))
	take := func(id host.SnapshotID) {
		e.must(errOf(e.host.CreateSnapshot(e.ctx(), host.SnapshotSpec{Namespace: "default", ID: id, Volume: "vol"})))
	}
	take("base")
	e.must(plugin.Backend().Write(external, written...))
	take("snap")
	for name, disturb := range map[string]func(){"swap": func() { e.swap() }, "kill": e.killShim, "broken": func() {}} {
		rule := plugin.On("GetMetadataDelta").Times(1).Middle()
		gate := (*csifake.Gate)(nil)
		if name == "broken" {
			rule.Drop()
		} else {
			gate = rule.Hold()
		}
		var got []int64
		q := host.BlockQuery{Snapshot: host.SnapshotName{Namespace: "default", ID: "snap"}, Base: "base"}
		listed := background(func() error {
			return e.host.SnapshotBlocks(e.ctx(), q, func(b host.Blocks) error {
				for _, r := range b.Ranges {
					got = append(got, r.Offset/csifake.BlockSize)
				}
				return nil
			})
		})
		if gate != nil {
			e.waitHeld(gate, listed)
			disturb()
			gate.Open()
		}
		e.must(e.result("the list of blocks", listed))
		if !slices.Equal(got, written) {
			t.Errorf("%s: got the blocks %v, want %v", name, got, written)
		}
		plugin.ClearScript()
	}
	e.must(e.host.DeleteSnapshot(e.ctx(), host.SnapshotName{Namespace: "default", ID: "base"}))
	e.must(e.host.DeleteSnapshot(e.ctx(), host.SnapshotName{Namespace: "default", ID: "snap"}))
	e.must(e.delete("vol"))
	e.stopPlugin(plugin)
}
