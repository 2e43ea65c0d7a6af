package lifecycle

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"holdfast/shim/internal/store"
)

// Check calls report with everything that is wrong with a state file. It works on a copy: the file may be in use, and
// nothing is written to it.
func Check(ctx context.Context, file string, report func(error)) error {
	dir, err := os.MkdirTemp("", "holdfast-check-")
	if err != nil {
		return fmt.Errorf("check %s: %w", file, err)
	}
	defer os.RemoveAll(dir)
	copied := filepath.Join(dir, filepath.Base(file))
	if err := copyFile(file, copied); err != nil {
		return fmt.Errorf("check %s: %w", file, err)
	}
	s, err := store.Open(ctx, store.Options{Path: copied, Throwaway: true})
	if err != nil {
		return err
	}
	defer s.Close()
	for err := range s.Check() {
		report(err)
	}
	return nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		return fmt.Errorf("%w (and %v)", err, out.Close())
	}
	return out.Close()
}
