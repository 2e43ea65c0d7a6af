package node_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Any story of three allocs and two volumes, with calls that fail, get lost before or after their effect, and with a
// process or a machine that dies at any call: the plugin sees a legal order (it checks that itself), one staging path
// per volume, and in the end everything is undone and forgotten.
func TestModelOfTheLifeCycle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(struct{ rapid.TB }{t}, func(t *rapid.T) { // wrapped: a bubble has no deadline to ask for
			w := newWorld(t.Fatalf)
			w.limit = patience
			w.attaches, w.stages = rapid.Bool().Draw(t, "attaches"), rapid.Bool().Draw(t, "stages")
			w.expands, w.grows, w.offline = rapid.Bool().Draw(t, "expands"), rapid.Bool().Draw(t,
				"grows"), rapid.Bool().Draw(t, "offline")
			w.mountsStaging, w.keepsTargetDirs = rapid.Bool().Draw(t, "mounts staging"), rapid.Bool().Draw(t,
				"keeps target dirs")
			w.put(volumeOf("one"), volumeOf("two"))
			w.fault = func(registry.RPC) fault { return anyFault(t, w) }
			w.parts.fault = func(string) partFault { return anyPartFault(t, w) }
			t.Repeat(w.actions(t))
			w.settle(t)
		})
	})
}

func anyFault(t *rapid.T, w *world) fault {
	effect := rapid.Bool().Draw(t, "takes effect")
	switch rapid.IntRange(0, 11).Draw(t, "fault") {
	case 0:
		// partial effects may remain
		return fault{code: "INVALID_ARGUMENT", outcome: registry.OutcomeFailed, effect: effect}
	case 1:
		return fault{code: "UNAVAILABLE", outcome: registry.OutcomeUncertain, effect: effect}
	case 2:
		return fault{code: "INTERNAL", outcome: registry.OutcomeUncertain, effect: effect}
	case 3:
		return fault{code: "ABORTED", outcome: registry.OutcomeUncertain, effect: effect}
	case 4:
		return fault{code: "UNAVAILABLE", outcome: registry.OutcomeUncertain, effect: effect, then: w.crash}
	case 5:
		return fault{then: w.crash} // done, and nobody heard
	case 6:
		return fault{then: func() { w.log.Lose(effect) }}
	case 7:
		return fault{code: "UNAVAILABLE", outcome: registry.OutcomeFailed} // never left
	}
	return fault{}
}

var (
	someVolume = rapid.SampledFrom([]registry.VolumeID{"one", "two"})
	someAlloc  = rapid.SampledFrom([]registry.AllocID{"a1", "a2", "a3"})
)

func (w *world) actions(t *rapid.T) map[string]func(*rapid.T) {
	usage := rapid.Custom(func(t *rapid.T) registry.Usage {
		u := shared()
		u.ReadOnly = rapid.Bool().Draw(t, "read-only")
		if rapid.IntRange(0, 3).Draw(t, "other flags") == 0 {
			u.MountFlags = "noatime"
		}
		return u
	})
	return map[string]func(*rapid.T){
		"up": func(t *rapid.T) {
			ctx := context.Background()
			w.wanted = rapid.SampledFrom([][]hooks.Part{nil, {{Path: "a"}},
				{{Path: "a"}, {Path: "b/c", ReadOnly: true}}}).Draw(t, "parts")
			at, err := w.up(ctx, someVolume.Draw(t, "volume"), someAlloc.Draw(t, "alloc"), usage.Draw(t, "usage"))
			if err == nil && !w.mounts[at.Host] {
				t.Fatalf("published at %s, where nothing is mounted", at.Host)
			}
			for _, p := range w.wanted {
				if err == nil && !w.partsOf(at.Host, p.Path) {
					t.Fatalf("%q of it is nowhere", p.Path)
				}
			}
		},
		"down": func(t *rapid.T) {
			_ = w.down(context.Background(), someVolume.Draw(t, "volume"), someAlloc.Draw(t, "alloc"))
		},
		"expand": func(t *rapid.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
			defer cancel()
			name := volumeOf(someVolume.Draw(t, "volume")).VolumeName()
			_, _ = w.mediator.Expand(ctx, registry.Call{}, name,
				registry.CapacityRange{Required: rapid.Int64Range(1, 9).Draw(t, "size")})
		},
		"a step out of order": func(t *rapid.T) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			id, a := someVolume.Draw(t, "volume"), someAlloc.Draw(t, "alloc")
			key, call, v := keyOf(id, a), intent.Caller{}, volumeOf(id)
			switch rapid.IntRange(0, 5).Draw(t, "step") {
			case 0:
				_ = w.mediator.Detach(ctx, call, key.Volume, "n1")
			case 1:
				_ = w.stager.Unstage(ctx, call, key.Volume)
			case 2:
				_, _ = w.stager.Publish(ctx, call, v, key, usage.Draw(t, "usage"))
			case 3:
				_ = w.stager.Stage(ctx, call, v, usage.Draw(t, "usage"))
			case 4:
				_ = w.mediator.Attach(ctx, call, v, usage.Draw(t, "usage"), w.here(v.VolumeKey(), "i-1"))
			case 5:
				_, _ = w.unclaim(ctx, key)
			}
		},
		"restart": func(t *rapid.T) {
			w.crash()
			w.reconcile(t)
		},
		"reboot": func(t *rapid.T) {
			w.reboot()
			w.crash()
			w.reconcile(t)
		},
		"another instance": func(t *rapid.T) {
			w.volumes.Task = rapid.SampledFrom([]string{"/csi", "/local/csi"}).Draw(t, "root")
		},
		"": func(t *rapid.T) { // after each
			if w.log.View(context.Background(), func(v registry.View) error { return nil }) != nil {
				t.Fatal("no view")
			}
			if _, err := w.log.Commit(context.Background(), func(registry.View) (registry.Change, error) {
				return registry.Change{}, nil
			}); err != nil {
				w.crash() // a log that lost a commit takes no more: the process starts over
			}
			w.invariants(t)
		},
	}
}

