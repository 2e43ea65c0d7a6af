package host

import (
	"context"
	"time"
)

// askedWithin is how often an active shim is asked within AnswerTimeout.
const askedWithin = 10

// heed notices that the active shim gives no answer any more: it may be frozen, or its calls may wait for each other. What it did while another one
// was active does not count.
func (k *keeper) heed() {
	acting, sh, muted := k.acting, k.active, make(chan struct{})
	k.muted = muted
	k.asked.Go(func() {
		if silent(acting, sh.answers, k.config.AnswerTimeout) {
			close(muted)
		}
	})
}

// silent returns true once there was no answer for the time given, and false when life ends. A single late answer is not enough: it may be
// this process that was stopped.
func silent(life context.Context, ask func(context.Context) error, limit time.Duration) bool {
	last, missed := time.Now(), 0
	for life.Err() == nil {
		ctx, cancel := context.WithTimeout(life, limit/2)
		err := ask(ctx)
		cancel()
		switch {
		case err == nil:
			last, missed = time.Now(), 0
		case missed > 0 && time.Since(last) >= limit:
			return life.Err() == nil
		default:
			missed++
		}
		select {
		case <-time.After(limit / askedWithin):
		case <-life.Done():
		}
	}
	return false
}
