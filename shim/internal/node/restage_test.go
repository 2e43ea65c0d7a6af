package node_test

import (
	"context"
	"testing"

	"holdfast/registry"
)

// A publish without a certain answer is undone before its volume is staged once more: while it is open, nothing else
// may be sent.
func TestOpenPublishIsUndoneBeforeItsStageIsRepeated(t *testing.T) {
	for what, gone := range map[string]func(*world){
		"nothing is mounted where it is staged": func(w *world) { w.mountsStaging = false },
		"the machine was started anew":          func(w *world) { w.reboot(); w.crash() },
		"and reconciled": func(w *world) {
			w.reboot()
			w.crash()
			if _, err := w.reconciled(context.Background()); err != nil {
				w.errorf("%v", err)
			}
		},
		"its staging mount is lost": func(w *world) { clear(w.mounts) },
	} {
		t.Run(what, func(t *testing.T) {
			w := open(t)
			if what == "nothing is mounted where it is staged" {
				gone(w)
			}
			w.failNext(publish, lost)
			if _, err := w.up(t.Context(), "one", "a1", shared()); err == nil {
				t.Fatal("the publish did not fail")
			}
			gone(w)
			w.take()
			w.mustUp("a1", shared())
			w.expect(unpublish, stage, publish)
			w.mustDown("a1")
			w.empty()
		})
	}
}

// Whoever else comes to the volume meets the same: the open publish is undone, not repeated on a stage that is gone.
func TestOpenPublishIsNotRepeatedWithoutItsStage(t *testing.T) {
	w := open(t)
	w.failNext(publish, lost)
	if _, err := w.up(t.Context(), "one", "a1", shared()); err == nil {
		t.Fatal("the publish did not fail")
	}
	clear(w.mounts)
	w.take()
	w.mustUp("a2", shared())
	w.expect(unpublish, stage, publish)
	for _, a := range []registry.AllocID{"a1", "a2"} {
		w.mustDown(a)
	}
	w.empty()
}
