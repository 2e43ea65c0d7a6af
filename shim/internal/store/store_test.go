package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// statePath returns the path of a missing state file, in a directory that the store accepts.
func statePath(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "shim.db")
}

// running is a store whose Run runs until stop.
type running struct {
	*Store
	cancel context.CancelFunc
	ended  chan error
}

func start(t testing.TB, options Options) *running {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := Open(ctx, options)
	if err != nil {
		t.Fatal(err)
	}
	return run(t, s)
}

func run(t testing.TB, s *Store) *running {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	r := &running{s, cancel, make(chan error, 1)}
	go func() { r.ended <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); _ = s.Close() })
	return r
}

// stop checks the store, ends Run and closes the file.
func (r *running) stop(t testing.TB) {
	t.Helper()
	for _, err := range r.Check() {
		t.Errorf("check: %v", err)
	}
	r.cancel()
	<-r.ended
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func (r *running) must(t testing.TB, c registry.Change) registry.Seq {
	t.Helper()
	at, err := registrytest.Write(t.Context(), r, c)
	if err != nil {
		t.Fatal(err)
	}
	return at
}

func alloc(id string) registry.Alloc {
	return registry.Alloc{ID: registry.AllocID(id), Namespace: "default", State: registry.AllocPreparing}
}

func puts(records ...registry.Record) registry.Change { return registry.Change{Put: records} }

// Count returns the number of records without reading them.
func TestCount(t *testing.T) {
	s := start(t, Options{Path: statePath(t)})
	for i := range 5 {
		s.must(t, puts(alloc(fmt.Sprint("alloc-", i))))
	}
	s.must(t, registry.Change{Delete: []registry.Key{registry.AllocRecord("alloc-3")}})
	n, at, err := s.Count(registry.BucketAllocs, registry.BucketVolumes)
	if !slices.Equal(n, []int{4, 0}) || at != s.Index() || err != nil {
		t.Errorf("%v allocs and volumes are counted at %d, of 4 and 0 at %d; %v", n, at, s.Index(), err)
	}
	if err := s.Store.Close(); err != nil {
		t.Fatal(err)
	}
	if n, at, err := s.Count(registry.BucketAllocs); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("%v are counted at %d in a store that is closed; %v", n, at, err)
	}
}

// CheckRecords finds a claim without its volume and a ref without its claim, unless the node is a member of a cluster.
func TestCheckRecordsFindsWhatDangles(t *testing.T) {
	s := start(t, Options{Path: statePath(t)})
	defer s.Store.Close()
	s.must(t, puts(alloc("a")))
	if wrong := s.CheckRecords(); len(wrong) > 0 {
		t.Errorf("nothing is wrong, and it says %v", wrong)
	}
	s.must(t, puts(registry.Claim{Volume: registry.VolumeKey{Plugin: "disk", External: "none"}, Alloc: "a",
		Request: "data"}))
	if wrong := s.CheckRecords(); len(wrong) != 1 || !errors.Is(wrong[0], errDangling) {
		t.Errorf("a claim without its volume: %v", wrong)
	}
	s.must(t, puts(registry.Ref{Volume: registry.VolumeKey{Plugin: "disk", External: "none"}, Alloc: "b",
		Request: "data"}))
	if wrong := s.CheckRecords(); len(wrong) != 2 {
		t.Errorf("a ref without its claim: %v", wrong)
	}
	s.must(t, puts(registry.Copy{Cluster: "test"}))
	if wrong := s.CheckRecords(); len(wrong) > 0 {
		t.Errorf("records whose claims other nodes have released, or whose volumes they have: %v", wrong)
	}
}
