package host

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"holdfast/internal/durable"
)

// writer writes files of the state directory, one after the other. If the disk hangs, a caller waits for writeLimit,
// and the write ends once the disk answers.
type writer struct {
	writing sync.WaitGroup
	mu      sync.Mutex    // guards last; held only to read or replace it
	last    chan struct{} // closed once the newest write has ended; nil: there was none
}

// writeLimit is how long a caller waits for a write.
const writeLimit = time.Second

var errDiskHangs = errors.New("the disk of the state directory does not answer; the change is made once it does")

// do runs one write after those before it, and returns its error. If the write has not ended after writeLimit, do
// returns errDiskHangs, and the write continues.
func (w *writer) do(write func() error) error {
	w.mu.Lock()
	before, written, failed := w.last, make(chan struct{}), make(chan error, 1)
	w.last = written
	w.mu.Unlock()
	w.writing.Go(func() {
		defer close(written)
		if before != nil {
			<-before
		}
		failed <- write()
	})
	select {
	case err := <-failed:
		return err
	case <-time.After(writeLimit):
		return errDiskHangs
	}
}

// wait returns once all writes have ended. Until then no other host may use the directory.
func (w *writer) wait() { w.writing.Wait() }

// removeFiles removes the files of the state directory that match a pattern.
func (c *Config) removeFiles(patterns ...string) error {
	var all error
	for _, pattern := range patterns {
		found, err := filepath.Glob(filepath.Join(c.StateDir, pattern))
		all = errors.Join(all, err)
		for _, file := range found {
			if err := os.Remove(file); !errors.Is(err, os.ErrNotExist) {
				all = errors.Join(all, err)
			}
		}
	}
	return all
}

// removeUnfinished removes the temporary files of an earlier host that died. This host has written none yet.
func (c *Config) removeUnfinished() error {
	return c.removeFiles(rehearsalFile+"*", "."+choiceFile+"*", "."+historyFile+"*")
}

// Names of files in the state directory.
const (
	choiceFile    = "shim.json"
	historyFile   = "swaps.json"
	rehearsalFile = "rehearsal.db" // the copy of the state that a candidate rehearses on
)

// choice records which binary runs. It is written whenever another binary runs. A binary that was swapped to stays the
// choice after a restart of the host, until the configuration names another binary than before.
type choice struct {
	path   string
	writer writer

	Path       string   `json:"path"`               // of the configured binary when this was written
	Configured string   `json:"configured"`         // SHA-256 of that binary
	Running    string   `json:"running"`            // SHA-256 of the binary that runs
	Previous   string   `json:"previous,omitempty"` // SHA-256 of the one before, while Running bakes
	Ran        []string `json:"ran,omitempty"`      // binaries that were active and not rolled back, newest first
}

// maxRan bounds choice.Ran.
const maxRan = 3

// openChoice reads the file. If that fails, it returns an empty choice.
func openChoice(dir string) *choice {
	c := &choice{path: filepath.Join(dir, choiceFile)}
	text, err := os.ReadFile(c.path)
	if err != nil || json.Unmarshal(text, c) != nil {
		return &choice{path: c.path}
	}
	return c
}

// wanted returns the binaries that may be needed again. A binary that never was active is not among them.
func (c *choice) wanted() []string { return append([]string{c.Running, c.Previous}, c.Ran...) }

// noteActive makes an active binary the first of c.Ran. If that is the previous binary, the running one was rolled back
// and leaves c.Ran.
func (c *choice) noteActive(sum string) {
	rolledBack := ""
	if sum == c.Previous {
		rolledBack = c.Running
	}
	others := slices.DeleteFunc(c.Ran, func(o string) bool { return o == sum || o == rolledBack })
	c.Ran = slices.Insert(others, 0, sum)
	c.Ran = c.Ran[:min(len(c.Ran), maxRan)]
}

