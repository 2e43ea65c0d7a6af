package benchswap

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"holdfast/host"
)

// spread is how a set of times is spread.
type spread struct {
	n                  int
	p50, p90, p99, max time.Duration
}

func spreadOf(all []time.Duration) spread {
	if len(all) == 0 {
		return spread{}
	}
	all = slices.Sorted(slices.Values(all))
	at := func(part float64) time.Duration { return all[int(part*float64(len(all)-1))] }
	return spread{len(all), at(0.5), at(0.9), at(0.99), all[len(all)-1]}
}

// limit is what is aimed at; 0: nothing.
type limit struct{ p50, p99, max time.Duration }

// figure is a row of the report.
type figure struct {
	what string
	spread
	aim limit
}

// missed says what of the limit is not kept.
func (f figure) missed() (list []string) {
	for _, l := range []struct {
		name       string
		is, atMost time.Duration
	}{{"p50", f.p50, f.aim.p50}, {"p99", f.p99, f.aim.p99}, {"max", f.max, f.aim.max}} {
		if l.atMost > 0 && l.is > l.atMost {
			list = append(list, fmt.Sprintf("%s %s, at most %s is aimed at", l.name, ms(l.is), ms(l.atMost)))
		}
	}
	return list
}

func (l limit) String() string {
	var parts []string
	for _, p := range []struct {
		name string
		d    time.Duration
	}{{"p50", l.p50}, {"p99", l.p99}, {"max", l.max}} {
		if p.d > 0 {
			parts = append(parts, fmt.Sprintf("%s %s", p.name, ms(p.d)))
		}
	}
	return strings.Join(parts, ", ")
}

func ms(d time.Duration) string {
	switch v := float64(d) / float64(time.Millisecond); {
	case v >= 100:
		return fmt.Sprintf("%.0f ms", v)
	default:
		return fmt.Sprintf("%.1f ms", v)
	}
}

// report is what a run came to, as it stands in docs/benchmarks.md.
type report struct {
	facts   []string
	figures []figure
}

func (r *report) fact(format string, args ...any) {
	r.facts = append(r.facts, fmt.Sprintf(format, args...))
}

func (r *report) add(what string, all []time.Duration, l limit) {
	r.figures = append(r.figures, figure{what, spreadOf(all), l})
}

func (r *report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", machine())
	for _, f := range r.facts {
		fmt.Fprintf(&b, "- %s\n", f)
	}
	b.WriteString("\n| | n | p50 | p90 | p99 | max | aimed at |\n|---|---|---|---|---|---|---|\n")
	var missed []string
	for _, f := range r.figures {
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %s | %s | %s |\n", f.what, f.n, ms(f.p50), ms(f.p90), ms(f.p99),
			ms(f.max), f.aim)
		for _, m := range f.missed() {
			missed = append(missed, fmt.Sprintf("- missed: %s: %s\n", f.what, m))
		}
	}
	b.WriteString("\n")
	if len(missed) == 0 {
		missed = []string{"- no target is missed\n"}
	}
	b.WriteString(strings.Join(missed, ""))
	return b.String()
}

// machine is what the figures were measured on.
func machine() string {
	kernel, _ := exec.Command("uname", "-sr").Output()
	model := "unknown processor"
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, is := strings.CutPrefix(line, "model name"); is {
			model = strings.TrimLeft(strings.TrimSpace(name), ": ")
			break
		}
	}
	load, _ := os.ReadFile("/proc/loadavg")
	return fmt.Sprintf("%s, %d of %s, %s, load average at the end %s", strings.TrimSpace(string(kernel)),
		runtime.NumCPU(), model, runtime.Version(),
		strings.Join(strings.Fields(string(load))[:3], " "))
}

// window is the time in which a swap held calls.
type window struct{ from, to time.Time }

func (w window) overlaps(from, to time.Time) bool { return from.Before(w.to) && to.After(w.from) }

// windows are those of swaps, in their order.
type windows []window

// at is the window that overlaps a time.
func (ws windows) at(from, to time.Time) (int, bool) {
	i, _ := slices.BinarySearchFunc(ws, from, func(w window, t time.Time) int { return w.to.Compare(t) })
	if i < len(ws) && ws[i].overlaps(from, to) {
		return i, true
	}
	return i, false
}

// medians are those of each sort of call, in calls that no swap was near.
type medians map[sort]time.Duration

// sorted tells calls apart.
type sorted struct {
	// how much longer a call took than usual that would have been made while calls were held
	held    []time.Duration
	longest []time.Duration          // the longest such of each window
	anyway  []time.Duration          // how much longer than usual the same calls took while no swap was under way
	reads   []time.Duration          // of reads in windows
	quiet   map[bool][]time.Duration // of calls while no swap was under way, by whether they read
	during  map[bool][]time.Duration // of calls while a swap was under way and held nothing
}

// tell sorts calls by the windows in which calls were held, and by those of whole swaps.
func tell(calls []call, holds, swaps windows) sorted {
	out := sorted{quiet: map[bool][]time.Duration{}, during: map[bool][]time.Duration{}}
	usual := usually(calls, swaps)
	longest := map[int]time.Duration{}
	for _, c := range calls {
		if i, in := holds.at(c.began, c.began.Add(usual[c.sort])); in {
			if reading[c.sort] {
				out.reads = append(out.reads, c.took)
				continue
			}
			extra := max(0, c.took-usual[c.sort])
			out.held = append(out.held, extra)
			longest[i] = max(longest[i], extra)
			continue
		}
		of := out.quiet
		if _, in := swaps.at(c.began, c.ended()); in {
			of = out.during
		} else if !reading[c.sort] {
			out.anyway = append(out.anyway, max(0, c.took-usual[c.sort]))
		}
		of[reading[c.sort]] = append(of[reading[c.sort]], c.took)
	}
	out.longest = slices.Collect(maps.Values(longest))
	return out
}

func usually(calls []call, swaps windows) medians {
	by := map[sort][]time.Duration{}
	for _, c := range calls {
		if _, in := swaps.at(c.began, c.ended()); !in {
			by[c.sort] = append(by[c.sort], c.took)
		}
	}
	out := medians{}
	for s, all := range by {
		out[s] = spreadOf(all).p50
	}
	return out
}

// coincidence compares how often slow writes fall into windows with how often they fall elsewhere.
func coincidence(strokes []stroke, ws windows) string {
	slices.SortFunc(strokes, func(a, b stroke) int { return cmp.Compare(a.Took, b.Took) })
	slow := strokes[len(strokes)-max(1, len(strokes)/1000):]
	in, writes := 0, 0
	for _, s := range strokes {
		if _, is := ws.at(s.At, s.At.Add(s.Took)); is {
			writes++
		}
	}
	for _, s := range slow {
		if _, is := ws.at(s.At, s.At.Add(s.Took)); is {
			in++
		}
	}
	return fmt.Sprintf("of its %d slowest writes (0.1 %%, %s and more) %d fall into the time in which calls are held; as many as of all writes would be %.1f",
		len(slow), ms(slow[0].Took), in, float64(len(slow))*float64(writes)/float64(len(strokes)))
}

// steps are the times of each step over all swaps.
func (r *report) steps(all []host.SwapReport) {
	by := map[host.SwapStep][]time.Duration{}
	for _, s := range all {
		for _, step := range s.Steps {
			by[step.Step] = append(by[step.Step], step.Took)
		}
	}
	for _, step := range []host.SwapStep{host.SwapVerify, host.SwapPrepare, host.SwapQuiesce, host.SwapFence,
		host.SwapActivate, host.SwapResume} {
		r.add("step "+string(step), by[step], limit{})
	}
}
