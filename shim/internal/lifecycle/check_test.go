package lifecycle

import (
	"os"
	"path/filepath"
	"testing"

	"holdfast/shim/internal/store/storetest"
)

// Check finds nothing in an intact file and does not write to it. It reports a file with one changed bit.
func TestCheck(t *testing.T) {
	s := storetest.Open(t)
	path := filepath.Join(t.TempDir(), "shim.db")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Snapshot(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := Check(t.Context(), path, func(err error) { t.Errorf("wrong: %v", err) }); err != nil {
		t.Fatal(err)
	}
	after, err := os.ReadFile(path)
	if err != nil || string(after) != string(before) {
		t.Errorf("the file was written to (%v)", err)
	}
	before[24] ^= 0x40 // in the first meta page
	if err := os.WriteFile(path, before, 0o600); err != nil {
		t.Fatal(err)
	}
	found := 0
	if err := Check(t.Context(), path, func(error) { found++ }); err == nil && found == 0 {
		t.Error("a damaged file is called sound")
	}
}
