package journal

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Writer appends the lines of one run of one plugin.
type Writer struct {
	mu       sync.Mutex
	file     *os.File // nil: memory
	memory   *Memory
	seq      uint64
	run      string
	plugin   string
	instance string
}

// Open opens path for appending, and creates it if it is missing. The writer adds the plugin, the instance and the ID
// of a new run to every line.
func Open(path, plugin, instance string) (*Writer, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	return &Writer{file: f, run: newRun(), plugin: plugin, instance: instance}, nil
}

func newRun() string { return rand.Text()[:12] }

// Write appends one line. It uses a single write(2) on a file opened with O_APPEND. Lines of several processes
// therefore never mix, and a written line survives the death of its writer.
func (w *Writer) Write(l Line) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seq++
	l.Seq, l.Run, l.PID, l.Plugin, l.Instance = w.seq, w.run, os.Getpid(), w.plugin, w.instance
	l.Wall = time.Now().UTC()
	if w.memory != nil {
		l.Mono = l.Wall.UnixNano()
		w.memory.append(l)
		return nil
	}
	l.Mono = monotonic()
	b, err := json.Marshal(l)
	if err != nil {
		return fmt.Errorf("encode journal line: %w", err)
	}
	if _, err := w.file.Write(append(b, '\n')); err != nil {
		return fmt.Errorf("append to journal: %w", err)
	}
	return nil
}

// Close closes the file. It writes nothing.
func (w *Writer) Close() error {
	if w.memory != nil {
		return nil
	}
	return w.file.Close()
}

// Read reads a whole journal. A line that cannot be read is an error, because writes never tear a line.
func Read(path string) ([]Line, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read journal: %w", err)
	}
	var lines []Line
	for n, raw := range bytes.Split(b, []byte("\n")) {
		if len(raw) == 0 {
			continue
		}
		var l Line
		if err := json.Unmarshal(raw, &l); err != nil {
			return nil, fmt.Errorf("journal %s line %d: %w", path, n+1, err)
		}
		lines = append(lines, l)
	}
	return lines, nil
}

// NoteReboot appends a line that says that a test has removed all mounts of a node. From then on nothing is staged or
// published there, although no call has undone it.
func NoteReboot(path, plugin, node string) error {
	w, err := Open(path, plugin, "")
	if err != nil {
		return err
	}
	defer w.Close()
	return w.Write(Line{Kind: Reboot, Node: node})
}

func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0
	}
	return ts.Nano()
}

// Memory is a journal without a file, for very many calls and for tests within a synctest bubble. Its clock is
// time.Now, and a write to it makes no system call. The zero value is empty. Plugins that write to the same Memory
// write one journal.
type Memory struct {
	mu    sync.Mutex
	lines []Line
}

// Open returns a writer of a new run.
func (m *Memory) Open(plugin, instance string) *Writer {
	return &Writer{memory: m, run: newRun(), plugin: plugin, instance: instance}
}

// Lines returns the lines written so far.
func (m *Memory) Lines() []Line {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lines[:len(m.lines):len(m.lines)]
}

// NoteReboot is NoteReboot for this journal.
func (m *Memory) NoteReboot(plugin, node string) {
	_ = m.Open(plugin, "").Write(Line{Kind: Reboot, Node: node}) // a write to memory cannot fail
}

func (m *Memory) append(l Line) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lines = append(m.lines, l)
}
