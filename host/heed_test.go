package host

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// A shim is silent once nothing came for the whole time, and not because one answer was late, or whoever asks was stopped.
func TestSilence(t *testing.T) {
	const limit = 10 * time.Second
	for name, c := range map[string]struct {
		answers func(n int) bool // to the n-th question; else not before its time is up
		stopped int              // the question during which this process is stopped for an hour
		silent  bool
	}{
		"answers":               {answers: func(int) bool { return true }},
		"never answers":         {answers: func(int) bool { return false }, silent: true},
		"answers every other":   {answers: func(n int) bool { return n%2 == 0 }},
		"freezes after a while": {answers: func(n int) bool { return n < 20 }, silent: true},
		"this process stops":    {answers: func(int) bool { return true }, stopped: 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				life, end := context.WithTimeout(t.Context(), 2*time.Hour)
				defer end()
				n := 0
				began := time.Now()
				got := silent(life, func(ctx context.Context) error {
					if n++; n == c.stopped {
						time.Sleep(time.Hour)
						return ctx.Err()
					}
					if c.answers(n) {
						return nil
					}
					<-ctx.Done()
					return ctx.Err()
				}, limit)
				if took := time.Since(began); got != c.silent || got && took > time.Minute {
					t.Errorf("%v after %s", got, took)
				}
			})
		})
	}
}
