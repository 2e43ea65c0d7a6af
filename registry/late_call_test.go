package registry_test

import (
	"errors"
	"testing"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestEndedCallIsLateAtFormerExecutors ends a call that three nodes have begun: the holder, a former executor and a
// node that has settled its calls. It may still run at the former executor. No other call is sent until that has
// settled its calls too.
func TestEndedCallIsLateAtFormerExecutors(t *testing.T) {
	s := registrytest.NewLog(time.Now)
	executor := registry.Executor{Plugin: "p", Holder: "a", Former: []registry.NodeName{"a", "b", "other"}}
	registrytest.Put(t, s, executor)
	call := registry.LateCall{Plugin: "p", For: "data", RPC: registry.DeleteVolumeRPC, Failed: true}
	for _, again := range []bool{false, true} {
		if _, err := registry.Ensure(t.Context(), s, func(v registry.View) (registry.Change, error) {
			change := v.Ended(call, []registry.NodeName{"a", "b", "settled"})
			if (len(change.Put) == 0) != again {
				t.Errorf("again %v: %+v", again, change)
			}
			return change, nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	defer func() { // the same call has succeeded since: the former executor may repeat it
		if err := s.View(t.Context(), func(v registry.View) error {
			call.Failed = false
			change := v.Ended(call, []registry.NodeName{"a"})
			if len(change.Put) != 1 || change.Put[0].(registry.LateCall).Node != "b" ||
				change.Put[0].(registry.LateCall).Failed {
				t.Errorf("after a success: %+v", change)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}()
	if err := s.View(t.Context(), func(v registry.View) error {
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
			t.Error("the late call has not the other calls for its volume wait until it is settled")
		}
		if keys := v.PastLateCalls(executor); len(keys) > 0 {
			t.Errorf("%v do not count", keys)
		}
		if keys := v.PastLateCalls(executor.Settled("b")); len(keys) != 1 || keys[0] != late[0].Key() {
			t.Errorf("%v do not count after the end", keys)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestCallThatIsGivenUpCountsAfterATakeover gives up a call of the holder. The holder itself may send other calls, as a
// single node may. Another node may not once it has taken over, unless the holder's plugin has answered a call for the
// volume since.
func TestCallThatIsGivenUpCountsAfterATakeover(t *testing.T) {
	s := registrytest.NewLog(time.Now)
	executor := registry.Executor{Plugin: "p", Holder: "a"}
	volume := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "data", Plugin: "p",
		External: "vol"}}
	name := volume.VolumeName()
	attach := registry.LateCall{Plugin: "p", For: name.String(), RPC: registry.ControllerPublishRPC, Volume: &volume}
	snap := registry.VolumeSnapshot{Plugin: "p", Source: "vol", State: registry.SnapshotCreating}
	snap.Namespace, snap.ID, snap.Volume = "default", "s1", "data"
	snapshot := registry.LateCall{Plugin: "p", For: "snapshot s1", RPC: registry.CreateSnapshotRPC, Snapshot: &snap}
	registrytest.Put(t, s, executor)
	commit := func(decide func(registry.View) registry.Change) {
		t.Helper()
		if _, err := s.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
			return decide(v), nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, given := range []registry.LateCall{attach, snapshot} {
		commit(func(v registry.View) registry.Change { return v.GivenUp(given, []registry.NodeName{"a", "other"}) })
		commit(func(v registry.View) registry.Change {
			next := registry.Intent{Volume: volume.VolumeKey(), Name: name, RPC: registry.ControllerExpandRPC}
			if err := v.Blocks(executor, next); err != nil {
				t.Errorf("at the holder, after %s: %v", given.RPC, err)
			}
			late := v.LateCalls("p", "a")
			if len(late) != 1 || !late[0].Same(given) || len(v.LateCalls("p", "other")) > 0 {
				t.Errorf("late calls %+v", late)
			}
			if keys := v.PastLateCalls(executor); len(keys) > 0 {
				t.Errorf("%v do not count while the node is the holder", keys)
			}
			taken := executor.Taken("b", 1, time.Now())
			if err := v.Blocks(taken, next); !errors.Is(err, registry.ErrUnavailable) {
				t.Errorf("at the next executor, after %s: %v", given.RPC, err)
			}
			if keys := v.PastLateCalls(taken.Left("a", time.Now())); len(keys) != 1 {
				t.Errorf("%v do not count once the node was lost", keys)
			}
			ended := registry.LateCall{Plugin: "p", For: name.String(), RPC: registry.ControllerExpandRPC,
				Volume: &volume}
			return v.Ended(ended, []registry.NodeName{"a"})
		})
		if err := s.View(t.Context(), func(v registry.View) error {
			if late := v.LateCalls("p", "a"); len(late) > 0 {
				t.Errorf("late calls %+v after an answer", late)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
}
