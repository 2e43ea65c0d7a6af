package main

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

// lines writes progress as lines of text or JSON objects, with the seconds since the start.
type lines struct {
	mu    sync.Mutex // lines are written as a whole
	out   io.Writer
	json  bool
	start time.Time
}

// line is a line as a JSON object.
type line struct {
	Seconds float64     `json:"seconds"`
	Text    string      `json:"text"`
	Event   *host.Event `json:"event,omitempty"`
	Note    *agent.Note `json:"note,omitempty"`
}

func newLines(out io.Writer, json bool) *lines {
	return &lines{out: out, json: json, start: time.Now()}
}

func (l *lines) print(format string, args ...any) { l.write(line{Text: fmt.Sprintf(format, args...)}) }

func (l *lines) write(s line) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.Seconds = time.Since(l.start).Round(time.Millisecond).Seconds()
	if l.json {
		writeJSONLine(l.out, s)
		return
	}
	fmt.Fprintf(l.out, "%6.2fs  %s\n", s.Seconds, clean(s.Text))
}

func (l *lines) warn(diags host.Diagnostics) {
	for _, d := range diags {
		if d.Severity == registry.SeverityWarning {
			l.print("%s", d)
		}
	}
}

func (l *lines) note(n agent.Note) error {
	l.write(line{Text: noteLine(n), Note: &n})
	return nil
}

// noteLine formats a note without its time.
func noteLine(n agent.Note) string {
	subject := "alloc " + short(n.Alloc)
	if n.Task != "" {
		subject = "task " + string(n.Task)
	}
	return subject + " of " + n.Job + n.Place + " " + n.Text
}

// event writes an event of the shim.
func (l *lines) event(e host.Event) error {
	switch e.Kind {
	case registry.EventResync, registry.EventBookmark:
		return nil
	}
	l.write(line{Text: e.Describe(), Event: &e})
	return nil
}

func short[T ~string](id T) string { return string(id[:min(shortID, len(id))]) }

// shortID is the length of the shortest beginning of an alloc's ID that the agent accepts.
const shortID = 8

// drainTimeout bounds the wait for past events at the end.
const drainTimeout = 30 * time.Second

// followEvents prints the events after the given number, each once and in order. The caller must call finish before ctx
// ends. finish prints the remaining past events.
func (o *foreground) followEvents(ctx context.Context, after host.Seq) (finish func() error) {
	print := func(ctx context.Context, past bool) error {
		return o.host.Watch(ctx, host.WatchOptions{After: after, Past: past}, func(e host.Event) error {
			after = e.Seq
			return o.lines.event(e)
		})
	}
	following, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { _ = print(following, false) })
	return func() error {
		stop()
		wg.Wait()
		limited, done := context.WithTimeout(ctx, drainTimeout)
		defer done()
		return print(limited, true)
	}
}
