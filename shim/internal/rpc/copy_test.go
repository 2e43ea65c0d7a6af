package rpc

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"holdfast/registry"
)

// copied is a Life with a state of so many chunks of 32 KiB.
type copied struct {
	Life
	chunks int
}

var chunk = bytes.Repeat([]byte("x"), 32<<10)

func (l copied) Snapshot(_ context.Context, write func([]byte) error) (registry.Seq, error) {
	for range l.chunks {
		if err := write(chunk); err != nil {
			return 0, err
		}
	}
	return 1, nil
}

// A copy is complete, and a failed write of the copy ends it.
func TestSnapshotCopyIsComplete(t *testing.T) {
	const chunks = 64
	path := filepath.Join(t.TempDir(), "copy")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := &control{s: &Server{life: copied{chunks: chunks}}}
	if err := c.copyTo(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || !bytes.Equal(text, bytes.Repeat(chunk, chunks)) {
		t.Errorf("%d bytes were written (%v)", len(text), err)
	}
	if err := c.copyTo(t.Context(), "/dev/full"); err == nil {
		t.Error("a copy was written to a device")
	}
}
