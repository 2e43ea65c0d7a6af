package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A swap that failed because the activation was late names the disk if that is slow, and only then.
func TestSlowDiskIsNamed(t *testing.T) {
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
	hangs := filepath.Join(dir, "swaps.json.probe.new")
	if err := unix.Mkfifo(hangs, 0o600); err != nil {
		t.Fatal(err)
	}
	if says := h.slowDisk(); !strings.Contains(says, "is slow") {
		t.Errorf("of a disk that hangs: %s", says)
	}
	reader, err := os.Open(hangs) // which lets the write go on
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	h.history.pen.rest()
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
