package launch

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
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
	logPerSecond  = 4 << 20  // bytes that reach the logger in a second
	lineCost      = 2 << 10  // bytes of logPerSecond that a line takes beside its length
)

// logWriter gets a shim's stderr and passes it to a logger. A line can have no effect but a log entry.
type logWriter struct {
	log   hclog.Logger
	line  []byte // the beginning of the current line, at most maxLine bytes
	cut   int    // bytes of the current line that are left out
	dying bool   // a panic's trace has begun: the next lines are part of it

	second  time.Time // when the current second of logPerSecond began
	used    int       // bytes of logPerSecond that are used in it
	dropped int       // lines over logPerSecond that are not reported yet

	mu   sync.Mutex // guards tail
	tail []string
}

// Write never fails. Only a logger that blocks makes it wait.
func (w *logWriter) Write(text []byte) (int, error) {
	for rest := text; len(rest) > 0; {
		part, next, ended := bytes.Cut(rest, []byte("\n"))
		taken := min(len(part), maxLine-len(w.line))
		w.line = append(w.line, part[:taken]...)
		w.cut += len(part) - taken
		if ended {
			w.endLine()
		}
		rest = next
	}
	return len(text), nil
}

// end logs a last line without a newline, and reports dropped lines.
func (w *logWriter) end() {
	w.endLine()
	w.reportDropped()
}

// endLine logs the current line, unless it is empty.
func (w *logWriter) endLine() {
	line, cut := bytes.TrimRight(w.line, "\r"), w.cut
	w.line, w.cut = w.line[:0], 0
	if len(line) == 0 {
		return
	}
	text := printable(line)
	if cut > 0 {
		text += fmt.Sprintf(" [%d more bytes]", cut)
	}
	w.remember(text)
	if !w.mayLog(len(line)) {
		w.dropped++
		return
	}
	w.reportDropped()
	if cut == 0 && w.logJSON(line) {
		return
	}
	w.dying = w.dying || strings.HasPrefix(text, "panic:") || strings.HasPrefix(text, "fatal error:")
	if w.dying {
		w.log.Error(text)
		return
	}
	w.log.Info(text)
}

// mayLog counts a line of this size, and reports whether the lines of the current second are within logPerSecond.
func (w *logWriter) mayLog(size int) bool {
	if now := time.Now(); now.Sub(w.second) >= time.Second {
		w.second, w.used = now, 0
	}
	w.used += size + lineCost
	return w.used <= logPerSecond
}

func (w *logWriter) reportDropped() {
	if w.dropped > 0 {
		w.log.Warn("the shim writes too much to stderr; lines were dropped", "lines", w.dropped)
		w.dropped = 0
	}
}

func (w *logWriter) remember(text string) {
	if len(text) > tailLineBytes {
		text = strings.ToValidUTF8(text[:tailLineBytes], "") + " [...]"
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.tail) == tailLines {
		w.tail = slices.Delete(w.tail, 0, 1)
	}
	w.tail = append(w.tail, text)
}

// last returns the last lines, oldest first.
func (w *logWriter) last() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.tail)
}

// logJSON logs a line in the JSON format of hclog, with all values as printable text. It reports whether the line has
// that format: an object with a message that is a string.
func (w *logWriter) logJSON(line []byte) bool {
	var raw map[string]json.RawMessage
	if json.Unmarshal(line, &raw) != nil {
		return false
	}
	message, ok := asText(raw["@message"])
	if !ok {
		return false
	}
	name, _ := asText(raw["@level"])
	level := hclog.LevelFromString(name)
	if level < hclog.Trace || level > hclog.Error {
		level = hclog.Info
	}
	var fields []any
	if module, ok := asText(raw["@module"]); ok {
		fields = append(fields, "module", module)
	}
	maps.DeleteFunc(raw, func(key string, _ json.RawMessage) bool { return strings.HasPrefix(key, "@") })
	keys := slices.Sorted(maps.Keys(raw))
	for _, key := range keys[:min(len(keys), maxFields)] {
		value, ok := asText(raw[key])
		if !ok {
			value = printable(raw[key])
		}
		fields = append(fields, printable([]byte(key)), value)
	}
	w.log.Log(level, message, fields...)
	return true
}

// asText returns a JSON string as printable text. ok is false if raw is no string.
func asText(raw json.RawMessage) (text string, ok bool) {
	if len(raw) == 0 || raw[0] != '"' {
		return "", false
	}
	err := json.Unmarshal(raw, &text)
	return printable([]byte(text)), err == nil
}

// printable escapes invalid UTF-8 and what a terminal would act on, newlines too.
func printable(text []byte) string {
	return strings.ReplaceAll(display.Escape(string(text)), "\n", `\n`)
}
