package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/internal/display"
)

type hostLogger = hclog.Logger

func writeJSON(to io.Writer, v any) error {
	e := json.NewEncoder(to)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// table writes rows in columns; the first row is the head.
type table struct{ rows [][]string }

func newTable(head ...string) *table { return &table{[][]string{head}} }

func (t *table) add(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = clean(fmt.Sprint(c))
		if row[i] == "" {
			row[i] = "-"
		}
	}
	t.rows = append(t.rows, row)
}

// clean keeps a cell on its line, with what a terminal would act on escaped: texts of plugins are data.
func clean(s string) string {
	return display.Escape(strings.NewReplacer("\r\n", " ", "\n", " ", "\t", " ").Replace(s))
}

// write writes the rows; if there are none but the head, it says so.
func (t *table) write(to io.Writer, none string) error {
	if len(t.rows) == 1 {
		_, err := fmt.Fprintln(to, none)
		return err
	}
	return sheetOf(to).columns(t.rows)
}

// facts writes names and values, one a line.
func facts(to io.Writer, pairs ...any) error {
	var rows [][]string
	for i := 0; i+1 < len(pairs); i += 2 {
		value := clean(fmt.Sprint(pairs[i+1]))
		if value == "" {
			value = "-"
		}
		rows = append(rows, []string{fmt.Sprint(pairs[i]), value})
	}
	return sheetOf(to).columns(rows)
}

// when is a time for people, in UTC.
func when(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02 15:04:05")
}

// size is a number of bytes for people; 0 is not known.
func size(bytes int64) string {
	unit, names := int64(1), []string{"KiB", "MiB", "GiB", "TiB", "PiB"}
	name := "B"
	for _, larger := range names {
		if bytes < unit<<10 {
			break
		}
		unit, name = unit<<10, larger
	}
	switch {
	case bytes <= 0:
		return ""
	case bytes%unit == 0:
		return fmt.Sprintf("%d %s", bytes/unit, name)
	}
	return fmt.Sprintf("%.2f %s", float64(bytes)/float64(unit), name)
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
