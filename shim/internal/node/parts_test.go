package node_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

var both = []hooks.Part{{Path: "a"}, {Path: "b/c", ReadOnly: true}}

// recorded is the parts that are recorded for an alloc, with their marks.
func (w *world) recorded(a registry.AllocID) (texts []string) {
	w.view(func(v registry.View) {
		for _, r := range v.Refs(keyOf("one", a).Volume) {
			for _, p := range r.Parts {
				if r.Alloc == a && p.At == layout.Part(keyOf("one", a), p.Path) {
					texts = append(texts, strings.TrimSpace(p.Path+" "+string(p.Mark)))
				}
			}
		}
	})
	return texts
}

func (w *world) expectParts(want ...string) {
	if got := w.takeParts(); !slices.Equal(got, want) {
		w.errorf("of parts was done %q, want %q", got, want)
	}
}

// A part is recorded before it is mounted, doubted before it is unmounted, and unmounted before what it is a part of is
// unpublished. Once mounted it is mounted, however often it is asked for.
func TestPartsUpAndDown(t *testing.T) {
	w := open(t)
	w.wanted = both
	w.parts.before = func(what, _ string) {
		if got := w.recorded("a1"); !slices.Equal(got, []string{"a sent", "b/c sent"}) {
			t.Errorf("recorded before the %s: %q", what, got)
		}
	}
	w.mustUp("a1", shared())
	w.expectParts("mount a true", "mount b/c false")
	w.expect(attach, stage, publish)
	if got := w.recorded("a1"); !slices.Equal(got, []string{"a done", "b/c done"}) {
		t.Errorf("recorded: %q", got)
	}
	for _, restart := range []func(){func() {}, w.crash} {
		restart()
		w.mustUp("a1", shared())
		w.expectParts()
		w.expect()
	}
	at, err := w.stager.MountParts(t.Context(), keyOf("one", "a1"), both[1:])
	if want := layout.Part(keyOf("one", "a1"), "b/c"); err != nil || len(at) != 1 || at["b/c"] != want ||
		!w.mounts[want] {
		t.Errorf("%v, %v", at, err)
	}
	w.failNext(unpublish, lost)
	if err := w.down(t.Context(), "one", "a1"); err == nil || len(w.recorded("a1")) > 0 {
		t.Errorf("recorded: %q, %v", w.recorded("a1"), err)
	}
	w.expectParts("unmount a", "unmount b/c")
	w.mustDown("a1")
	w.expectParts()
	w.empty()
}

func TestReadOnlyVolumesGetNothingMade(t *testing.T) {
	w := open(t)
	w.wanted = both
	reader := shared()
	reader.ReadOnly = true
	w.mustUp("a1", reader)
	w.expectParts("mount a false", "mount b/c false")
}

// Nothing is unpublished while a part of it is used or hangs; when it is not any more, everything goes.
func TestUsedPartKeepsItsVolume(t *testing.T) {
	for _, kind := range []error{registry.ErrConflict, registry.ErrUncertain} {
		w := open(t)
		w.wanted = both
		w.mustUp("a1", shared())
		w.take()
		w.parts.fault = func(string) partFault {
			return partFault{err: registry.Errorf(kind, "process 7 works in it: %w", unix.EBUSY)}
		}
		for range 2 {
			err := w.down(t.Context(), "one", "a1")
			if !errors.Is(err, kind) || !strings.Contains(err.Error(), `"a"`) ||
				!strings.Contains(err.Error(), "process 7") {
				t.Errorf("%v", err)
			}
			w.crash()
		}
		w.expect()
		if got := w.recorded("a1"); len(got) != 2 {
			t.Errorf("recorded: %q", got)
		}
		w.parts.fault = fineParts
		w.mustDown("a1")
		w.expect(unpublish, unstage, detach)
		w.empty()
	}
}

