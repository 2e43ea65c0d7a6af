package node

import (
	"errors"
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
				if err := n.tryDown("a1"); err == nil || !strings.Contains(err.Error(), `"a"`) ||
					!strings.Contains(err.Error(), "process 7") {
					t.Errorf("%v", err)
				}
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
			if err := n.tryUp("a1", withParts); !errors.Is(err, registry.ErrUncertain) {
				t.Errorf("%v", err)
			}
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
		if err := n.tryUp("a1", withParts); !errors.Is(err, registry.ErrConflict) {
			t.Errorf("%v", err)
		}
		n.wantParts("in use", "unmount")
		n.machine.failParts(nil)
		n.up("a1", withParts)
		n.wantParts("not in use", "unmount", "mount a true", "unmount", "mount b/c true")
	})
}

// Parts of block devices are refused. Parts are also refused if a mount without a record is in the way.
func TestPartsThatCannotBe(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		stray := layout.Part(claimOf("a1"), "b/c")
		n.machine.mountStray(stray)
		if err := n.tryUp("a1", withParts); !errors.Is(err, registry.ErrConflict) ||
			!strings.Contains(err.Error(), stray) {
			t.Errorf("a stray mount: %v", err)
		}
		n.down("a1")
		if !slices.Contains(n.machine.unknown(), stray) {
			t.Error("the stray mount is unmounted")
		}
		n.machine.unmount(stray)
		n.up("a1", wish{block: true})
		parts := []hooks.Part{{Path: "a"}}
		if _, err := n.shim.stager.MountParts(t.Context(), claimOf("a1"), parts); !errors.Is(err,
			registry.ErrInvalid) {
			t.Errorf("a block device: %v", err)
		}
		n.wantParts("refused")
	})
}
