package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"holdfast/internal/display"
)

// sheet is where people read: how many columns it has, and what time it is there. Where programs may read as well, a row of a table stays
// on its line.
type sheet struct {
	io.Writer
	width    int
	now      time.Time
	terminal bool
}

// The columns of what is no terminal, and of one that is too narrow for tables.
const (
	usualWidth = 120
	leastWidth = 60
)

// sheetOf is the sheet that to is, or one around it.
func sheetOf(to io.Writer) *sheet {
	if s, is := to.(*sheet); is {
		return s
	}
	s := &sheet{Writer: to, width: usualWidth, now: time.Now()}
	if f, is := display.File(to); is {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			s.width, s.terminal = max(int(size.Col), leastWidth), true
		}
	}
	return s
}

// wrap breaks a text into lines of at most width characters. Words stay whole: people copy them.
func wrap(text string, width int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && length(line)+1+length(word) > width {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return append(lines, line)
}

func length(s string) int { return utf8.RuneCountInString(s) }

// gap is between two columns.
const gap = 2

// columns writes rows below each other. Where they are too long for a terminal, the widest columns wrap.
func (s *sheet) columns(rows [][]string) error {
	width := math.MaxInt32
	if s.terminal {
		width = s.width
	}
	widths := fit(rows, width)
	for _, row := range rows {
		cells := make([][]string, len(row))
		height := 1
		for i, text := range row {
			cells[i] = wrapped(text, widths[i])
			height = max(height, len(cells[i]))
		}
		for at := range height {
			var line strings.Builder
			for i, cell := range cells {
				text := ""
				if at < len(cell) {
					text = cell[at]
				}
				line.WriteString(text + strings.Repeat(" ", max(0, widths[i]-length(text)+gap)))
			}
			if _, err := fmt.Fprintln(s, strings.TrimRight(line.String(), " ")); err != nil {
				return err
			}
		}
	}
	return nil
}

// wrapped leaves alone what fits, blanks and all.
func wrapped(text string, width int) []string {
	if length(text) <= width {
		return []string{text}
	}
	return wrap(text, width)
}

// fit is the widths of columns, as wide as they want to be if that fits into width, else with the widest ones narrower, but no narrower
// than their longest word and a fair share.
func fit(rows [][]string, width int) []int {
	var wide, least []int
	for _, row := range rows {
		for i, text := range row {
			if i == len(wide) {
				wide, least = append(wide, 0), append(least, 0)
			}
			wide[i] = max(wide[i], length(text))
			for _, word := range strings.Fields(text) {
				least[i] = max(least[i], length(word))
			}
		}
	}
	over := -width - gap
	for _, w := range wide {
		over += w + gap
	}
	share := width / 4
	for range wide {
		widest := slices.Index(wide, slices.Max(wide))
		cut := min(over, wide[widest]-max(least[widest], min(share, wide[widest])))
		if cut <= 0 {
			break
		}
		wide[widest] -= cut
		over -= cut
	}
	return wide
}

// span is a duration for people: its two largest units.
func span(d time.Duration) string {
	d = d.Round(time.Second)
	day := 24 * time.Hour
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", max(0, d/time.Second))
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", d/time.Minute, d%time.Minute/time.Second)
	case d < day:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%dh", d/day, d%day/time.Hour)
}
