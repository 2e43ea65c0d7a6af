package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/registry"
)

func TestDoctorExaminesTheLedger(t *testing.T) {
	open := func(t *testing.T, path string) *ledger {
		l, err := openLedger(path)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	write := func(t *testing.T, path, text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for what, c := range map[string]struct {
		prepare func(t *testing.T, path string)
		kind    registry.FindingKind // empty: it is well
		says    string
	}{
		"there is none":  {func(*testing.T, string) {}, "", ""},
		"it is well":     {func(t *testing.T, path string) { _ = open(t, path).close() }, "", ""},
		"an empty state": {func(t *testing.T, path string) { write(t, path, "") }, "", ""},
		"it is garbage":  {func(t *testing.T, path string) { write(t, path, strings.Repeat("garbage ", 8192)) }, registry.FoundDamage, "invalid database"},
		"it is truncated": {func(t *testing.T, path string) {
			_ = open(t, path).close()
			if err := os.Truncate(path, 9000); err != nil {
				t.Fatal(err)
			}
		}, registry.FoundDamage, "truncated"},
		"it was emptied beneath allocs": {func(t *testing.T, path string) {
			write(t, path, "")
			if err := os.MkdirAll(filepath.Join(filepath.Dir(path), "allocs", "a1"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, registry.FoundDamage, "gone or empty"},
		"an agent has it open": {func(t *testing.T, path string) {
			l := open(t, path)
			t.Cleanup(func() { _ = l.close() })
		}, registry.FoundUnseen, "locked"},
	} {
		t.Run(what, func(t *testing.T) {
			state := t.TempDir()
			path := filepath.Join(state, "agent", "agent.db")
			if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			c.prepare(t, path)
			found, wrong := ExamineLedger(state)
			if wrong != (c.kind != "") || found.Kind != c.kind || !strings.Contains(found.Detail, c.says) {
				t.Errorf("%v: %+v", wrong, found)
			}
		})
	}
}
