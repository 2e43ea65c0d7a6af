package registry_test

import (
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestEndedCallIsLateAtFormerExecutors ends a call that three nodes have begun: the holder, a former executor and a
// node that has settled its calls. It may still run at the former executor. No other call is sent until that has
// settled its calls too.
func TestEndedCallIsLateAtFormerExecutors(t *testing.T) {
	log := registrytest.NewLog(now)
	executor := registry.Executor{Plugin: "p", Holder: "a", Former: []registry.NodeName{"a", "b", "other"}}
	registrytest.Put(t, log, executor)
	call := registry.LateCall{Plugin: "p", For: "data", RPC: registry.DeleteVolumeRPC, Failed: true}
	senders := []registry.NodeName{"a", "b", "settled"}
	_, err := registrytest.Write(t.Context(), log, viewOf(t, log).Ended(call, senders))
	must(t, err)
	v := viewOf(t, log)
	if again := v.Ended(call, senders); len(again.Put) > 0 {
		t.Errorf("the same call again: %+v", again)
	}
	late := v.LateCalls("p", "b")
	if len(late) != 1 || !late[0].Same(call) || !late[0].Failed ||
		len(v.LateCalls("p", "a"))+len(v.LateCalls("p", "settled")) > 0 {
		t.Errorf("%+v", late)
	}
	blocks := func(e registry.Executor, id registry.VolumeID, rpc registry.RPC) bool {
		name := registry.VolumeName{Namespace: "default", ID: id}
		return v.Blocks(e, registry.Intent{Name: name, RPC: rpc}) != nil
	}
	if !blocks(executor, "data", registry.CreateVolumeRPC) || blocks(executor, "data", call.RPC) ||
		blocks(executor, "data2", registry.CreateVolumeRPC) ||
		blocks(executor.Settled("b"), "data", registry.CreateVolumeRPC) {
		t.Error("other calls for the volume do not wait for the late call until it is settled, or others do")
	}
	if keys := v.PastLateCalls(executor); len(keys) > 0 {
		t.Errorf("%v do not count", keys)
	}
	if keys := v.PastLateCalls(executor.Settled("b")); len(keys) != 1 || keys[0] != late[0].Key() {
		t.Errorf("%v do not count after the end", keys)
	}
	call.Failed = false // the same call has succeeded since: the former executor may repeat it
	change := v.Ended(call, []registry.NodeName{"a"})
	if len(change.Put) != 1 || change.Put[0].(registry.LateCall).Node != "b" ||
		change.Put[0].(registry.LateCall).Failed {
		t.Errorf("after a success: %+v", change)
	}
}

// TestCallOfTheHolderIsGivenUp gives up a call of the holder. If another node does that, the holder becomes a former
// executor too, and other calls wait until it has settled the call. If the holder does it, they do not.
func TestCallOfTheHolderIsGivenUp(t *testing.T) {
	volume := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "data", Plugin: "p",
		External: "vol"}}
	snap := registry.VolumeSnapshot{Plugin: "p", Source: "vol", State: registry.SnapshotCreating}
	snap.Namespace, snap.ID, snap.Volume = "default", "s1", "data"
	next := registry.Intent{Volume: volume.VolumeKey(), Name: volume.VolumeName(), RPC: registry.ControllerExpandRPC}
	renamed := next
	renamed.Name.ID = "data2"
	for _, given := range []registry.LateCall{
		{Plugin: "p", For: "data", RPC: registry.ControllerPublishRPC, Volume: &volume},
		{Plugin: "p", For: "snapshot s1", RPC: registry.CreateSnapshotRPC, Snapshot: &snap},
	} {
		for _, by := range []registry.NodeName{"a", "b"} {
			log := registrytest.NewLog(now)
			registrytest.Put(t, log, registry.Executor{Plugin: "p", Holder: "a"})
			_, err := registrytest.Write(t.Context(), log,
				viewOf(t, log).GivenUp(given, []registry.NodeName{"a", "settled"}, by))
			must(t, err)
			v := viewOf(t, log)
			e, _ := v.Executor("p")
			waits := v.Blocks(e, next) != nil && v.Blocks(e, renamed) != nil
			taken := e.Taken("b", 1, now())
			if waits != (by == "b") || (v.Blocks(taken, next) != nil) != waits || e.Holder != "a" {
				t.Errorf("%s is given up by %s: another call waits: %t; %+v", given.RPC, by, waits, e)
			}
			if again := v.GivenUp(given, []registry.NodeName{"a"}, by); (len(again.Put) == 1) != (by == "b") {
				t.Errorf("%s is given up again by %s: %+v", given.RPC, by, again)
			}
			if err := v.Blocks(e.Settled("a"), next); err != nil || len(v.LateCalls("p", "settled")) > 0 {
				t.Errorf("settled calls of %s: %v", given.RPC, err)
			}
		}
	}
}
