package launch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	hclog "github.com/hashicorp/go-hclog"

	"holdfast/internal/display"
)

const (
	maxLine       = 64 << 10 // bytes of one line that are read
	maxFields     = 64       // key-value pairs of one line
	tailLines     = 64       // lines kept for the error of a failed start
	tailLineBytes = 1 << 10  // bytes kept of each
	linesPerSec   = 2000     // that reach the logger on average
	bytesPerSec   = 4 << 20  // likewise
)

// logReader reads a shim's stderr and passes it to a logger. A line can have no effect but a log entry.
type logReader struct {
	log     hclog.Logger
	budget  budget
	dying   bool // a panic's trace has begun: the next lines are part of it
	skipped int  // lines over the budget, not reported yet

	mu   sync.Mutex // guards tail
	tail []string
}

func newLogReader(log hclog.Logger) *logReader { return &logReader{log: log} }

// run reads until the end of stderr. Only a logger that blocks makes it stop reading.
func (r *logReader) run(stderr io.Reader) {
	in := bufio.NewReaderSize(stderr, maxLine)
	for {
		line, cut, err := readBounded(in)
		if len(line) > 0 {
			r.take(line, cut)
		}
		if err != nil {
			r.reportSkipped()
			return
		}
	}
}

// readBounded returns the next line's beginning without its newline, and how many bytes of it were left out.
func readBounded(in *bufio.Reader) (line []byte, cut int, err error) {
	line, err = in.ReadSlice('\n')
	line = slices.Clone(line)
	for err == bufio.ErrBufferFull {
		var rest []byte
		rest, err = in.ReadSlice('\n')
		cut += len(rest)
	}
	return bytes.TrimRight(line, "\r\n"), cut, err
}

// take logs one line, of which cut more bytes were left out. If the budget is used up, it counts the line as skipped.
func (r *logReader) take(line []byte, cut int) {
	if !r.budget.take(len(line) + cut) {
		r.skipped++
		r.remember(printable(line[:min(len(line), tailLineBytes+1)])) // escaping more would be unbounded work
		return
	}
	text := printable(line)
	if cut > 0 {
		text += fmt.Sprintf(" [%d more bytes]", cut)
	}
	r.remember(text)
	r.reportSkipped()
	if entry, ok := parseEntry(line); ok && cut == 0 {
		r.log.Log(entry.level, entry.message, entry.fields...)
		return
	}
	r.dying = r.dying || strings.HasPrefix(text, "panic:") || strings.HasPrefix(text, "fatal error:")
	if r.dying {
		r.log.Error(text)
		return
	}
	r.log.Info(text)
}

func (r *logReader) reportSkipped() {
	if r.skipped > 0 {
		r.log.Warn("the shim writes too much to stderr, lines were dropped", "lines", r.skipped)
		r.skipped = 0
	}
}

func (r *logReader) remember(text string) {
	if len(text) > tailLineBytes {
		text = strings.ToValidUTF8(text[:tailLineBytes], "") + " [...]"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.tail) == tailLines {
		r.tail = slices.Delete(r.tail, 0, 1)
	}
	r.tail = append(r.tail, text)
}

// last returns the last lines, oldest first.
func (r *logReader) last() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.tail)
}

// logEntry is a line of hclog's JSON format.
type logEntry struct {
	level   hclog.Level
	message string
	fields  []any
}

// parseEntry parses a JSON object whose message is a string. All values become printable text.
func parseEntry(line []byte) (logEntry, bool) {
	if len(line) == 0 || line[0] != '{' {
		return logEntry{}, false
	}
	var raw map[string]json.RawMessage
	if json.Unmarshal(line, &raw) != nil {
		return logEntry{}, false
	}
	message, ok := asText(raw["@message"])
	if !ok {
		return logEntry{}, false
	}
	return logEntry{level: levelOf(raw["@level"]), message: message, fields: fieldsOf(raw)}, true
}

func levelOf(raw json.RawMessage) hclog.Level {
	name, _ := asText(raw)
	level := hclog.LevelFromString(name)
	if level < hclog.Trace || level > hclog.Error {
		return hclog.Info
	}
	return level
}

func fieldsOf(raw map[string]json.RawMessage) []any {
	var fields []any
	if module, ok := asText(raw["@module"]); ok {
		fields = append(fields, "module", module)
	}
	keys := make([]string, 0, len(raw))
	for key := range raw {
		if !strings.HasPrefix(key, "@") {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	for _, key := range keys[:min(len(keys), maxFields)] {
		value, ok := asText(raw[key])
		if !ok {
			value = printable(raw[key])
		}
		fields = append(fields, printable([]byte(key)), value)
	}
	return fields
}

func asText(raw json.RawMessage) (string, bool) {
	if len(raw) == 0 || raw[0] != '"' {
		return "", false
	}
	var text string
	err := json.Unmarshal(raw, &text)
	return printable([]byte(text)), err == nil
}

// printable escapes invalid UTF-8 and what a terminal would act on, newlines too.
func printable(text []byte) string {
	return strings.ReplaceAll(display.Escape(string(text)), "\n", `\n`)
}

// budget bounds lines and bytes per second, and allows bursts of one second's worth. The zero value is a full budget.
type budget struct {
	at           time.Time
	lines, bytes float64
}

func (b *budget) take(size int) bool {
	now := time.Now()
	passed := now.Sub(b.at).Seconds()
	b.at = now
	b.lines = min(b.lines+passed*linesPerSec, linesPerSec)
	b.bytes = min(b.bytes+passed*bytesPerSec, bytesPerSec)
	if b.lines < 1 || b.bytes < float64(size) {
		return false
	}
	b.lines--
	b.bytes -= float64(size)
	return true
}
