package launch

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	hclog "github.com/hashicorp/go-hclog"
)

// countingLogger counts what a logReader logs.
type countingLogger struct {
	hclog.Logger
	t      *testing.T
	lines  int
	levels map[hclog.Level]int
}

func newCountingLogger(t *testing.T) *countingLogger {
	return &countingLogger{Logger: hclog.NewNullLogger(), t: t, levels: make(map[hclog.Level]int)}
}

func (c *countingLogger) Log(level hclog.Level, msg string, args ...any) {
	c.lines++
	c.levels[level]++
	for _, arg := range append(args, msg) {
		if _, ok := arg.(int); ok { // the count of dropped lines
			continue
		}
		text, ok := arg.(string)
		if !ok || !utf8.ValidString(text) || strings.ContainsAny(text, "\x00\x1b\n\r\x7f") {
			c.t.Errorf("logged %#v", arg)
		}
	}
}

func (c *countingLogger) Info(msg string, args ...any)  { c.Log(hclog.Info, msg, args...) }
func (c *countingLogger) Warn(msg string, args ...any)  { c.Log(hclog.Warn, msg, args...) }
func (c *countingLogger) Error(msg string, args ...any) { c.Log(hclog.Error, msg, args...) }

func FuzzStderr(f *testing.F) {
	for _, seed := range []string{
		`{"@message":5}`, `{"@message":"m","@level":5,"@timestamp":{}}`,
		`{"@message":"m","":null,"a\u001b":"\ud800","b":{"c":"\n"}}`,
		"panic: x\ngoroutine 1", "\xff\xfe\r\n", strings.Repeat("x", 3*maxLine), "{", `{"@message":"m"`, "\x1b[2J",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		log := newCountingLogger(t)
		s := newLogReader(log)
		s.run(strings.NewReader(string(text)))
		if lines := strings.Count(string(text), "\n") + 1; log.lines > lines+1 {
			t.Errorf("%d lines logged of %d", log.lines, lines)
		}
		if last := s.last(); len(last) > tailLines {
			t.Errorf("%d lines kept", len(last))
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

func TestStderrHasABudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := newCountingLogger(t)
		s := newLogReader(log)
		for range 5 * linesPerSec {
			s.take([]byte("word"), 0)
		}
		if log.lines != linesPerSec {
			t.Errorf("%d lines logged at once", log.lines)
		}
		time.Sleep(time.Second)
		s.take([]byte("word"), 0)
		if log.levels[hclog.Warn] != 1 || log.lines != linesPerSec+2 {
			t.Errorf("after a second: %d lines, %v", log.lines, log.levels)
		}
		time.Sleep(time.Second)
		long := []byte(strings.Repeat("x", maxLine))
		for range 2 * bytesPerSec / maxLine {
			s.take(long, 0)
		}
		if got := log.lines - linesPerSec - 2; got != bytesPerSec/maxLine {
			t.Errorf("%d lines of 64 KiB logged at once", got)
		}
	})
}
