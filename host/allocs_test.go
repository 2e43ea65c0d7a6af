package host

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"holdfast/registry"
)

// A PrepareAlloc call on its way could otherwise reach the shim after the release, and restore the alloc.
func TestReleaseFollowsThePreparesThatItEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var p prepareCalls
		first, firstDone := p.begin(t.Context(), "a")
		second, secondDone := p.begin(t.Context(), "a")
		other, otherDone := p.begin(t.Context(), "b")
		stopped := false
		go func() { p.stop(t.Context(), "a"); stopped = true }()
		for _, done := range []func(){firstDone, secondDone} {
			synctest.Wait()
			if stopped {
				t.Error("the release is sent while a call that it ends is under way")
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
