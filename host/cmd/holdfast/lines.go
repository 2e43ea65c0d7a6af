package main

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

type (
	hooksGroup = hooks.Group
	hooksTask  = hooks.Task
)

// lines writes progress for people, a line each, with the seconds since the begin.
type lines struct {
	mu    sync.Mutex // a line is written as a whole
	out   io.Writer
	begin time.Time
}

func newLines(out io.Writer) *lines { return &lines{out: out, begin: time.Now()} }

func (l *lines) say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.out, "%6.2fs  %s\n", time.Since(l.begin).Seconds(), fmt.Sprintf(format, args...))
}

func (l *lines) warn(diags host.Diagnostics) {
	for _, d := range diags {
		if d.Severity == registry.SeverityWarning {
			l.say("%s", d)
		}
	}
}

func (l *lines) note(n agent.Note) error {
	who := "alloc " + short(string(n.Alloc)) + " of " + n.Job
	if n.Task != "" {
		who = "task " + string(n.Task) + " of " + n.Job
	}
	l.say("%s %s", who, n.Text)
	return nil
}

// event says what the shim tells.
func (l *lines) event(e host.Event) error {
	switch e.Kind {
	case registry.EventResync, registry.EventBookmark:
		return nil
	}
	l.say("%s", eventLine(e))
	return nil
}

// eventLine is an event without its number.
func eventLine(e host.Event) string {
	s := ""
	switch {
	case e.Volume.ID != "":
		s = "volume " + e.Volume.String()
	case e.Plugin != "":
		s = "plugin " + string(e.Plugin)
	default:
		s = "alloc " + short(string(e.Alloc))
	}
	s += " " + strings.TrimPrefix(string(e.Kind), "volume ")
	if e.Role != "" {
		s += " as " + string(e.Role)
	}
	if e.Volume.ID != "" && e.Alloc != "" {
		s += " for alloc " + short(string(e.Alloc))
	}
	if e.Cause != "" {
		s += ": " + string(e.Cause)
	}
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

func short(id string) string { return id[:min(8, len(id))] }
