package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/registry"
)

func writeJSON(to io.Writer, v any) error {
	e := json.NewEncoder(to)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// writeJSONLine writes one object on one line, as part of a stream of lines.
func writeJSONLine(to io.Writer, v any) {
	e := json.NewEncoder(to)
	e.SetEscapeHTML(false)
	_ = e.Encode(v)
}

// table writes rows in columns. The first row is the heading.
type table struct{ rows [][]string }

func newTable(head ...string) *table { return &table{[][]string{head}} }

func (t *table) add(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = cmp.Or(clean(fmt.Sprint(c)), "-")
	}
	t.rows = append(t.rows, row)
}

// clean puts a text on one line and escapes control characters, because texts of plugins are untrusted.
func clean(s string) string {
	return display.Escape(strings.NewReplacer("\r\n", " ", "\n", " ", "\t", " ").Replace(s))
}

// write writes the rows. Without a row below the heading, it writes the text none instead. On a terminal, the last
// columns of a row are written below it if they do not fit.
func (t *table) write(to io.Writer, none string) error {
	if len(t.rows) == 1 {
		_, err := fmt.Fprintln(to, none)
		return err
	}
	width := display.Columns(to)
	if width == 0 {
		return columns(to, t.rows)
	}
	return t.fit(to, width)
}

// fit writes the rows in lines of at most width characters. Only single words may be longer.
func (t *table) fit(to io.Writer, width int) error {
	fitting, sum := 0, 0 // how many columns fit; the width so far
	for i := range t.rows[0] {
		widest := 0
		for _, row := range t.rows {
			widest = max(widest, utf8.RuneCountInString(row[i]))
		}
		if sum += widest; i > 0 && sum > width {
			break
		}
		fitting, sum = i+1, sum+2
	}
	upper := make([][]string, len(t.rows))
	for i, row := range t.rows {
		upper[i] = row[:fitting]
	}
	var text strings.Builder
	if err := columns(&text, upper); err != nil {
		return err
	}
	for i, line := range strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n") {
		fmt.Fprintln(to, line)
		var below []string
		for j := fitting; i > 0 && j < len(t.rows[i]); j++ {
			if cell := t.rows[i][j]; cell != "-" {
				below = append(below, strings.ToLower(t.rows[0][j])+": "+cell)
			}
		}
		if err := writeWrapped(to, strings.Join(below, "; "), "    ", width); err != nil {
			return err
		}
	}
	return nil
}

// writeWrapped writes text in lines of at most width characters, each beginning with indent.
func writeWrapped(to io.Writer, text, indent string, width int) error {
	line := ""
	for _, word := range append(strings.Fields(text), "") {
		if line != "" && (word == "" || utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width) {
			if _, err := fmt.Fprintln(to, line); err != nil {
				return err
			}
			line = ""
		}
		if line == "" {
			line = indent + word
		} else {
			line += " " + word
		}
	}
	return nil
}

// factList has names with their values, which are written one per line.
type factList [][]string

// add adds pairs of a name and a value. An empty value is written as -.
func (l *factList) add(pairs ...any) {
	for i := 0; i+1 < len(pairs); i += 2 {
		*l = append(*l, []string{fmt.Sprint(pairs[i]), cmp.Or(clean(fmt.Sprint(pairs[i+1])), "-")})
	}
}

// addKnown adds a name with its value, unless the value is empty.
func (l *factList) addKnown(name, value string) {
	if value != "" {
		l.add(name, value)
	}
}

// writeFacts writes pairs of a name and a value.
func writeFacts(to io.Writer, pairs ...any) error {
	var l factList
	l.add(pairs...)
	return columns(to, l)
}

// callText describes an open CSI call. It is empty without one.
func callText(call *registry.Intent) string {
	if call == nil {
		return ""
	}
	return fmt.Sprintf("%s, %s, try %d", call.RPC, call.Outcome, call.Attempt)
}

// columns aligns rows in columns.
func columns(to io.Writer, rows [][]string) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.StripEscape)
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	return w.Flush()
}

// when formats a time with its age.
func when(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return display.UTC(t) + " (" + age(t) + ")"
}

// now is the clock for relative times. Tests replace it.
var now = time.Now

// age formats a time relative to now, for tables.
func age(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return display.Ago(now().Sub(t))
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// writeNotices writes each notice as a headline, its facts and advice. A command stands at the end of its line, so that
// it is easy to copy.
func writeNotices(to io.Writer, list []control.Notice) error {
	for _, n := range list {
		var rows [][]string
		advice := []control.Fact{{Name: "Meaning", Text: n.Meaning}, {Name: "Next", Text: n.Next}}
		for _, f := range slices.Concat(n.Facts, advice) {
			if text := strings.TrimSpace(clean(f.Text)); text != "" {
				rows = append(rows, []string{"  " + f.Name, text})
			}
		}
		name := "Commands"
		for _, c := range n.Commands {
			rows = append(rows, []string{"  " + name, c.Purpose + ":  " + clean(c.Line)})
			name = ""
		}
		fmt.Fprintf(to, "\n%s: %s\n", strings.ToUpper(string(n.Kind)), clean(n.Summary))
		if err := columns(to, rows); err != nil {
			return err
		}
	}
	return nil
}
