package display

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func TestSizesHaveBinaryUnits(t *testing.T) {
	for bytes, want := range map[int64]string{0: "", 1: "1 B", 1023: "1023 B", 1024: "1 KiB", 1 << 25: "32 MiB",
		3 << 29: "1.5 GiB", 5 << 50: "5 PiB"} {
		if got := Size(bytes); got != want {
			t.Errorf("%d: %q, want %q", bytes, got, want)
		}
	}
}

func TestEscapeShowsWhatTerminalsActOn(t *testing.T) {
	for text, want := range map[string]string{
		"plain\n\ttext": "plain\n\ttext", "\x1b[31mred": `\u001b[31mred`, "a\rb": `a\u000db`, "\u009b31m": `\u009b31m`,
		"abc\u202egpj.exe": `abc\u202egpj.exe`, "\xff\x9b": `\xff\x9b`, "\x7f": `\u007f`, "größer 你": "größer 你",
		"\ufffd": "\ufffd",
	} {
		if got := Escape(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// No input, however it is split, leaves a control character in the output.
func TestNoControlCharacterReachesATerminal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")
		text = append(text, rapid.String().Draw(t, "runes")...)
		text = append(text, '\n')
		var got bytes.Buffer
		w := NewWriter(&got)
		for rest := text; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "part")
			if wrote, err := w.Write(rest[:n]); err != nil || wrote != n {
				t.Fatalf("%d of %d bytes, %v", wrote, n, err)
			}
			rest = rest[n:]
		}
		if got.String() != Escape(string(text)) {
			t.Fatalf("%q in parts: %q, at once: %q", text, got.String(), Escape(string(text)))
		}
		if !utf8.Valid(got.Bytes()) {
			t.Fatalf("%q is no UTF-8", got.String())
		}
		for _, r := range got.String() {
			if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)) {
				t.Fatalf("%q has %U", got.String(), r)
			}
		}
	})
}

func TestEscapedJSONMeansTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.String().Draw(t, "text") + "\u009b\u202e\x7f\x1b"
		var out bytes.Buffer
		if err := json.NewEncoder(NewWriter(&out)).Encode(want); err != nil {
			t.Fatal(err)
		}
		var got string
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || got != want {
			t.Fatalf("%q became %q: %v", want, got, err)
		}
	})
}

func TestQuotedArgumentIsOneWordOfAShell(t *testing.T) {
	args := []string{"", "db", "x; touch pwned", "it's", "$(id)", "`id`", "a\nb", "~", "=ls", "a=b", "*", "--", "-n",
		"ü", `\`, "!x", "a&b|c>d"}
	for _, arg := range args {
		out, err := exec.Command("sh", "-c", "printf '%s.' "+Quote(arg)).Output()
		if err != nil || string(out) != arg+"." {
			t.Errorf("%q: %q, %v", arg, out, err)
		}
	}
	if got := Command("holdfast job stop", "-x"); got != "holdfast job stop -- -x" {
		t.Errorf("an id like a flag: %s", got)
	}
	if got := Command("holdfast alloc logs", "0a1b",
		"t; id"); got != "holdfast alloc logs 0a1b 't; id'" || strings.Contains(got, "--") {
		t.Errorf("two arguments: %s", got)
	}
}

// A replaced line fits the terminal, and has no control character of the text.
func TestReplaceKeepsToOneLineOfTheTerminal(t *testing.T) {
	operator, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo terminals here: %v", err)
	}
	defer operator.Close()
	if err := unix.IoctlSetPointerInt(int(operator.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(operator.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	programs, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer programs.Close()
	w := NewWriter(programs)
	if got := Columns(w); got != defaultColumns {
		t.Errorf("%d columns of a terminal without a size", got)
	}
	for columns, want := range map[uint16]string{20: "waiting\\u001b for …", 2: "…", 1: ""} {
		size := &unix.Winsize{Col: columns, Row: 5}
		if err := unix.IoctlSetWinsize(int(operator.Fd()), unix.TIOCSWINSZ, size); err != nil {
			t.Fatal(err)
		}
		Replace(w, "waiting\x1b for a volume that takes long")
		got := make([]byte, 100)
		length, err := operator.Read(got)
		if want := "\r\x1b[K" + want; err != nil || string(got[:length]) != want {
			t.Errorf("%d columns: %q, %v, want %q", columns, got[:length], err, want)
		}
	}
	for term, want := range map[string]bool{"xterm": true, "dumb": false} {
		t.Setenv("TERM", term)
		if CanReplace(w) != want || CanReplace(NewWriter(&bytes.Buffer{})) {
			t.Errorf("TERM=%s: want %v, and false for a buffer", term, want)
		}
	}
	if Columns(NewWriter(&bytes.Buffer{})) != 0 || Columns(&bytes.Buffer{}) != 0 {
		t.Error("a buffer has a width")
	}
}