// A part whose mount failed, or that a process has mounted and not recorded before it died, is mounted once by who
// comes after it.
func TestPartIsResumed(t *testing.T) {
	hung, all := registry.Errorf(registry.ErrUncertain, "it hangs"), []string{"mount a true", "mount b/c false"}
	for what, c := range map[string]struct {
		fault func(*world) partFault
		again []string
	}{
		"refused": {func(*world) partFault { return partFault{err: hung} }, all},
		"uncertain, and mounted": {func(*world) partFault {
			return partFault{err: hung, effect: true}
		}, []string{"mount b/c false"}},
		"mounted, then the shim died": {func(w *world) partFault { return partFault{then: w.crash} }, nil},
		"died before":                 {func(w *world) partFault { return partFault{err: hung, then: w.crash} }, all},
	} {
		t.Run(what, func(t *testing.T) {
			w := open(t)
			w.wanted = both
			w.parts.fault = func(string) partFault { w.parts.fault = fineParts; return c.fault(w) }
			if _, err := w.up(context.Background(), "one", "a1", shared()); err == nil {
				t.Error("it succeeded")
			}
			w.takeParts()
			if _, err := w.reconciled(t.Context()); err != nil {
				t.Error(err)
			}
			w.mustUp("a1", shared())
			w.expectParts(c.again...)
			w.mustDown("a1")
			w.empty()
		})
	}
}

// A part of a mount that is gone is none: with the new one it is mounted anew, unless somebody still uses the old one.
func TestPartFollowsItsVolume(t *testing.T) {
	w := open(t)
	w.wanted = both
	at := w.mustUp("a1", shared())
	w.takeParts()
	delete(w.mounts, at.Host) // its server has died, and somebody has unmounted it
	w.mustUp("a1", shared())
	w.expectParts("unmount a", "mount a true", "unmount b/c", "mount b/c false")
	delete(w.mounts, at.Host)
	w.parts.fault = func(what string) partFault {
		return partFault{err: registry.Errorf(registry.ErrConflict, "process 7")}
	}
	if _, err := w.up(t.Context(), "one", "a1", shared()); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("%v", err)
	}
	w.expectParts("unmount a")
	w.parts.fault = fineParts
	w.mustUp("a1", shared())
	w.takeParts()
	w.reboot()
	w.crash()
	w.mustUp("a1", shared())
	w.expectParts("mount a true", "mount b/c false")
	w.mustDown("a1")
	w.empty()
}

// What is mounted where no record knows a part is not taken for one.
func TestStrangePartIsNotTakenOver(t *testing.T) {
	w := open(t)
	w.wanted = both
	strange := layout.Part(keyOf("one", "a1"), "b/c")
	w.mounts[strange] = true
	if _, err := w.up(t.Context(), "one", "a1", shared()); !errors.Is(err, registry.ErrConflict) ||
		!strings.Contains(err.Error(), strange) {
		t.Errorf("%v", err)
	}
	w.expectParts()
	w.mustDown("a1")
	if !w.mounts[strange] {
		t.Error("it was unmounted")
	}
}

func TestPartsThatCannotBe(t *testing.T) {
	w := open(t)
	key := keyOf("one", "a1")
	if _, err := w.stager.MountParts(t.Context(), key, both); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("of what is not published: %v", err)
	}
	w.mustUp("a1", shared())
	w.failNext(unpublish, lost)
	_ = w.stager.Unpublish(t.Context(), intent.Caller{}, key)
	if _, err := w.stager.MountParts(t.Context(), key, both); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("of what may not be published any more: %v", err)
	}
	w.mustDown("a1")
	block := shared()
	block.Attachment = registry.BlockDevice
	w.wanted = both
	if _, err := w.up(t.Context(), "one", "a1", block); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("of a block device: %v", err)
	}
	w.mustDown("a1")
	w.stager = w.newStager(w.plugin, w.machine, vault{})
	w.stager.Parts = nil
	if _, err := w.stager.MountParts(t.Context(), key, both); !errors.Is(err, registry.ErrUnsupported) {
		t.Errorf("where nobody can: %v", err)
	}
	if at, err := w.stager.MountParts(t.Context(), key, nil); err != nil || at != nil {
		t.Errorf("of none: %v, %v", at, err)
	}
	w.expectParts()
}
