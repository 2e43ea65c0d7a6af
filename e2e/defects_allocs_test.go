package e2e

import (
	"context"
	"errors"
	"testing"
	"time"

	"holdfast/internal/csifake"
)

// Who has no time at all gets an error and nothing else, whatever was asked for.
func TestDefectH9NoTimeIsAnError(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	w.use("alloc-1", ask{source: "vol", mode: manyWriters})
	before := len(w.sent())
	g := w.asking("alloc-2", ask{source: "vol", mode: manyWriters})
	past, end := context.WithDeadline(w.ctx(), time.Now())
	defer end()
	gone, leave := context.WithCancel(w.ctx())
	leave()
	for why, ctx := range map[error]context.Context{context.DeadlineExceeded: past, context.Canceled: gone} {
		if at, err := w.prepared(ctx, g); !errors.Is(err, why) || at != nil {
			t.Errorf("prepare: %v, %v", at, err)
		}
		if err := w.host.ReleaseAlloc(ctx, "alloc-1"); !errors.Is(err, why) {
			t.Errorf("release: %v", err)
		}
		if err := w.createWith(ctx, "other", ""); !errors.Is(err, why) {
			t.Errorf("create: %v", err)
		}
		if err := w.host.DeleteVolume(ctx, volumeName("vol")); !errors.Is(err, why) {
			t.Errorf("delete: %v", err)
		}
	}
	w.mustHaveSent(before)
	if held := w.claims(); len(held) != 1 || held["alloc-1"].Alloc != "alloc-1" {
		t.Errorf("claims: %v", held)
	}
	w.must(w.release("alloc-1"))
	w.must(w.delete("vol"))
	w.exit(p)
}