// write makes the choice durable.
func (c *choice) write() error {
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return c.writer.do(func() error { return durable.WriteFile(c.path, text) })
}

// chooseBinary returns the binary to start, given the configured one, and the binary to fall back on; empty: none. It
// changes h.choice accordingly, and leaves the writing to recordChoice.
func (h *Host) chooseBinary(ctx context.Context, configured digest) (run, fallback digest) {
	c := h.choice
	swapped := c.Configured == configured.SHA256 && c.Running != c.Configured && c.Running != ""
	previous := c.Previous
	c.Path, c.Configured, c.Previous = h.config.Shim.Path, configured.SHA256, ""
	if !swapped {
		c.Running = configured.SHA256
		return configured, digest{}
	}
	run, err := h.binaries.Stored(ctx, c.Running)
	if err != nil {
		h.config.Logger.Warn("cannot use the shim of the last swap; starting the configured one", "error", err)
		c.Running = configured.SHA256
		return configured, digest{}
	}
	h.config.Logger.Info("starting the shim of the last swap; the configured one has not changed since", "sha256",
		run.SHA256)
	if previous != "" {
		fallback, _ = h.binaries.Stored(ctx, previous)
	}
	return run, fallback
}

// recordActive is recordChoice for a binary that is or was active.
func (h *Host) recordActive(run, previous digest) {
	h.choice.noteActive(run.SHA256)
	h.shimState.setPrevious(h.choice.Ran)
	h.recordChoice(run, previous)
}

// recordChoice makes run the binary that this host and the next one start, and previous the one to fall back on. One
// goroutine at a time calls it.
func (h *Host) recordChoice(run, previous digest) {
	h.running.Store(&run)
	h.choice.Running, h.choice.Previous = run.SHA256, previous.SHA256
	h.binaries.Keep(h.choice.wanted()...)
	if err := h.choice.write(); err != nil {
		h.config.Logger.Warn("cannot record which shim runs: the next host may start the previous one", "error", err)
	}
}

// maxHistory is how many swaps are remembered.
const maxHistory = 50

// history is the outcome of past swaps, in a file for people. A file that cannot be read is an empty history.
type history struct {
	path   string
	writer writer
	mu     sync.Mutex   // guards all; held only to read or change it
	all    []SwapReport // oldest first
}

func openHistory(dir string) *history {
	h := &history{path: filepath.Join(dir, historyFile)}
	if text, err := os.ReadFile(h.path); err == nil && json.Unmarshal(text, &h.all) != nil {
		h.all = nil
	}
	return h
}

// settleBakes sets the outcome of swaps whose host ended during their bake: committed if their binary runs now, else
// rolled back.
func (h *history) settleBakes(running string) {
	for _, s := range h.list() {
		if s.Outcome != SwapBaking {
			continue
		}
		s.Outcome = SwapCommitted
		if s.To != running {
			s.Outcome, s.Failed = SwapRolledBack, SwapBake
			s.Reason = "the host ended during the bake, and the next one runs another binary"
		}
		h.add(s)
	}
}

// add notes a swap and writes the file. If the write fails, the next one writes this swap too.
func (h *history) add(s SwapReport) {
	h.note(s)
	_ = h.writer.do(h.save)
}

// note adds a swap in memory, or replaces its earlier report.
func (h *history) note(s SwapReport) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.all, func(o SwapReport) bool { return o.Began.Equal(s.Began) })
	if i >= 0 {
		h.all[i] = s
	} else {
		h.all = append(h.all, s)
	}
	h.all = h.all[max(0, len(h.all)-maxHistory):]
}

func (h *history) save() error {
	h.mu.Lock()
	text, err := json.MarshalIndent(h.all, "", "\t")
	h.mu.Unlock()
	if err != nil {
		return err
	}
	return durable.WriteFile(h.path, text)
}

// list returns the swaps, newest first.
func (h *history) list() []SwapReport {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := slices.Clone(h.all)
	slices.Reverse(list)
	return list
}
