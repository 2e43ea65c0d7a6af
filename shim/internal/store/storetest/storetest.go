// Package storetest opens a store for a test: on a real file, with its writer going, and checked when the test ends.
package storetest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"holdfast/shim/internal/store"
)

// init lets a test binary that uses this package verify state files, as the shim does.
func init() { store.BecomeVerifier() }

// Open is a store of its own in a temporary directory.
func Open(t testing.TB) *store.Store {
	t.Helper()
	return OpenAt(t, store.Options{Path: Path(t)})
}

// Path is where a store may be made: in a directory that belongs to nobody else.
func Path(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "shim.db")
}

// OpenAt opens a store as the options say and starts its Run. When the test ends, whatever Check finds fails it, unless
// the test has closed or broken the store. To open the file again within a test, Close the store first.
func OpenAt(t testing.TB, options store.Options) *store.Store {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := store.Open(ctx, options)
	if err != nil {
		t.Fatal(err)
	}
	running, stop := context.WithCancelCause(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- s.Run(running) }()
	t.Cleanup(func() {
		stop(errTestOver)
		if err := <-ended; errors.Is(err, errTestOver) {
			for err := range s.Check() {
				t.Errorf("store: %v", err)
			}
		}
		if err := s.Close(); err != nil {
			t.Errorf("close the store: %v", err)
		}
	})
	return s
}

var errTestOver = errors.New("the test is over")
