package journal

import "sync"

// Memory is a journal without a file, for very many calls and for tests within a synctest bubble: its clock is
// time.Now, and writing to it is no system call. Its zero value is empty. Plugins that write to one Memory write one
// journal.
type Memory struct {
	mu    sync.Mutex
	lines []Line
}

// Open returns a writer of a new run.
func (m *Memory) Open(plugin, instance string) *Writer {
	return &Writer{memory: m, run: newRun(), plugin: plugin, instance: instance}
}

// Lines is what was written so far.
func (m *Memory) Lines() []Line {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lines[:len(m.lines):len(m.lines)]
}

// NoteReboot is NoteReboot for this journal.
func (m *Memory) NoteReboot(plugin, node string) {
	_ = m.Open(plugin, "").Write(Line{Kind: Reboot, Node: node}) // memory does not fail
}

func (m *Memory) append(l Line) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lines = append(m.lines, l)
}
