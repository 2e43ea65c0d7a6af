// Package statuspage is the status page of an agent: plugins, volumes, jobs, events and swaps in a browser. It changes
// nothing, and shows nothing that the commands of holdfast do not show. The page is complete without JavaScript.
package statuspage

import (
	"bytes"
	"context"
	"fmt"
	"html/template"
	"slices"
	"strings"
	"time"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/registry"
)

const (
	eventsShown = 50
	eventsPast  = 1000 // commits to look back for events when the agent starts
)

// followEvents stores the last events.
func (s *Server) followEvents(ctx context.Context) {
	o := host.WatchOptions{}
	if st, err := s.sources.Status(ctx); err == nil {
		o.After = st.Index - min(st.Index, eventsPast)
	}
	err := s.sources.Watch(ctx, o, func(e host.Event) error {
		if e.Kind != host.EventResync {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.events = append([]host.Event{e}, s.events[:min(len(s.events), eventsShown-1)]...)
		}
		return nil
	})
	if ctx.Err() == nil {
		s.log.Error("the status page receives no more events", "error", err)
	}
}

// page has the values for the template.
type page struct {
	control.Overview
	Events []host.Event // newest first
	Usage  map[host.VolumeName][]host.VolumeUsage
}

var pageTemplate = template.Must(template.New("page.html").Funcs(template.FuncMap{
	"utc": display.UTC, "size": display.Size, "tone": tone, "usage": describeUsage, "facts": facts,
	"ago":     func(t time.Time) string { return display.Ago(time.Since(t)) },
	"rfc3339": func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
	"span":    func(t time.Time) string { return display.Span(time.Since(t)) },
	"hold":    func(d time.Duration) string { return d.Round(time.Millisecond / 10).String() },
	"short":   func(v any) string { text := fmt.Sprint(v); return text[:min(8, len(text))] },
}).ParseFS(assets, "assets/page.html"))

// render returns the page, even if its browser has left: others share it. It escapes control characters, as on a
// terminal.
func (s *Server) render(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), renderLimit)
	defer cancel()
	p := page{Overview: s.sources.Overview(ctx), Usage: s.sources.Usage()}
	s.mu.Lock()
	p.Events = s.events
	s.mu.Unlock()
	var text bytes.Buffer
	err := pageTemplate.Execute(display.NewWriter(&text), p)
	return text.Bytes(), err
}

// tones maps states to classes of the stylesheet. A state is always shown as a word too.
var tones = map[string]string{}

func init() {
	for class, states := range map[string][]any{
		"good": {"healthy", "serving", agent.AllocRunning, agent.AllocComplete, registry.VolumeReady,
			host.SwapCommitted},
		"busy": {"partly healthy", "waiting", agent.AllocPending, agent.AllocStopping, agent.AllocReleasing,
			registry.VolumeCreating, registry.VolumeDeleting, host.SwapBaking, control.NoticePending},
		"bad": {"not healthy", "not serving", "almost full", host.Unhealthy, agent.AllocFailed,
			registry.VolumeUncertain, host.SwapRefused, host.SwapRolledBack, control.NoticeTrouble,
			control.NoticeUnhealthy},
	} {
		for _, s := range states {
			tones[fmt.Sprint(s)] = class
		}
	}
}

func tone(state any) string { return tones[fmt.Sprint(state)] }

// Health sums up the health of a plugin in one word.
func (page) Health(p control.Plugin) string {
	healthy, expected := 0, 0
	for _, r := range p.Roles {
		healthy, expected = healthy+min(r.Healthy, r.Expected), expected+r.Expected
	}
	switch {
	case len(p.Instances)+len(p.Tasks) == 0:
		return "not running"
	case healthy == 0:
		return "not healthy"
	case healthy < expected:
		return "partly healthy"
	}
	return "healthy"
}

// Summary returns one line that changes only if a count changes. Screen readers then read it aloud.
func (p page) Summary() string {
	healthy, waiting, troubled := 0, 0, 0
	for _, plugin := range p.Plugins {
		if p.Health(plugin) == "healthy" {
			healthy++
		}
	}
	for _, v := range p.Volumes {
		waits := func(n control.Notice) bool { return n.Kind == control.NoticeWaiting }
		if slices.ContainsFunc(v.Notices, waits) {
			waiting++
		}
		if slices.ContainsFunc(v.Notices, func(n control.Notice) bool { return !waits(n) }) {
			troubled++
		}
	}
	running, failed := 0, 0
	for _, j := range p.Jobs {
		switch j.Status {
		case agent.AllocRunning:
			running++
		case agent.AllocFailed:
			failed++
		}
	}
	parts := []string{fmt.Sprintf("%d of %d plugins healthy", healthy, len(p.Plugins)),
		count(len(p.Volumes), "volume", ""), fmt.Sprintf("%d of %d jobs running", running, len(p.Jobs))}
	for _, c := range []struct {
		n            int
		noun, suffix string
	}{{failed, "job", " failed"}, {waiting, "volume", " waited for"}, {troubled, "volume", " with a problem"}} {
		if c.n > 0 {
			parts = append(parts, count(c.n, c.noun, c.suffix))
		}
	}
	return strings.Join(parts, ", ")
}

// count formats a number with what it counts, such as "2 volumes with a problem".
func count(n int, noun, suffix string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s%s", n, noun, suffix)
}

// facts returns the facts of a notice that are not in its summary: the waiting alloc, the time, and the plugin's
// message.
func facts(n control.Notice) []control.Fact {
	return slices.DeleteFunc(slices.Clone(n.Facts), func(f control.Fact) bool {
		return !slices.Contains([]string{"Alloc", "Since", "Found", "Reported", "Plugin error", "Attempts"}, f.Name)
	})
}

// User names the holder of a volume.
func (page) User(h control.Holder) string {
	switch {
	case len(h.Engines) > 0:
		return "containers of " + h.EngineNames()
	case h.Job != "":
		return "job " + h.Job
	}
	return "alloc " + string(h.Alloc)
}

// usage is the usage of a volume in one unit.
type usage struct {
	Used, Total, Low, High int64 // High: Used from which the volume is almost full
	Text                   string
	Full                   bool // almost full
	Bar                    bool // draw a bar
}

// describeUsage returns the usage in each unit. It leaves out values that the plugin did not report, as for block
// devices, and repeated units.
func describeUsage(list []host.VolumeUsage) (out []usage) {
	seen := map[string]bool{}
	for _, u := range list {
		if seen[u.Unit] || u.Total <= 0 || u.Used == 0 && u.Available == 0 {
			continue
		}
		seen[u.Unit] = true
		amount := func(n int64) string { return fmt.Sprint(n) }
		of := u.Unit
		if u.Unit == "bytes" {
			amount, of = display.Bytes, "used"
		}
		percent := 100 * float64(u.Used) / float64(u.Total)
		out = append(out, usage{
			Used: u.Used, Total: u.Total, Low: u.Total / 10 * 8, High: u.Total / 10 * 9, Full: percent >= 90,
			Bar:  u.Unit == "bytes",
			Text: fmt.Sprintf("%s of %s %s (%.0f%%)", amount(u.Used), amount(u.Total), of, percent),
		})
	}
	return out
}
