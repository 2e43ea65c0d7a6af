package host

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestLull: a swap waits for a moment without a call, puts up with more of them the longer it waits, and does not wait for ever, nor for what takes
// long.
func TestLull(t *testing.T) {
	for what, c := range map[string]struct {
		calls int           // at once, all the time
		each  time.Duration // such a call
		until time.Duration // there are any
		waits time.Duration
	}{
		"nothing":             {0, 0, 0, 0},
		"until a pause":       {9, 20 * time.Millisecond, 40 * time.Millisecond, 40 * time.Millisecond},
		"one after the other": {1, 20 * time.Millisecond, time.Hour, lullStep},
		"a few":               {3, 20 * time.Millisecond, time.Hour, 3 * lullStep},
		"many":                {50, 20 * time.Millisecond, time.Hour, lullMost},
		"long ones":           {50, time.Minute, time.Minute, lullYoung},
	} {
		synctest.Test(t, func(t *testing.T) {
			var traffic traffic
			ctx, cancel := context.WithCancel(t.Context())
			began := time.Now()
			for range c.calls {
				go func() {
					for ctx.Err() == nil && time.Since(began) < c.until {
						ends := traffic.begins()
						time.Sleep(c.each)
						ends()
					}
				}()
			}
			time.Sleep(lullLook / 2) // no look is at the very moment in which one call ends and the next one begins
			looked := time.Now()
			traffic.lull(t.Context())
			if waited := time.Since(looked); waited < c.waits || waited > c.waits+20*time.Millisecond {
				t.Errorf("%s: it has waited for %v, and not %v", what, waited, c.waits)
			}
			cancel()
			traffic.lull(ctx)
			time.Sleep(2 * time.Minute)
			if left := traffic.young(); left != 0 || len(traffic.under) != 0 {
				t.Errorf("%s: %d calls are left", what, len(traffic.under))
			}
		})
	}
}
