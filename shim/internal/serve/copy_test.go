package serve

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"holdfast/internal/priority"
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

// A copy is complete, and others have the processor after each bite of it; who does not want it any more does not get the rest.
func TestCopyIsWrittenInBites(t *testing.T) {
	const bites = 8
	path := filepath.Join(t.TempDir(), "copy")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := &control{s: &Server{life: copied{chunks: bites * priority.Bite / len(chunk)}}}
	began := time.Now()
	if err := c.copyTo(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < bites*time.Millisecond {
		t.Errorf("it took %v: nobody else had a turn", took)
	}
	if text, err := os.ReadFile(path); err != nil || !bytes.Equal(text, bytes.Repeat([]byte("x"), bites*priority.Bite)) {
		t.Errorf("%d bytes were written (%v)", len(text), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.copyTo(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("a copy that nobody wants: %v", err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() != priority.Bite {
		t.Errorf("of that %v was written (%v)", info, err)
	}
}
