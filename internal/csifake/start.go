package csifake

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"holdfast/internal/csifake/journal"
)

// Start runs a plugin in this process until the test ends, or until it is stopped or killed.
func Start(t testing.TB, cfg Config) *Plugin {
	t.Helper()
	var made string
	if cfg.Socket == "" && cfg.Listener == nil {
		dir, err := os.MkdirTemp("", "h-") // the path of t.TempDir may be too long for a socket
		if err != nil {
			t.Fatal(err)
		}
		made, cfg.Socket = dir, filepath.Join(dir, "csi.sock")
	}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- p.Run(context.WithoutCancel(t.Context())) }()
	t.Cleanup(func() {
		p.Stop()
		if err := <-done; err != nil {
			t.Errorf("csifake: %v", err)
		}
		if made != "" {
			_ = os.RemoveAll(made)
		}
		if cfg.DataDir != "" {
			if err := FreeLoops(cfg.DataDir); err != nil {
				t.Errorf("csifake: %v", err)
			}
		}
	})
	return p
}

// NewJournal returns the path of a journal that is checked when the test ends. Call it before Start, so that the
// plugins have stopped by then.
func NewJournal(t testing.TB, o journal.Options) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "journal.jsonl")
	CheckCleanup(t, path, o)
	return path
}

// CheckCleanup checks a journal when the test ends. Every violation is an error of the test.
func CheckCleanup(t testing.TB, path string, o journal.Options) {
	t.Helper()
	t.Cleanup(func() {
		for _, v := range Check(path, o) {
			t.Errorf("journal: %s", v)
		}
	})
}

// Check checks a journal against the automaton. A journal that cannot be read violates R0.
func Check(path string, o journal.Options) []journal.Violation {
	lines, err := journal.Read(path)
	if err != nil {
		return []journal.Violation{{Rule: "R0", Text: err.Error()}}
	}
	return journal.Check(lines, o)
}

// Calls returns the calls in a journal for the given RPCs. Without RPCs it returns all.
func Calls(path string, rpcs ...string) ([]journal.Call, error) {
	lines, err := journal.Read(path)
	if err != nil {
		return nil, err
	}
	return callsOf(lines, rpcs), nil
}

func callsOf(lines []journal.Line, rpcs []string) []journal.Call {
	calls := journal.Calls(lines)
	if len(rpcs) == 0 {
		return calls
	}
	return slices.DeleteFunc(calls, func(c journal.Call) bool { return !slices.Contains(rpcs, c.RPC) })
}
