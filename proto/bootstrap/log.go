package bootstrap

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	hclog "github.com/hashicorp/go-hclog"
)

// maxQueued is the maximum number of log lines that wait for a slow reader.
const maxQueued = 1024

// Logger writes a shim's log as hclog JSON lines to stderr. It never blocks its caller. While the host does not read,
// it drops and counts lines beyond a bounded queue. It logs the count when the host reads again.
type Logger struct {
	hclog.Logger
	out *queue
}

// NewLogger returns a Logger for lines at level and above.
func NewLogger(level hclog.Level) *Logger {
	return newLogger(os.Stderr, level)
}

func newLogger(w io.Writer, level hclog.Level) *Logger {
	out := &queue{items: make(chan item, maxQueued)}
	go out.run(w)
	log := hclog.New(&hclog.LoggerOptions{Level: level, Output: out, JSONFormat: true})
	return &Logger{Logger: log, out: out}
}

// Flush waits up to limit until all earlier lines are written. It reports whether they were.
func (l *Logger) Flush(limit time.Duration) bool { return l.out.flush(limit) }

// queue is an io.Writer that never blocks on the underlying writer.
type queue struct {
	items   chan item
	dropped atomic.Uint64
}

// item is a line, or a request to report when all earlier lines are written.
type item struct {
	line    []byte
	written chan struct{}
}

func (q *queue) Write(line []byte) (int, error) {
	select {
	case q.items <- item{line: bytes.Clone(line)}:
	default:
		q.dropped.Add(1)
	}
	return len(line), nil
}

// run writes the lines to w until the process ends.
func (q *queue) run(w io.Writer) {
	var reported uint64
	for it := range q.items {
		if it.written != nil {
			close(it.written)
			continue
		}
		w.Write(it.line) // the reader may be gone, so the error has no recipient
		if lost := q.dropped.Load(); lost > reported {
			fmt.Fprintf(w, `{"@level":"warn","@message":"log lines dropped","lines":%d}`+"\n", lost-reported)
			reported = lost
		}
	}
}

func (q *queue) flush(limit time.Duration) bool {
	timeout := time.NewTimer(limit)
	defer timeout.Stop()
	mark := item{written: make(chan struct{})}
	select {
	case q.items <- mark:
	case <-timeout.C:
		return false
	}
	select {
	case <-mark.written:
		return true
	case <-timeout.C:
		return false
	}
}
