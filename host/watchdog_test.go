package host

import (
	"context"
	"testing"
	"time"
)

// One late answer, or a stop of this process, does not make a shim unresponsive.
func TestUnresponsiveShimIsSilentForTheWholeTimeout(t *testing.T) {
	t.Parallel()
	const timeout = 10 * time.Second
	for name, c := range map[string]struct {
		answers func(n int) bool // to the n-th ping; else not before its time is up
		stopped int              // the ping during which this process is stopped for an hour
		silent  bool
	}{
		"answers":               {answers: func(int) bool { return true }},
		"never answers":         {answers: func(int) bool { return false }, silent: true},
		"answers every other":   {answers: func(n int) bool { return n%2 == 0 }},
		"freezes after a while": {answers: func(n int) bool { return n < 20 }, silent: true},
		"this process stops":    {answers: func(int) bool { return true }, stopped: 3},
	} {
		bubble(t, name, func(t *testing.T) {
			ctx, end := context.WithTimeout(t.Context(), 2*time.Hour)
			defer end()
			n := 0
			began := time.Now()
			got := awaitSilence(ctx, func(ctx context.Context) error {
				if n++; n == c.stopped {
					time.Sleep(time.Hour)
					return ctx.Err()
				}
				if c.answers(n) {
					return nil
				}
				<-ctx.Done()
				return ctx.Err()
			}, timeout)
			if took := time.Since(began); got != c.silent || got && took > time.Minute {
				t.Errorf("%v after %s", got, took)
			}
		})
	}
}
