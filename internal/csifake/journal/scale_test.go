package journal

import (
	"fmt"
	"testing"
	"time"
)

// long are kinds of journals that grow, each to about n lines.
var long = map[string]func(n int) []Line{
	"one volume, ever new targets": func(n int) []Line {
		s := tell().knows().ok(create, attach, stage)
		for i := 0; len(s.lines) < n; i++ {
			to := func(l *Line) { l.Target = fmt.Sprint("/t/", i) }
			s.ok(with(publish, to), with(unpublish, to))
		}
		return s.ok(unstage, detach, remove).lines
	},
	"ever more volumes, and all deleted in the end": func(n int) []Line {
		s, made := tell().knows(), 0
		name := func(l *Line) { l.Name = fmt.Sprint("n", made) }
		id := func(l Line) Line {
			return with(l, func(l *Line) {
				l.Volume = fmt.Sprint("v", made)
				if l.Staging != "" {
					l.Staging = fmt.Sprint("/s/", made)
				}
				if l.Target != "" {
					l.Target = fmt.Sprint("/t/", made)
				}
			})
		}
		for ; len(s.lines) < n/2; made++ {
			s.call(with(create, name), "OK", &Answer{Volume: fmt.Sprint("v", made), VolumeContext: "vc"})
			s.ok(id(attach), id(stage), id(publish))
		}
		for made--; made >= 0; made-- {
			s.ok(id(unpublish), id(unstage), id(detach), id(remove))
		}
		return s.lines
	},
	"ever new processes that are killed in a call": func(n int) []Line {
		s := tell().knows().ok(create, attach)
		for i := 0; len(s.lines) < n; i++ {
			s.add(Line{Kind: Start, Run: s.run})
			s.call(stage, "", nil).at("a", fmt.Sprint("run", i))
		}
		return s.ok(stage, unstage, detach, remove).lines
	},
}

// TestLinear: ten times the lines take about ten times as long, not a hundred times; and 10^5 of them a few seconds.
func TestLinear(t *testing.T) {
	for name, grow := range long {
		few, many := grow(10_000), grow(100_000)
		short := fastest(t, few, 0)
		enough := max(min(40*short, 10*time.Second), time.Second)
		if whole := fastest(t, many, enough); whole > enough {
			t.Errorf("%s: %v for %d lines, %v for %d", name, short, len(few), whole, len(many))
		}
	}
}

// fastest of three times that a journal is judged, or the first that is fast enough. It breaks no rule.
func fastest(t *testing.T, lines []Line, enough time.Duration) time.Duration {
	t.Helper()
	best := time.Hour
	for range 3 {
		start := time.Now()
		if found := Check(lines, Options{Settled: true, Strict: true}); len(found) > 0 {
			t.Fatalf("%d violations, the first is %v", len(found), found[0])
		}
		if best = min(best, time.Since(start)); best <= enough {
			break
		}
	}
	return best
}

func BenchmarkCheck(b *testing.B) {
	for name, grow := range long {
		lines := grow(100_000)
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				Check(lines, Options{Settled: true, Strict: true})
			}
		})
	}
}
