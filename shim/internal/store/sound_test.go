package store

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"holdfast/registry"
)

// A whole file is sound, a damaged one is not, and a look leaves both, and the directory, as they are.
func TestSound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shim.db")
	if err := Sound(path); !errors.Is(err, registry.ErrNotFound) {
		t.Errorf("without a file: %v", err)
	}
	whole := sample(t)
	damaged := bytes.Clone(whole)
	damaged[24] ^= 0x40 // in the first meta page
	for what, c := range map[string]struct {
		file []byte
		want error
	}{"whole": {whole, nil}, "damaged": {damaged, registry.ErrDamaged}, "empty": {nil, registry.ErrDamaged}} {
		if err := os.WriteFile(path, c.file, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Sound(path); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", what, err)
		}
		after, err := os.ReadFile(path)
		names, _ := os.ReadDir(filepath.Dir(path))
		if err != nil || !bytes.Equal(after, c.file) || len(names) != 1 {
			t.Errorf("%s: the file has changed, or there are others: %v, %v", what, names, err)
		}
	}
}
