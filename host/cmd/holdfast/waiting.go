package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
)

// waitInterval is the time between two lines about a wait if the output is no terminal.
const waitInterval = 10 * time.Second

// waitLine is a line about a wait as a JSON object.
type waitLine struct {
	Waiting string  `json:"waiting"`
	Seconds float64 `json:"seconds"` // since the wait began
}

// waiter shows what a command waits for. On a terminal it uses the last line, else it prints a line at intervals.
type waiter struct {
	to   io.Writer
	json bool
	last time.Time // time of the last line
}

// report shows what the command has been waiting for, and since when. An empty text ends the wait.
func (w *waiter) report(text string, since time.Time) {
	waited, line := now().Sub(since), ""
	if text != "" {
		line = fmt.Sprintf("waited %s so far: %s", display.Span(waited), clean(text))
	}
	switch {
	case display.CanReplace(w.to) && !w.json:
		display.Replace(w.to, line)
	case text == "" || now().Sub(w.last) < waitInterval:
	case w.json:
		w.last = now()
		writeJSONLine(w.to, waitLine{text, waited.Round(time.Second).Seconds()})
	default:
		w.last = now()
		fmt.Fprintln(w.to, line)
	}
}

// Limits for an agent that has ended.
const (
	retryInterval = 200 * time.Millisecond // between requests to it
	restartLimit  = time.Minute            // in which it must start again
	noAgentLimit  = 10 * time.Second       // a request without an agent fails sooner
)

// acrossRestarts calls wait, which must change nothing. If the agent is restarted meanwhile, it calls wait again.
func acrossRestarts[T any](ctx context.Context, client *control.Client, wait func() (T, error)) (v T, err error) {
	defer client.Report("", time.Time{})
	var gone time.Time // since when no agent answers
	absent := false    // the last request found no agent
	for {
		began := time.Now()
		v, err = wait()
		if !errors.Is(err, control.ErrNoAgent) && !errors.Is(err, host.ErrUnavailable) {
			return v, err
		}
		took, wasAbsent := time.Since(began), absent
		absent = errors.Is(err, control.ErrNoAgent)
		// An agent whose shim does not answer may also take this long. It answers so again and again.
		hadAgent := took > restartLimit || took > noAgentLimit && (absent || wasAbsent)
		if gone.IsZero() || hadAgent {
			gone = time.Now()
		}
		if time.Since(gone) > restartLimit {
			return v, err
		}
		client.Report("the agent has ended and has not started again yet", gone)
		select {
		case <-time.After(retryInterval):
		case <-ctx.Done():
			return v, context.Cause(ctx)
		}
	}
}

// every calls do at each interval until stop is called. stop waits for the last call.
func every(ctx context.Context, interval time.Duration, do func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				do(ctx)
			case <-ctx.Done():
				return
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}
