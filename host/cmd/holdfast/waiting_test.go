package main

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/host"
	"holdfast/host/agent/control"
)

// Without a terminal, a wait is reported at once and then every ten seconds.
func TestWaitsAreReportedAtIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		w := &waiter{to: &out}
		since := time.Now()
		for range 25 {
			time.Sleep(time.Second)
			w.report("volume disk\nis not created yet", since)
		}
		w.report("", since)
		want := "waited 1s so far: volume disk is not created yet\n" +
			"waited 11s so far: volume disk is not created yet\nwaited 21s so far: volume disk is not created yet\n"
		if out.String() != want {
			t.Errorf("%q, want %q", out.String(), want)
		}
	})
}

// A wait continues after restarts of the agent. It ends if the agent does not start again for a minute.
func TestWaitEndsIfTheAgentStaysAway(t *testing.T) {
	const half = restartLimit / 2
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			away []time.Duration // between these times, an agent waits for half a minute and ends
			want error
		}{{[]time.Duration{half}, nil}, {[]time.Duration{half, half, half}, nil},
			{[]time.Duration{2 * restartLimit}, control.ErrNoAgent}} {
			began, away := time.Now(), c.away
			_, err := acrossRestarts(t.Context(), control.NewClient(""), func() (struct{}, error) {
				if time.Since(began) < away[0] {
					return struct{}{}, control.ErrNoAgent
				}
				if away = away[1:]; len(away) == 0 {
					return struct{}{}, nil
				}
				time.Sleep(half)
				began = time.Now()
				return struct{}{}, control.ErrNoAgent
			})
			if waited := time.Since(began); !errors.Is(err, c.want) || waited > restartLimit+time.Second {
				t.Errorf("away for %v: %v after %v, want %v", c.away, err, waited, c.want)
			}
		}
	})
}

// The agent runs, but its shim does not: each request fails once it has waited for a shim. The wait ends all the same.
func TestWaitEndsIfTheShimStaysAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		_, err := acrossRestarts(t.Context(), control.NewClient(""), func() (struct{}, error) {
			time.Sleep(restartLimit / 2)
			if time.Since(began) > 5*restartLimit {
				return struct{}{}, nil
			}
			return struct{}{}, host.ErrUnavailable
		})
		if waited := time.Since(began); !errors.Is(err, host.ErrUnavailable) || waited > 2*restartLimit {
			t.Errorf("%v after %v", err, waited)
		}
	})
}
