package host

import (
	"context"
	"time"
)

// pingsPerTimeout is how often the active shim is pinged within Config.AnswerTimeout.
const pingsPerTimeout = 10

// watchActive closes s.unresponsive once the active shim does not answer any more: it may be frozen or deadlocked.
func (s *supervisor) watchActive() {
	ctx, p, unresponsive := s.activeCtx, s.active, make(chan struct{})
	s.unresponsive = unresponsive
	s.background.Go(func() {
		if awaitSilence(ctx, p.ping, s.config.AnswerTimeout) {
			close(unresponsive)
		}
	})
}

// awaitAnswer extends the bake until the new shim answers. A shim that is silent when the bake is over may stay so: the
// watchdog then kills it while the old one still stands by.
func (s *supervisor) awaitAnswer() {
	ctx, p, answered := s.activeCtx, s.active, make(chan struct{})
	s.baking.answered = answered
	s.background.Go(func() {
		for ctx.Err() == nil {
			if pingOnce(ctx, p.ping, s.config.AnswerTimeout) == nil {
				close(answered)
				return
			}
			pauseBetweenPings(ctx, s.config.AnswerTimeout)
		}
	})
}

// awaitSilence returns true once there was no answer for the timeout, and false when ctx ends. One missed ping is not
// enough, as this process itself may have been stopped meanwhile.
func awaitSilence(ctx context.Context, ping func(context.Context) error, timeout time.Duration) bool {
	last, missed := time.Now(), 0
	for ctx.Err() == nil {
		err := pingOnce(ctx, ping, timeout)
		switch {
		case err == nil:
			last, missed = time.Now(), 0
		case missed > 0 && time.Since(last) >= timeout:
			return ctx.Err() == nil
		default:
			missed++
		}
		pauseBetweenPings(ctx, timeout)
	}
	return false
}

// pingOnce waits so long that two pings fit into the timeout.
func pingOnce(ctx context.Context, ping func(context.Context) error, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout/2)
	defer cancel()
	return ping(ctx)
}

func pauseBetweenPings(ctx context.Context, timeout time.Duration) {
	select {
	case <-time.After(timeout / pingsPerTimeout):
	case <-ctx.Done():
	}
}
