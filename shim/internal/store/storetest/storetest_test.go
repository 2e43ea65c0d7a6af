package storetest_test

import (
	"testing"

	"holdfast/registry"
	"holdfast/shim/internal/store"
	"holdfast/shim/internal/store/storetest"
)

func TestOpen(t *testing.T) {
	path := storetest.Path(t)
	s := storetest.OpenAt(t, store.Options{Path: path})
	at, err := s.Commit(t.Context(), func(registry.View) (registry.Change, error) {
		return registry.Change{Put: []registry.Record{registry.Alloc{ID: "a"}}}, nil
	})
	if err != nil || at != 1 {
		t.Fatalf("index %d, %v", at, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := storetest.OpenAt(t, store.Options{Path: path})
	if again.Index() != 1 || again.Generation() != 2 {
		t.Errorf("index %d, generation %d after it was opened again", again.Index(), again.Generation())
	}
	if storetest.Open(t).Index() != 0 {
		t.Error("a second store is not new")
	}
}
