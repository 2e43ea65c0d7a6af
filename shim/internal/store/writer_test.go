package store

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// transactions returns the number of transactions that bbolt has committed.
func transactions(t testing.TB, s *Store) (n int) {
	t.Helper()
	s.writing.Lock()
	defer s.writing.Unlock()
	if err := s.db.View(func(tx *bolt.Tx) error { n = tx.ID(); return nil }); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestGroupCommit checks that 64 callers share transactions: there are at most a quarter as many transactions as
// commits. A single caller shares none.
func TestGroupCommit(t *testing.T) {
	s := start(t, Options{Path: statePath(t)})
	defer s.stop(t)
	const commits = 640
	used := func(callers int) int {
		before := transactions(t, s.Store)
		var wg sync.WaitGroup
		for c := range callers {
			wg.Go(func() {
				for range commits / callers {
					if _, err := registrytest.Write(t.Context(), s, puts(alloc(fmt.Sprint(c)))); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		return transactions(t, s.Store) - before
	}
	if alone, shared := used(1), used(64); alone != commits || shared > commits/4 {
		t.Errorf("%d commits took %d transactions of one caller, %d of 64", commits, alone, shared)
	}
}

// If a batch finds no room, it fails for every caller whose decision saw a change of the batch. A caller before the
// first change gets its own answer. The store continues.
func TestFailedBatchFailsDecisionsThatSawIt(t *testing.T) {
	s, err := Open(t.Context(), Options{Path: statePath(t)})
	if err != nil {
		t.Fatal(err)
	}
	own := errors.New("own")
	sees := func(v registry.View) bool { _, found := v.Alloc("big"); return found }
	big := alloc("big")
	big.Sealed = make([]byte, 1<<20)
	deciders := []func(registry.View) (registry.Change, error){
		func(v registry.View) (registry.Change, error) { return registry.Change{}, own },
		func(v registry.View) (registry.Change, error) { return puts(big), nil },
		func(v registry.View) (registry.Change, error) {
			if !sees(v) {
				t.Error("a decision does not see what was decided before it")
			}
			return registry.Change{}, own
		},
		func(v registry.View) (registry.Change, error) { return registry.Change{}, nil },
		func(v registry.View) (registry.Change, error) { return puts(alloc("small")), nil },
	}
	batch := func() (errs []error) {
		var requests []*request
		for _, d := range deciders {
			requests = append(requests, &request{decisions: []registry.Decision{d}, answer: make(chan answer, 1)})
		}
		s.commit(requests)
		for _, r := range requests {
			errs = append(errs, (<-r.answer).err)
		}
		return errs
	}
	limit := s.db.MaxSize
	s.db.MaxSize = 64 << 10
	for i, err := range batch() {
		if want := []error{own, registry.ErrExhausted, registry.ErrExhausted, registry.ErrExhausted,
			registry.ErrExhausted}[i]; !errors.Is(err, want) {
			t.Errorf("caller %d: %v", i, err)
		}
	}
	if stored(s) != 0 || s.Index() != 0 {
		t.Error("the refused batch is there")
	}
	s.db.MaxSize = limit
	for i, err := range batch() {
		if want := []error{own, nil, own, nil, nil}[i]; !errors.Is(err, want) {
			t.Errorf("caller %d: %v", i, err)
		}
	}
	run(t, s).stop(t)
	if _, err := s.Commit(t.Context(), deciders[4]); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("commit to a closed store: %v", err)
	}
	if err := s.View(t.Context(), func(registry.View) error { return nil }); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("view of a closed store: %v", err)
	}
}

// If the context of a caller ends before the writer takes its request, nothing is changed. If its change is being
// written, the caller gets ErrUncertain.
func TestCommitOfACallerThatGaveUp(t *testing.T) {
	s, err := Open(t.Context(), Options{Path: statePath(t)})
	if err != nil {
		t.Fatal(err)
	}
	gone := errors.New("gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	result := make(chan error, 1)
	go func() {
		_, err := registrytest.Write(ctx, s, puts(alloc("never")))
		result <- err
	}()
	<-s.queue.ready // it waits
	cancel(gone)
	if err := <-result; err != gone {
		t.Errorf("before the writer came: %v", err)
	}
	r := run(t, s)
	defer r.stop(t)
	ctx, cancel = context.WithCancelCause(t.Context())
	told := make(chan error)
	go func() {
		_, err := s.Commit(ctx, func(registry.View) (registry.Change, error) {
			cancel(gone)
			if err := <-result; !errors.Is(err, registry.ErrUncertain) || !errors.Is(err, gone) {
				t.Errorf("while it is written: %v", err)
			}
			return puts(alloc("yet")), nil
		})
		result <- err
		close(told)
	}()
	<-told
	r.must(t, puts(alloc("after")))
	if got := stored(s); got != 2 {
		t.Errorf("%d allocs, not 2", got)
	}
}

// The oldest answers are removed first.
func TestRequestsArePruned(t *testing.T) {
	s := start(t, Options{Path: statePath(t)})
	defer s.stop(t)
	var first registry.Change
	for n := range requestLimit {
		first.Put = append(first.Put, registry.Operation{ID: registry.OperationID(fmt.Sprint("early", n))})
	}
	s.must(t, puts(registry.Operation{ID: "zero"}))
	s.must(t, first)
	s.must(t, puts(registry.Operation{ID: "last"}))
	err := s.View(t.Context(), func(v registry.View) error {
		_, zero := v.Operation("zero")
		_, last := v.Operation("last")
		if zero || !last {
			t.Errorf("the oldest is there: %v, the newest: %v", zero, last)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
