package node

import (
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// The wait of a retried step covers all its tries: it has the time of the first try, the number of tries and the last
// response.
func TestWaitGoesOn(t *testing.T) {
	noon := time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	later := noon.Add(time.Minute)
	stage := func(attempt uint64, since time.Time, code, detail string) registry.Wait {
		return registry.Wait{Request: "r", Step: registry.StepStage, For: "plugin p", RPC: registry.NodeStageRPC,
			Attempt: attempt, Since: since, Code: code, Detail: detail}
	}
	claim := func(since time.Time, detail string) registry.Wait {
		return registry.Wait{Request: "r", Step: registry.StepClaim, Since: since, Detail: detail}
	}
	for name, c := range map[string]struct{ old, now, want registry.Wait }{
		"refused for certain, sent anew": {
			stage(4, noon, "FAILED_PRECONDITION", "fsck first"), stage(1, later, "", ""),
			stage(5, noon, "FAILED_PRECONDITION", "fsck first"),
		},
		"refused for certain, refused again": {
			stage(4, noon, "FAILED_PRECONDITION", "fsck first"), stage(1, later, "FAILED_PRECONDITION", "fsck now"),
			stage(5, noon, "FAILED_PRECONDITION", "fsck now"),
		},
		"uncertain, the same call again": {
			stage(4, later, "UNAVAILABLE", "down"), stage(5, noon, "UNAVAILABLE", "still down"),
			stage(5, noon, "UNAVAILABLE", "still down"),
		},
		"another step":      {stage(4, noon, "UNAVAILABLE", "down"), claim(noon, "held"), claim(noon, "held")},
		"the same, no call": {claim(noon, "held"), claim(later, "held by another"), claim(noon, "held by another")},
		"another call of one": {stage(4, noon, "", ""), registry.Wait{Step: registry.StepStage, RPC: "X", Since: later},
			registry.Wait{Step: registry.StepStage, RPC: "X", Since: later}},
	} {
		if got := continueWait(c.old, c.now); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

// An alloc waits for its turn while the volume is being mounted for another alloc. A short wait is not recorded. An
// alloc whose own call hangs waits for its step. A release of either alloc does not wait for the other.
func TestReleaseDoesNotWaitForAnothersStage(t *testing.T) {
	for _, released := range []registry.AllocID{"a1", "a2"} {
		inEnv(t, stages, func(t *testing.T, n *env) {
			n.script(csifake.Rule{RPC: string(stage), Hang: csifake.UntilCancelled})
			for _, id := range []registry.AllocID{"a1", "a2"} {
				group := n.group(id, wish{volumes: []int{0}})
				n.async(func() { _, _ = n.shim.allocs.Prepare(n.shim.ctx, registry.Call{}, group) })
			}
			waitsFor := func(id registry.AllocID) (w registry.Wait) {
				for _, w = range n.status(id).Waiting {
				}
				return w
			}
			time.Sleep(longWait - time.Millisecond)
			synctest.Wait()
			if w := waitsFor("a2"); w.Step == registry.StepTurn {
				t.Errorf("a short wait is recorded: %+v", w)
			}
			time.Sleep(time.Millisecond)
			synctest.Wait()
			if w := waitsFor("a1"); w.Step != registry.StepStage || w.Advice == "" {
				t.Errorf("the first waits for %+v", w)
			}
			if w := waitsFor("a2"); w.Step != registry.StepTurn || w.For != "a mount for alloc a1" {
				t.Errorf("the second waits for %+v", w)
			}
			n.script()
			began := time.Now()
			n.down(released)
			if took := time.Since(began); released == "a2" && took > 0 {
				t.Errorf("the release took %v", took)
			}
			other := map[registry.AllocID]registry.AllocID{"a1": "a2", "a2": "a1"}[released]
			time.Sleep(time.Second)
			if w := waitsFor(other); w.Step == registry.StepTurn {
				t.Errorf("the other alloc still waits for its turn: %+v", w)
			}
		})
	}
}

// The open CreateVolume call of a volume is part of its status, although its intent has another key.
func TestVolumeStatusHasItsOpenCreation(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		name := registry.VolumeName{Namespace: "default", ID: "new"}
		vol := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "new", Name: "new",
			Plugin: "other"}, State: registry.VolumeCreating}
		call := registry.Intent{Volume: registry.VolumeKey{Plugin: "other", External: "name:new"}, Name: name,
			RPC: registry.CreateVolumeRPC, Attempt: 3, Code: "UNAVAILABLE", Detail: "down"}
		n.put(vol, call)
		all, _, _ := n.shim.allocs.Volumes(t.Context(), registry.VolumeName{})
		list, _, err := n.shim.allocs.Volumes(t.Context(), name)
		if err != nil || len(list) != 1 || list[0].Intent == nil || len(list[0].Waiting) != 1 || len(all) != 4 {
			t.Fatalf("%+v, %v", list, err)
		}
		for _, one := range all {
			if one.VolumeName() == name && !reflect.DeepEqual(one, list[0]) {
				t.Errorf("alone %+v, among all %+v", list[0], one)
			}
		}
		if w := list[0].Waiting[0]; w.RPC != registry.CreateVolumeRPC || w.Detail != "down" || w.Volume != name ||
			w.Advice == "" {
			t.Errorf("%+v", w)
		}
		n.commit(registry.Change{Delete: []registry.Key{vol.Key(), call.Key()}})
	})
}
