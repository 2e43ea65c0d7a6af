package bootstrap

import (
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	hclog "github.com/hashicorp/go-hclog"
)

// queued bounds the log lines that wait for a slow reader.
const queued = 1024

// Logger is a shim's log: hclog JSON lines on stderr. It never blocks its user: while the host does not read, lines
// beyond a bounded queue are counted and dropped, and the count is logged when the host reads again.
type Logger struct {
	hclog.Logger
	out *queue
}

// NewLogger makes the log of a shim that runs at level and above.
func NewLogger(level hclog.Level) *Logger {
	return newLogger(os.Stderr, level)
}

func newLogger(w io.Writer, level hclog.Level) *Logger {
	out := newQueue(w, queued)
	log := hclog.New(&hclog.LoggerOptions{Level: level, Output: out, JSONFormat: true})
	return &Logger{Logger: log, out: out}
}

// Flush waits until what was logged before is written, at most for limit, and reports whether it was.
func (l *Logger) Flush(limit time.Duration) bool { return l.out.flush(limit) }

// Dropped is how many lines were lost so far.
func (l *Logger) Dropped() uint64 { return l.out.dropped.Load() }

// queue is an io.Writer that never waits for the writer behind it.
type queue struct {
	items   chan item
	dropped atomic.Uint64
}

// item is a line, or a request to say when all before it is written.
type item struct {
	line    []byte
	written chan struct{}
}

// newQueue starts the one goroutine that writes. It lives as long as the process, as its descriptor does.
func newQueue(w io.Writer, size int) *queue {
	q := &queue{items: make(chan item, size)}
	go q.run(w)
	return q
}

func (q *queue) Write(line []byte) (int, error) {
	select {
	case q.items <- item{line: append([]byte(nil), line...)}:
	default:
		q.dropped.Add(1)
	}
	return len(line), nil
}

func (q *queue) run(w io.Writer) {
	var told uint64
	for it := range q.items {
		if it.written != nil {
			close(it.written)
			continue
		}
		w.Write(it.line) // the reader may be gone: nobody is left to tell
		if lost := q.dropped.Load(); lost > told {
			fmt.Fprintf(w, `{"@level":"warn","@message":"log lines dropped","lines":%d}`+"\n", lost-told)
			told = lost
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
