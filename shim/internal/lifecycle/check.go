package lifecycle

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"holdfast/shim/internal/store"
)

// Check calls report for each fault of a state file. It returns an error if the file cannot be examined, for example an
// ErrDamaged if it cannot be opened as a state file. It examines a copy, because the file may be in use, and never
// writes to the file.
func Check(ctx context.Context, file string, report func(error)) error {
	dir, err := os.MkdirTemp("", "holdfast-check-")
	if err != nil {
		return fmt.Errorf("check %s: %w", file, err)
	}
	defer os.RemoveAll(dir)
	copied := filepath.Join(dir, filepath.Base(file))
	if _, err := copyLocked(file, copied); err != nil {
		return fmt.Errorf("check %s: %w", file, err)
	}
	s, err := store.Open(ctx, store.Options{Path: copied, Throwaway: true})
	if err != nil {
		return err
	}
	defer s.Close()
	for _, err := range s.Check() {
		report(err)
	}
	return nil
}
