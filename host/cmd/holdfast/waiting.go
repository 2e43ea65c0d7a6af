package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"holdfast/internal/display"
)

// waitInterval is the time between two lines about a wait where there is no terminal.
const waitInterval = 10 * time.Second

// waitLine is a line about a wait as a JSON object.
type waitLine struct {
	Waiting string  `json:"waiting"`
	Seconds float64 `json:"seconds"` // since the wait began
}

// waiter shows what a command waits for: on a terminal in its last line, else as a line now and then.
type waiter struct {
	to   io.Writer
	json bool
	last time.Time // of the last line
}

// report shows what the command has waited for since a time. An empty text ends the wait.
func (w *waiter) report(text string, since time.Time) {
	waited, line := now().Sub(since), ""
	if text != "" {
		line = fmt.Sprintf("waiting for %s: %s", display.Span(waited), clean(text))
	}
	switch {
	case display.Columns(w.to) > 0 && !w.json:
		display.Replace(w.to, line)
	case text == "" || now().Sub(w.last) < waitInterval:
	case w.json:
		w.last = now()
		e := json.NewEncoder(w.to)
		e.SetEscapeHTML(false)
		_ = e.Encode(waitLine{text, waited.Round(time.Second).Seconds()})
	default:
		w.last = now()
		fmt.Fprintln(w.to, line)
	}
}

// every calls do in each interval until stop is called, which waits for the last call.
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
