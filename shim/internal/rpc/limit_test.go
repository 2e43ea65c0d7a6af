package rpc

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A call whose caller sets no deadline ends all the same, and says so; one with a deadline of its own keeps it, also a
// longer one.
func TestEveryCallHasADeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ctx, cancel := withDeadline(t.Context())
		defer cancel()
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), context.DeadlineExceeded) || time.Since(began) != callLimit {
			t.Errorf("ended after %v with %v", time.Since(began), context.Cause(ctx))
		}
		own, cancelOwn := context.WithTimeout(t.Context(), 2*callLimit)
		defer cancelOwn()
		ctx, cancel = withDeadline(own)
		defer cancel()
		if ctx != own {
			t.Error("the caller's own deadline is replaced")
		}
	})
}
