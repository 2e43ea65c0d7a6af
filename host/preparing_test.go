package host

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"holdfast/registry"
)

// A release goes out only after the calls that it ends have ended: else one that is on its way could come to the shim after it, and before
// its own end does, and bring the alloc back.
func TestReleaseComesAfterWhatItEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p preparing
		first, firstDone := p.begin(t.Context(), "a")
		second, secondDone := p.begin(t.Context(), "a")
		other, otherDone := p.begin(t.Context(), "b")
		stopped := false
		go func() { p.stop(t.Context(), "a"); stopped = true }()
		for _, done := range []func(){firstDone, secondDone} {
			synctest.Wait()
			if stopped {
				t.Error("the release goes out while a call that it ends is under way")
			}
			done()
		}
		synctest.Wait()
		if !stopped || other.Err() != nil {
			t.Errorf("stopped %v; another alloc's: %v", stopped, other.Err())
		}
		for _, ctx := range []context.Context{first, second} {
			if !errors.Is(context.Cause(ctx), registry.ErrConflict) {
				t.Errorf("ended by %v", context.Cause(ctx))
			}
		}
		otherDone()
		p.stop(t.Context(), "b") // nothing is under way
	})
}

// It waits no longer than its caller does.
func TestReleaseWaitsNoLongerThanItsCaller(t *testing.T) {
	var p preparing
	_, done := p.begin(t.Context(), "a")
	defer done()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p.stop(ctx, "a")
}
