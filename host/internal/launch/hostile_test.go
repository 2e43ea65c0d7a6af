package launch

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	hclog "github.com/hashicorp/go-hclog"
)

// checkingLogger checks and counts what a logWriter logs.
type checkingLogger struct {
	hclog.Logger
	t     *testing.T
	lines int
}

func (c *checkingLogger) Log(_ hclog.Level, msg string, args ...any) {
	c.lines++
	for _, arg := range append(args, msg) {
		text, ok := arg.(string)
		if !ok || !utf8.ValidString(text) || strings.ContainsAny(text, "\x00\x1b\n\r\x7f") {
			c.t.Errorf("logged %#v", arg)
		}
	}
}

func (c *checkingLogger) Info(msg string, args ...any)  { c.Log(hclog.Info, msg, args...) }
func (c *checkingLogger) Warn(string, ...any)           { c.lines++ }
func (c *checkingLogger) Error(msg string, args ...any) { c.Log(hclog.Error, msg, args...) }

func FuzzStderr(f *testing.F) {
	for _, seed := range []string{
		`{"@message":5}`, `{"@message":"m","@level":5,"@timestamp":{}}`,
		`{"@message":"m","":null,"a\u001b":"\ud800","b":{"c":"\n"}}`,
		"panic: x\ngoroutine 1", "\xff\xfe\r\n", strings.Repeat("x", 3*maxLine), "{", `{"@message":"m"`, "\x1b[2J",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		log := &checkingLogger{Logger: hclog.NewNullLogger(), t: t}
		s := &logWriter{log: log}
		for part := range slices.Chunk(text, 1000) {
			_, _ = s.Write(part)
		}
		s.end()
		if lines := strings.Count(string(text), "\n") + 1; log.lines > lines {
			t.Errorf("%d lines logged of %d", log.lines, lines)
		}
		if last := s.last(); len(last) > tailLines {
			t.Errorf("%d lines kept", len(last))
		}
	})
}

// What a shim writes beyond logPerSecond is dropped, and the number of lines is logged.
func TestStderrIsLoggedAtABoundedRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &checkingLogger{Logger: hclog.NewNullLogger(), t: t}
		s := &logWriter{log: log}
		_, _ = s.Write([]byte(strings.Repeat("\n\n.\n", 10_000)))
		if most := logPerSecond / lineCost; log.lines == 0 || log.lines > most || s.dropped != 10_000-log.lines {
			t.Errorf("%d of 10000 lines logged at once, at most %d may be; %d dropped", log.lines, most, s.dropped)
		}
		time.Sleep(time.Second)
		log.lines = 0
		_, _ = s.Write([]byte("word\n"))
		if log.lines != 2 || s.dropped != 0 { // with the number of dropped lines
			t.Errorf("%d lines logged a second later", log.lines)
		}
		time.Sleep(time.Second)
		log.lines = 0
		_, _ = s.Write([]byte(strings.Repeat(strings.Repeat("x", maxLine)+"\n", 1000)))
		if size := log.lines * maxLine; size == 0 || size > logPerSecond {
			t.Errorf("%d bytes logged at once", size)
		}
		log.lines = 0
		if s.end(); log.lines != 1 || s.dropped != 0 {
			t.Errorf("%d lines logged at the end", log.lines)
		}
	})
}

func FuzzHandshake(f *testing.F) {
	for _, seed := range []string{"1|1|unix|/run/x/plugin1|grpc|" + strings.Repeat("A", 60), "||||", "1|1|tcp|:1|grpc",
		"1|-1|a|b", "\xff|"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, line string) {
		h, err := parseHandshake(line)
		if err == nil {
			err = h.check("/nonexistent")
		}
		if err == nil {
			t.Errorf("accepted %q, and there is no such directory", line)
		} else if text := err.Error(); strings.ContainsAny(text, "\x00\x1b\n\r") {
			t.Errorf("the error is not printable: %q", text)
		}
	})
}
