package host

import (
	"context"
	"sync"
	"time"
)

// A swap is in no hurry. What it holds up, and what it cuts off, is least where few calls are under way: so it waits for such a moment, a little
// while, and wants less of one the longer it has waited.
const (
	lullYoung = 100 * time.Millisecond // a call under way for longer may take any time: it says nothing of the moment
	lullStep  = 100 * time.Millisecond // after each one call more is put up with
	lullMost  = 500 * time.Millisecond
	lullLook  = time.Millisecond
)

// traffic is the calls under way that change something, and when each began.
type traffic struct {
	mu    sync.Mutex // guards under; held for no longer than a look-up
	under map[*time.Time]bool
}

// begins counts a call until its end.
func (t *traffic) begins() (ends func()) {
	began := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.under == nil {
		t.under = map[*time.Time]bool{}
	}
	t.under[&began] = true
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.under, &began)
	}
}

// young is how many calls have begun a short while ago.
func (t *traffic) young() (calls int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for began := range t.under {
		if time.Since(*began) < lullYoung {
			calls++
		}
	}
	return calls
}

// lull returns at a moment in which few calls are under way, or after lullMost, or when ctx ends.
func (t *traffic) lull(ctx context.Context) {
	for began := time.Now(); ; {
		waited := time.Since(began)
		if waited >= lullMost || t.young() <= int(waited/lullStep) {
			return
		}
		select {
		case <-time.After(lullLook):
		case <-ctx.Done():
			return
		}
	}
}
