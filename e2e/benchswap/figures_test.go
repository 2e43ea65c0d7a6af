package benchswap

import (
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

// limits are targets; 0 means none.
type limits struct{ p50, p99, max time.Duration }

// figure is a row of the report.
type figure struct {
	name               string
	n                  int
	p50, p90, p99, max time.Duration
	target             limits
}

func newFigure(name string, all []time.Duration, target limits) figure {
	if len(all) == 0 {
		return figure{name: name, target: target}
	}
	all = slices.Sorted(slices.Values(all))
	at := func(part float64) time.Duration { return all[int(part*float64(len(all)-1))] }
	return figure{name, len(all), at(0.5), at(0.9), at(0.99), all[len(all)-1], target}
}

// targets returns the targets of the figure and those that it misses.
func (f figure) targets() (all, missed []string) {
	for _, l := range []struct {
		name       string
		is, atMost time.Duration
	}{{"p50", f.p50, f.target.p50}, {"p99", f.p99, f.target.p99}, {"max", f.max, f.target.max}} {
		if l.atMost > 0 {
			all = append(all, l.name+" "+ms(l.atMost))
		}
		if l.atMost > 0 && l.is > l.atMost {
			missed = append(missed, fmt.Sprintf("- missed: %s: %s is %s, target %s\n", f.name, l.name, ms(l.is),
				ms(l.atMost)))
		}
	}
	return all, missed
}

func ms(d time.Duration) string {
	v := float64(d) / float64(time.Millisecond)
	if v >= 100 {
		return fmt.Sprintf("%.0f ms", v)
	}
	return fmt.Sprintf("%.1f ms", v)
}

// report is the result of a run, as docs/benchmarks.md shows it.
type report struct {
	facts   []string
	figures []figure
}

func (r *report) fact(format string, args ...any) {
	r.facts = append(r.facts, fmt.Sprintf(format, args...))
}

func (r *report) add(name string, all []time.Duration, target limits) {
	r.figures = append(r.figures, newFigure(name, all, target))
}

func (r *report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", machine())
	for _, f := range r.facts {
		fmt.Fprintf(&b, "- %s\n", f)
	}
	b.WriteString("\n| | n | p50 | p90 | p99 | max | target |\n|---|---|---|---|---|---|---|\n")
	var missed []string
	for _, f := range r.figures {
		targets, not := f.targets()
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %s | %s | %s |\n", f.name, f.n, ms(f.p50), ms(f.p90), ms(f.p99),
			ms(f.max), strings.Join(targets, ", "))
		missed = append(missed, not...)
	}
	if len(missed) == 0 {
		missed = []string{"- no target is missed\n"}
	}
	return b.String() + "\n" + strings.Join(missed, "")
}

// machine describes where the figures were measured.
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
		runtime.NumCPU(), model, runtime.Version(), strings.Join(strings.Fields(string(load))[:3], " "))
}

// window is a time in which a swap held calls, or in which it was under way.
type window struct{ from, to time.Time }

// windows are in their order and do not overlap.
type windows []window

// at returns the first window that overlaps a time.
func (ws windows) at(from, to time.Time) (int, bool) {
	i, _ := slices.BinarySearchFunc(ws, from, func(w window, t time.Time) int { return w.to.Compare(t) })
	return i, i < len(ws) && from.Before(ws[i].to) && to.After(ws[i].from)
}

// durations are those of calls, by when they were made.
type durations struct {
	held    []time.Duration          // by how much calls that a swap held took longer than usual
	longest []time.Duration          // the longest of held of each swap
	control []time.Duration          // by how much the same calls took longer than usual without a swap
	reads   []time.Duration          // of reads while calls were held
	quiet   map[bool][]time.Duration // of calls without a swap, by whether they read
	during  map[bool][]time.Duration // of calls during a swap that held nothing
}

// newDurations sorts calls by the windows in which calls were held, and by those of whole swaps.
func newDurations(calls []call, holds, swaps windows) durations {
	d := durations{quiet: map[bool][]time.Duration{}, during: map[bool][]time.Duration{}}
	usual := medians(calls, swaps)
	longest := map[int]time.Duration{}
	for _, c := range calls {
		extra := max(0, c.took-usual[c.method])
		if i, in := holds.at(c.began, c.began.Add(usual[c.method])); in {
			if reads[c.method] {
				d.reads = append(d.reads, c.took)
				continue
			}
			d.held = append(d.held, extra)
			longest[i] = max(longest[i], extra)
			continue
		}
		of := d.quiet
		if _, in := swaps.at(c.began, c.ended()); in {
			of = d.during
		} else if !reads[c.method] {
			d.control = append(d.control, extra)
		}
		of[reads[c.method]] = append(of[reads[c.method]], c.took)
	}
	d.longest = slices.Collect(maps.Values(longest))
	return d
}

// medians returns how long calls of each method usually take without a swap.
func medians(calls []call, swaps windows) map[method]time.Duration {
	by := map[method][]time.Duration{}
	for _, c := range calls {
		if _, in := swaps.at(c.began, c.ended()); !in {
			by[c.method] = append(by[c.method], c.took)
		}
	}
	usual := map[method]time.Duration{}
	for m, all := range by {
		usual[m] = newFigure("", all, limits{}).p50
	}
	return usual
}

// addSteps adds how long each step took over all swaps.
func (r *report) addSteps(all []host.SwapReport) {
	by := map[host.SwapStep][]time.Duration{}
	for _, s := range all {
		for _, step := range s.Steps {
			by[step.Step] = append(by[step.Step], step.Took)
		}
	}
	for _, step := range []host.SwapStep{host.SwapVerify, host.SwapPrepare, host.SwapQuiesce, host.SwapFence,
		host.SwapActivate, host.SwapResume} {
		r.add("step "+string(step), by[step], limits{})
	}
}
