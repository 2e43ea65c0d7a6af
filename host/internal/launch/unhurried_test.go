package launch_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/host/internal/launch"
)

// A binary that nobody waits for is read with a rest of a millisecond after each 256 KiB: as it is copied, as it is compared, and as its stored
// copy is verified. Others are read without one. The clock is one that goes on only while everybody rests.
func TestUnhurried(t *testing.T) {
	t.Parallel()
	const rests = 9
	path, sum := binaryFile(t, strings.Repeat("x", rests*256<<10))
	synctest.Test(t, func(t *testing.T) {
		store, dir := openStore(t)
		took := func(what string, want time.Duration, f func() error) {
			t.Helper()
			began := time.Now()
			checkNone(t, what, f())
			if d := time.Since(began); d != want {
				t.Errorf("%s rested for %s, not %s", what, d, want)
			}
		}
		add := func(ctx context.Context) func() error {
			return func() error { _, err := store.Add(ctx, path, ""); return err }
		}
		stored := func(ctx context.Context) func() error {
			return func() error { // by the next process, which has verified nothing
				next, err := launch.OpenStore(dir)
				if err == nil {
					_, err = next.Stored(ctx, sum)
					err = errors.Join(err, next.Close())
				}
				return err
			}
		}
		calmly := launch.Unhurried(t.Context())
		took("a copy", rests*time.Millisecond, add(calmly))
		took("a comparison", rests*time.Millisecond, add(calmly))
		took("a comparison in a hurry", 0, add(t.Context()))
		took("a verification", rests*time.Millisecond, stored(calmly))
		took("a verification in a hurry", 0, stored(t.Context()))
		hasty, _ := openStore(t)
		took("a copy in a hurry", 0, func() error { _, err := hasty.Add(t.Context(), path, ""); return err })
	})
}

// A rest ends with its context.
func TestUnhurriedIsGivenUp(t *testing.T) {
	t.Parallel()
	path, _ := binaryFile(t, strings.Repeat("x", 1<<20))
	synctest.Test(t, func(t *testing.T) {
		store, dir := openStore(t)
		ctx, cancel := context.WithTimeoutCause(t.Context(), 1500*time.Microsecond, errors.New("the operator has gone"))
		defer cancel()
		began := time.Now()
		_, err := store.Add(launch.Unhurried(ctx), path, "")
		checkText(t, err, "the operator has gone")
		if d := time.Since(began); d != 1500*time.Microsecond {
			t.Errorf("it was given up after %s", d)
		}
		checkEmpty(t, dir)
	})
}
