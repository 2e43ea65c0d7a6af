// Package display prepares text for people: it escapes what a terminal would act on, and quotes arguments of commands that people copy.
package display

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Escape replaces control and bidirectional formatting characters by \uXXXX, and bytes that are no UTF-8 by \xXX. Newlines and tabs stay.
func Escape(s string) string {
	if strings.IndexFunc(s, acts) < 0 && utf8.ValidString(s) {
		return s
	}
	return string(escape(nil, []byte(s)))
}

// acts says whether a terminal may act on r instead of showing it.
func acts(r rune) bool {
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
		case acts(r):
			to = fmt.Appendf(to, `\u%04x`, r)
		default:
			to = append(to, text[:size]...)
		}
		text = text[size:]
	}
	return to
}

// Writer escapes all that is written to it as Escape does. JSON stays what it is: \uXXXX means the same character in its strings.
type Writer struct {
	to io.Writer

	mu   sync.Mutex
	part []byte // of a character whose rest has not been written yet
}

// NewWriter makes a writer to one whose reader may be a terminal.
func NewWriter(to io.Writer) *Writer { return &Writer{to: to} }

// Write writes p escaped. A character that p ends in the middle of is written with its rest.
func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := append(w.part, p...)
	whole := len(text) - partial(text)
	w.part = bytes.Clone(text[whole:])
	if whole == 0 {
		return len(p), nil
	}
	if _, err := w.to.Write(escape(nil, text[:whole])); err != nil {
		return 0, err
	}
	return len(p), nil
}

// partial is the number of bytes at the end that may become a character.
func partial(text []byte) int {
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

// Exact is where data goes that has to arrive as it is: the writer behind to, unless that is a terminal.
func Exact(to io.Writer) io.Writer {
	w, is := to.(*Writer)
	if !is {
		return to
	}
	if f, is := w.to.(*os.File); is {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			return to
		}
	}
	return w.to
}

// File is the file behind to, if there is one: for what a terminal says of itself.
func File(to io.Writer) (*os.File, bool) {
	if w, is := to.(*Writer); is {
		to = w.to
	}
	f, is := to.(*os.File)
	return f, is
}

// Quote is an argument as a POSIX shell takes it.
func Quote(arg string) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-"
	if arg != "" && arg[0] != '=' && strings.Trim(arg, plain) == "" {
		return arg
	}
	return "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
}

// Command is a command for people to copy: trusted words, and arguments that may be anything. None of the arguments is taken for a flag.
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
