package node

import (
	"slices"
	"strings"
	"testing"

	"holdfast/hooks"
	"holdfast/registry"
)

var withParts = wish{subPaths: []string{"a", "b/c"}}

// recordedParts returns the parts that are recorded for alloc a1, with their marks.
func (n *env) recordedParts() (parts []string) {
	n.view(func(v registry.View) {
		for _, r := range v.Refs(v0) {
			for _, p := range r.Parts {
				parts = append(parts, strings.TrimSpace(p.Path+" "+string(p.Mark)))
			}
		}
	})
	return parts
}

func (n *env) wantParts(when string, want ...string) {
	n.t.Helper()
	if got := n.machine.takeParts(); !slices.Equal(got, want) {
		n.t.Errorf("%s: %q, want %q", when, got, want)
	}
}

// A part is recorded before it is mounted, marked as uncertain before it is unmounted, and mounted only once. It is
// unmounted before its volume is unpublished.
func TestPartsUpAndDown(t *testing.T) {
	inEnv(t, stages, func(t *testing.T, n *env) {
		n.machine.failParts(func(what string) (error, bool) {
			if got := n.recordedParts(); !slices.Equal(got, []string{"a sent", "b/c sent"}) {
				t.Errorf("recorded before %s: %q", what, got)
			}
			return nil, false
		})
		n.up("a1", withParts)
		n.wantParts("up", "mount a true", "mount b/c true")
		if got := n.recordedParts(); !slices.Equal(got, []string{"a done", "b/c done"}) {
			t.Errorf("recorded: %q", got)
		}
		n.restart()
		plans, err := n.shim.allocs.Prepare(t.Context(), registry.Call{}, n.group("a1",
			wish{volumes: []int{0}, subPaths: withParts.subPaths}))
		want := hooks.Bind{Source: layout.Part(claimOf("a1"), "b/c"), Target: "/v0-b/c", Propagation: hooks.Private}
		if err != nil || !slices.Contains(plans["t"].Binds, want) {
			t.Errorf("plan %+v lacks %+v: %v", plans["t"], want, err)
		}
		n.wantParts("up again")
		n.down("a1")
		n.wantParts("down", "unmount", "unmount")
		n.machine.failParts(nil)
		n.up("a1", wish{options: "read_only = true", subPaths: []string{"a"}})
		n.wantParts("read-only", "mount a false")
	})
}

// A volume is not unpublished while a part of it is in use or hangs. Afterwards everything is released.
func TestUsedPartKeepsItsVolume(t *testing.T) {
	for _, kind := range []error{registry.ErrConflict, registry.ErrUncertain} {
		inEnv(t, stages, func(t *testing.T, n *env) {
			n.up("a1", withParts)
			n.rpcs()
			n.machine.failParts(func(string) (error, bool) {
				return registry.Errorf(kind, "process 7 works in it"), false
			})
			for range 2 {
				wantErr(t, n.tryDown("a1"), nil, `"a"`, "process 7")
				n.restart()
			}
			n.want("in use")
			n.machine.failParts(nil)
			n.down("a1")
			n.want("not in use", unpublish, unstage)
		})
	}
}

// If the mount of a part fails, the next Prepare mounts it. If the mount hangs, the part is not mounted twice.
func TestPartIsResumed(t *testing.T) {
	for effect, again := range map[bool][]string{false: {"mount a true", "mount b/c true"}, true: {"mount b/c true"}} {
		inEnv(t, "", func(t *testing.T, n *env) {
			n.machine.failParts(func(string) (error, bool) { return errPartHangs, effect })
			wantErr(t, n.tryUp("a1", withParts), registry.ErrUncertain)
			n.machine.takeParts()
			n.machine.failParts(nil)
			n.restart()
			n.up("a1", withParts)
			n.wantParts("again", again...)
		})
	}
}

// If a volume was mounted again, its parts are mounted again too, unless a part of the old mount is in use.
func TestPartFollowsItsVolume(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		n.up("a1", withParts)
		n.machine.takeParts()
		n.machine.unmount(targetOf("a1"))
		n.machine.failParts(func(string) (error, bool) {
			return registry.Errorf(registry.ErrConflict, "process 7"), false
		})
		wantErr(t, n.tryUp("a1", withParts), registry.ErrConflict)
		n.wantParts("in use", "unmount")
		n.machine.failParts(nil)
		n.up("a1", withParts)
		n.wantParts("not in use", "unmount", "mount a true", "unmount", "mount b/c true")
	})
}

// Parts of block devices are refused. Parts are also refused if a mount without a record is in the way.
func TestImpossiblePartsAreRefused(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		stray := layout.Part(claimOf("a1"), "b/c")
		n.machine.mountStray(stray)
		wantErr(t, n.tryUp("a1", withParts), registry.ErrConflict, stray)
		n.down("a1")
		if !slices.Contains(n.machine.unknown(), stray) {
			t.Error("the stray mount is unmounted")
		}
		n.machine.unmount(stray)
		n.up("a1", wish{block: true})
		parts := []hooks.Part{{Path: "a"}}
		wantErr(t, errOf(n.shim.stager.MountParts(t.Context(), claimOf("a1"), parts)), registry.ErrInvalid)
		n.wantParts("refused")
	})
}
