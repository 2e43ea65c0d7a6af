package taskdriver

import (
	"strings"
	"testing"
)

// While a slow reader gets the output of the first attempt, the second ends. The reader gets its output, too.
func TestLogsOfAContainerThatEndsMeanwhile(t *testing.T) {
	b := &brokenEngine{output: "\x01\x00\x00\x00\x00\x00\x00\x0a0123456789"}
	d := b.driver(t)
	task := boxed(t, d, "true")
	task.LogSize = 10 // each attempt gets its own file
	h, err := d.Start(t.Context(), task)
	must(t, err)
	wait(t, d, h)
	next := Handle{ID: task.ID + "-2", Dir: task.Dir} // while the next attempt starts
	if text := output(t, d, next, Stdout); text != "0123456789" {
		t.Errorf("before the next attempt: %q", text)
	}
	task.ID = next.ID
	h, err = d.Start(t.Context(), task)
	must(t, err)
	slow := &slowReader{read: func() { wait(t, d, h) }}
	must(t, d.Logs(t.Context(), h, Stdout, true, slow))
	if text := slow.String(); text != "01234567890123456789" {
		t.Errorf("output %q", text)
	}
}

// slowReader calls read before the first write.
type slowReader struct {
	strings.Builder
	read func()
}

func (s *slowReader) Write(p []byte) (int, error) {
	if s.read != nil {
		s.read()
		s.read = nil
	}
	return s.Builder.Write(p)
}
