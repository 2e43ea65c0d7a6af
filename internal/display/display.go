// Package display prepares text for people: it escapes control characters, quotes arguments of commands, and formats
// sizes and durations.
package display

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// Escape replaces control and bidirectional formatting characters by \uXXXX, and invalid UTF-8 by \xXX. Newlines and
// tabs stay.
func Escape(s string) string {
	if strings.IndexFunc(s, needsEscape) < 0 && utf8.ValidString(s) {
		return s
	}
	return string(escape(nil, []byte(s)))
}

// needsEscape reports whether a terminal may interpret r instead of showing it.
func needsEscape(r rune) bool {
	switch r {
	case '\n', '\t':
		return false
	case '\u2028', '\u2029': // line and paragraph separator
		return true
	}
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)
}

func escape(to, text []byte) []byte {
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		switch {
		case r == utf8.RuneError && size == 1:
			to = fmt.Appendf(to, `\x%02x`, text[0])
		case needsEscape(r):
			to = fmt.Appendf(to, `\u%04x`, r)
		default:
			to = append(to, text[:size]...)
		}
		text = text[size:]
	}
	return to
}

// Writer escapes its input like Escape. JSON keeps its meaning: in its strings, \uXXXX is the escaped character.
type Writer struct {
	to io.Writer

	mu   sync.Mutex
	part []byte // incomplete character at the end
}

// NewWriter returns a Writer to an output that may be a terminal.
func NewWriter(to io.Writer) *Writer { return &Writer{to: to} }

// Write writes p escaped. It keeps an incomplete character at the end of p for the next call.
func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := append(w.part, p...)
	whole := len(text) - incompleteSuffix(text)
	w.part = bytes.Clone(text[whole:])
	if whole == 0 {
		return len(p), nil
	}
	if _, err := w.to.Write(escape(nil, text[:whole])); err != nil {
		return 0, err
	}
	return len(p), nil
}

// incompleteSuffix returns the number of bytes at the end that may become a character.
func incompleteSuffix(text []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		if last := text[len(text)-n:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				return n
			}
			return 0
		}
	}
	return 0
}

// Exact returns the writer behind to, for data that must stay unchanged. If that is a terminal, it returns to itself.
func Exact(to io.Writer) io.Writer {
	if w, is := to.(*Writer); is && Columns(to) == 0 {
		return w.to
	}
	return to
}

// defaultColumns is the width of a terminal that does not report its own.
const defaultColumns = 80

// Columns returns the width of the terminal behind to, or 0 if to is not a terminal.
func Columns(to io.Writer) int {
	w, _ := to.(*Writer)
	if w == nil {
		return 0
	}
	f, is := w.to.(*os.File)
	if !is {
		return 0
	}
	if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err != nil {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 {
		return defaultColumns
	}
	return int(size.Col)
}

// CanReplace reports whether Replace can write to an output: a terminal that knows escape sequences.
func CanReplace(to io.Writer) bool { return Columns(to) > 0 && os.Getenv("TERM") != "dumb" }

// Replace replaces the last line of a terminal. An empty text clears the line. The text is escaped and cut to the width
// of the terminal.
func Replace(to io.Writer, text string) {
	w, _ := to.(*Writer)
	width := Columns(to)
	if w == nil || width == 0 {
		return
	}
	line := []rune(Escape(text))
	if len(line) >= width {
		line = append(line[:max(width-2, 0)], '…')[:width-1]
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	fmt.Fprintf(w.to, "\r\x1b[K%s", string(line))
}

// Quote quotes an argument for a POSIX shell.
func Quote(arg string) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-"
	if arg != "" && arg[0] != '=' && strings.Trim(arg, plain) == "" {
		return arg
	}
	return "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
}

// Command returns a command to copy, from trusted words and untrusted arguments. No argument can be mistaken for a
// flag.
func Command(words string, args ...string) string {
	for _, arg := range args {
		if strings.HasPrefix(arg, "-") {
			words += " --"
			break
		}
	}
	for _, arg := range args {
		words += " " + Quote(arg)
	}
	return words
}

// ObjectCommand returns a command line for objects of one namespace. words may have flags.
func ObjectCommand(words string, namespace registry.Namespace, ids ...string) string {
	if namespace != registry.DefaultNamespace && namespace != "" {
		words += " --namespace=" + Quote(string(namespace))
	}
	return Command(words, ids...)
}

// Size formats a number of bytes. It returns "" for 0, which means unknown.
func Size(bytes int64) string {
	if bytes <= 0 {
		return ""
	}
	return units.CustomSize("%.4g %s", float64(bytes), 1024, []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"})
}

// Bytes formats a number of bytes that is known, also 0.
func Bytes(n int64) string {
	if n == 0 {
		return "0 B"
	}
	return Size(n)
}

// UTC formats a time in UTC.
func UTC(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }

// Ago formats the time since an event, which may be in the future.
func Ago(d time.Duration) string {
	if d < 0 {
		return "in " + Span(-d)
	}
	return Span(d) + " ago"
}

// Span formats a duration in days, hours or minutes if it has at least two of them, else in seconds.
func Span(d time.Duration) string {
	for _, unit := range []struct {
		of   time.Duration
		name string
	}{{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "m"}} {
		if d >= 2*unit.of {
			return fmt.Sprintf("%d%s", d/unit.of, unit.name)
		}
	}
	return fmt.Sprintf("%ds", d/time.Second)
}
