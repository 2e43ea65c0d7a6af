package host

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestRolledBackBinariesAreNotAmongThoseKept(t *testing.T) {
	t.Parallel()
	c := &choice{}
	c.noteActive("a")
	c.noteActive("b")
	for _, failed := range []string{"x", "y", "z"} {
		c.noteActive(failed)
		c.Running, c.Previous = failed, "b"
		c.noteActive("b")
		c.Running, c.Previous = "b", ""
	}
	if !slices.Equal(c.Ran, []string{"b", "a"}) {
		t.Errorf("kept are %v", c.Ran)
	}
}

// A host that was killed while it wrote leaves temporary files. The next one removes them, and nothing else.
func TestUnfinishedFilesAreRemovedAtOpen(t *testing.T) {
	t.Parallel()
	c := &Config{StateDir: t.TempDir()}
	for _, name := range []string{".shim.json12", ".swaps.json34", "rehearsal.db", "rehearsal.db.bad", "shim.json",
		"shim.db"} {
		if err := os.WriteFile(filepath.Join(c.StateDir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	err := c.removeUnfinished()
	var left []string
	entries, _ := os.ReadDir(c.StateDir)
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if err != nil || !slices.Equal(left, []string{"shim.db", "shim.json"}) {
		t.Errorf("left are %q, %v", left, err)
	}
}
