// Package storetest opens a store on a real file for a test, runs its writer, and checks it when the test ends.
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

// Open returns a store in a new temporary directory.
func Open(t testing.TB) *store.Store {
	t.Helper()
	return OpenAt(t, store.Options{Path: Path(t)})
}

// Path returns the path of a missing state file in a directory that a store accepts.
func Path(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "shim.db")
}

// OpenAt opens a store with the options and starts its Run. At the end of the test, it runs Check unless the store was
// closed or has failed, and findings fail the test. To open the file again within a test, Close the store first.
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
			for _, err := range s.Check() {
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
