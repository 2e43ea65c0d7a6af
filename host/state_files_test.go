package host

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestRolledBackBinariesAreNotAmongThoseKept(t *testing.T) {
	t.Parallel()
	c := &choice{}
	c.ran("a")
	c.ran("b")
	for _, failed := range []string{"x", "y", "z"} {
		c.ran(failed)
		c.Running, c.Previous = failed, "b"
		c.ran("b")
		c.Running, c.Previous = "b", ""
	}
	if !slices.Equal(c.Ran, []string{"b", "a"}) {
		t.Errorf("kept are %v", c.Ran)
	}
}

// A swap that failed because the activation was late names the disk if that is slow, and only then.
func TestSlowDiskIsNamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	h := &Host{config: Config{StateDir: dir, SwapBudget: time.Hour}, history: openHistory(dir)}
	if says := h.slowDisk(); says != "" {
		t.Errorf("of a fast disk: %s", says)
	}
	h.config.SwapBudget = 1
	if says := h.slowDisk(); !strings.Contains(says, dir+" is slow") || !strings.Contains(says, "--shim-swap-budget") {
		t.Errorf("of a slow disk: %s", says)
	}
	h.config.SwapBudget = time.Hour
	hangs := filepath.Join(dir, "swaps.json.probe")
	if err := unix.Mkfifo(hangs, 0o600); err != nil {
		t.Fatal(err)
	}
	if says := h.slowDisk(); !strings.Contains(says, "is slow") {
		t.Errorf("of a disk that hangs: %s", says)
	}
	reader, err := os.Open(hangs) // lets the write continue
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	h.history.writer.wait()
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// A host that was killed while it wrote leaves temporary files. The next one removes them, and nothing else.
func TestUnfinishedFilesAreRemovedAtOpen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{".shim.json12", ".swaps.json34", "rehearsal.db", "rehearsal.db.bad", "shim.json",
		"shim.db"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c := &Config{StateDir: dir}
	if err := c.removeUnfinished(); err != nil {
		t.Fatal(err)
	}
	var left []string
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if err != nil || !slices.Equal(left, []string{"shim.db", "shim.json"}) {
		t.Errorf("left are %q, %v", left, err)
	}
}
