package node

import (
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
)

var (
	noon  = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	later = noon.Add(time.Minute)
)

// What is told of a step that is tried again and again is the whole story: since the first try, with all tries, and
// with what was said last.
func TestWaitGoesOn(t *testing.T) {
	stage := func(attempt uint64, since time.Time, code, detail string) registry.Wait {
		w := registry.Wait{Request: "r", Step: registry.StepStage, For: "plugin p", RPC: registry.NodeStageRPC,
			Attempt: attempt, Since: since, Code: code, Detail: detail}
		return w
	}
	claim := registry.Wait{Request: "r", Step: registry.StepClaim, Since: noon, Detail: "held"}
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
		"another step": {stage(4, noon, "UNAVAILABLE", "down"), claim, claim},
		"the same, no call": {claim, registry.Wait{Request: "r", Step: registry.StepClaim, Since: later,
			Detail: "held by another"}, registry.Wait{Request: "r", Step: registry.StepClaim, Since: noon,
			Detail: "held by another"}},
		"another call of one": {stage(4, noon, "", ""), registry.Wait{Step: registry.StepStage, RPC: "X", Since: later},
			registry.Wait{Step: registry.StepStage, RPC: "X", Since: later}},
	} {
		if got := goesOn(c.old, c.now); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

// Whose volume another alloc is having staged waits for its turn, not for that stage; and no longer than until it has
// it.
func TestTurnIsToldAndOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		p.volume("a")
		a, end := p.allocs()
		defer end()
		gate := make(chan struct{})
		p.gate["stage"] = gate
		done := make(chan error, 2)
		prepare := func(alloc string) {
			go func() { _, err := a.Prepare(t.Context(), registry.Call{}, group(t, alloc, "a")); done <- err }()
			synctest.Wait()
		}
		prepare("alloc-1")
		open := registry.Intent{Volume: registry.VolumeKey{Plugin: "p", External: "x-a"},
			Name: registry.VolumeName{Namespace: "default", ID: "a"}, RPC: registry.NodeStageRPC, Attempt: 1,
			Since: noon}
		if err := p.commit([]registry.Record{open}); err != nil {
			t.Fatal(err)
		}
		prepare("alloc-2")
		step := func(alloc registry.AllocID) (of registry.Wait) {
			list, _, err := a.Status(t.Context(), alloc)
			if err != nil || len(list) != 1 {
				t.Fatalf("%s: %+v, %v", alloc, list, err)
			}
			for _, of = range list[0].Waiting {
			}
			return of
		}
		time.Sleep(long - time.Millisecond)
		synctest.Wait()
		if w := step("alloc-2"); w.Step == registry.StepTurn {
			t.Errorf("a short wait is told: %+v", w)
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if w := step("alloc-1"); w.Step != registry.StepStage || w.Advice == "" {
			t.Errorf("the first: %+v", w)
		}
		if w := step("alloc-2"); w.Step != registry.StepTurn || w.For != "a mount for alloc alloc-1" {
			t.Errorf("the second: %+v", w)
		}
		p.mu.Lock()
		p.gate["stage"], p.gate["publish"] = nil, make(chan struct{})
		p.mu.Unlock()
		close(gate)
		synctest.Wait() // the first publishes, and holds the lane
		held := p.gate["publish"]
		p.mu.Lock()
		delete(p.gate, "publish")
		p.gate["stage"] = make(chan struct{})
		p.mu.Unlock()
		close(held)
		synctest.Wait() // the second stages
		if w := step("alloc-2"); w.Step == registry.StepTurn {
			t.Errorf("the second, whose turn it is: %+v", w)
		}
		close(p.gate["stage"])
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
}

// A volume that is being made says so, though its call is filed under another name.
func TestCreationIsToldOfTheVolume(t *testing.T) {
	p := newParts(t)
	name := registry.VolumeName{Namespace: "default", ID: "a"}
	err := p.commit([]registry.Record{
		registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "a", Name: "a", Plugin: "p"},
			State: registry.VolumeCreating},
		registry.Intent{Volume: registry.VolumeKey{Plugin: "p", External: "name:a"}, Name: name,
			RPC: registry.CreateVolumeRPC, Attempt: 3, Code: "UNAVAILABLE", Detail: "down"},
	})
	if err != nil {
		t.Fatal(err)
	}
	a, end := p.allocs()
	defer end()
	list, _, err := a.Volumes(t.Context(), registry.VolumeName{})
	if one, _, _ := a.Volumes(t.Context(), name); !reflect.DeepEqual(one, list) {
		t.Errorf("alone %+v, among all %+v", one, list)
	}
	if err != nil || len(list) != 1 || list[0].Intent == nil || len(list[0].Waiting) != 1 {
		t.Fatalf("%+v, %v", list, err)
	}
	if w := list[0].Waiting[0]; w.RPC != registry.CreateVolumeRPC || w.Detail != "down" || w.Volume != name ||
		w.Advice == "" {
		t.Errorf("%+v", w)
	}
}

// An alloc that was to use a volume which the plugin hangs on for another alloc is stopped at once: nothing has to be
// undone for it.
func TestReleaseDoesNotWaitForAnothersStage(t *testing.T) {
	for _, stopped := range []string{"alloc-1", "alloc-2"} {
		t.Run(stopped, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newParts(t)
				p.volume("a")
				a, end := p.allocs()
				defer end()
				p.gate["stage"] = make(chan struct{})
				for _, alloc := range []string{"alloc-1", "alloc-2"} {
					go func() { _, _ = a.Prepare(t.Context(), registry.Call{}, group(t, alloc, "a")) }()
					synctest.Wait()
				}
				begin := time.Now()
				if err := a.Release(t.Context(), registry.Call{}, registry.AllocID(stopped)); err != nil ||
					time.Since(begin) > 0 {
					t.Errorf("released after %v: %v", time.Since(begin), err)
				}
				if said := p.said(); !slices.Contains(said, "unclaim x-a "+stopped) {
					t.Errorf("%q", said)
				}
				close(p.gate["stage"])
				synctest.Wait()
			})
		})
	}
}
