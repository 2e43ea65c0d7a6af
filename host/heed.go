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

// prove has the bake go on until the new shim gives an answer. One that is mute when the time of the bake is over may be so for good: it is killed for
// that, if so, while the old one still stands by.
func (k *keeper) prove() {
	acting, sh, proven := k.acting, k.active, make(chan struct{})
	k.baking.proven = proven
	k.asked.Go(func() {
		if answered(acting, sh.answers, k.config.AnswerTimeout) {
			close(proven)
		}
	})
}

// answered returns true with the first answer, and false when life ends.
func answered(life context.Context, ask func(context.Context) error, limit time.Duration) bool {
	for life.Err() == nil {
		if asked(life, ask, limit) == nil {
			return true
		}
		rest(life, limit)
	}
	return false
}

// silent returns true once there was no answer for the time given, and false when life ends. A single late answer is not enough: it may be
// this process that was stopped.
func silent(life context.Context, ask func(context.Context) error, limit time.Duration) bool {
	last, missed := time.Now(), 0
	for life.Err() == nil {
		err := asked(life, ask, limit)
		switch {
		case err == nil:
			last, missed = time.Now(), 0
		case missed > 0 && time.Since(last) >= limit:
			return life.Err() == nil
		default:
			missed++
		}
		rest(life, limit)
	}
	return false
}

// asked asks once, for so long that two questions fit into limit.
func asked(life context.Context, ask func(context.Context) error, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(life, limit/2)
	defer cancel()
	return ask(ctx)
}

// rest waits before the next question.
func rest(life context.Context, limit time.Duration) {
	select {
	case <-time.After(limit / askedWithin):
	case <-life.Done():
	}
}