// patience is how long a step is tried: whatever the jitter, twice at a node and once at a controller, so that a story
// repeats itself. Time is the bubble's.
const patience = 270 * time.Millisecond

func (w *world) reconcile(t *rapid.T) {
	findings, err := w.reconciled(context.Background())
	if err != nil {
		t.Fatalf("reconcile: %v", err)
	}
	for _, f := range findings {
		if f.Kind == registry.FoundOrphan {
			t.Fatalf("a mount of ours is not known: %s", f)
		}
	}
}

// invariants compares what is recorded with what is there.
func (w *world) invariants(t *rapid.T) {
	w.view(func(v registry.View) {
		claimed := map[registry.VolumeKey]bool{}
		byKey := map[registry.ClaimKey]bool{}
		for _, c := range v.AllClaims() {
			claimed[c.Volume], byKey[c.ClaimKey()] = true, true
		}
		recorded := map[string]bool{}
		for _, r := range v.AllRefs() {
			recorded[r.Target.Host] = true
			for _, p := range r.Parts {
				recorded[p.At] = true
			}
			if !byKey[r.ClaimKey()] {
				t.Fatalf("published without a claim: %+v", r)
			}
		}
		for _, at := range v.AllAttachments() {
			if !claimed[at.Volume] {
				t.Fatalf("attached without a claim: %+v", at)
			}
		}
		for _, p := range v.Stagings() {
			recorded[p.Path.Host] = true
			if !claimed[p.Volume] {
				t.Fatalf("placed without a claim: %+v", p)
			}
		}
		for path := range w.mounts {
			if !recorded[path] {
				t.Fatalf("mounted without a record: %s", path)
			}
		}
	})
}

// settle lets everything end well, and expects nothing to be left.
func (w *world) settle(t *rapid.T) {
	w.fault = func(registry.RPC) fault { return fault{} }
	w.parts.fault = fineParts
	w.crash()
	w.reconcile(t)
	var last error
	for range 4 {
		last = nil
		for _, id := range []registry.VolumeID{"one", "two"} {
			for _, a := range []registry.AllocID{"a1", "a2", "a3"} {
				if err := w.down(context.Background(), id, a); err != nil {
					last = err
				}
			}
		}
	}
	if last != nil {
		t.Fatalf("cannot be taken down: %v", last)
	}
	for _, id := range []registry.VolumeID{"one", "two"} {
		w.usedAgain(t, id)
	}
	w.reconcile(t) // sweeps what refused calls left
	w.empty()
	w.noSecret()
}

// usedAgain uses a volume once more, and then nothing is pending: its node shows what its controller has made of it.
func (w *world) usedAgain(t *rapid.T, id registry.VolumeID) {
	if _, err := w.up(context.Background(), id, "a1", shared()); err != nil {
		t.Fatalf("cannot be used in the end: %v", err)
	}
	w.view(func(view registry.View) {
		v, _ := view.VolumeByKey(volumeOf(id).VolumeKey())
		if d := w.disk(v.External); v.Expansion.Pending() || w.grows && v.Expansion.Done > 0 && d.shown < v.Capacity {
			t.Fatalf("%s has %d bytes and its node shows %d: %+v", id, v.Capacity, d.shown, v.Expansion)
		}
	})
	if err := w.down(context.Background(), id, "a1"); err != nil {
		t.Fatalf("cannot be taken down after that: %v", err)
	}
}
