package registrytest

import (
	"context"
	"errors"
	"testing"
	"time"

	"holdfast/registry"
)

func clock() time.Time { return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) }

func TestLogInMemory(t *testing.T) {
	TestLog(t, func(t *testing.T) (registry.State, func() registry.State) {
		log := NewLog(clock)
		return log, func() registry.State { log = log.Reopen(); return log }
	})
}

func commit(log *Log, id registry.AllocID) error {
	_, err := log.Commit(context.Background(), func(registry.View) (registry.Change, error) {
		return putChange(registry.Alloc{ID: id}), nil
	})
	return err
}

func allocs(t *testing.T, log registry.State) (n int) {
	view(t, log, func(v registry.View) { n = len(v.Allocs()) })
	return n
}

func TestFaults(t *testing.T) {
	log := NewLog(clock)
	full := registry.Errorf(registry.ErrExhausted, "full")
	log.Fail(full)
	if err := commit(log, "a"); err != full || allocs(t, log) != 0 {
		t.Errorf("failed commit: %v, %d records", err, allocs(t, log))
	}
	if err := commit(log, "a"); err != nil {
		t.Error(err)
	}
	for n, written := range []bool{false, true} {
		log.Lose(written)
		before := allocs(t, log)
		if err := commit(log, registry.AllocID("lost")); !errors.Is(err, registry.ErrUncertain) ||
			allocs(t, log) != before {
			t.Errorf("lost commit: %v, %d records", err, allocs(t, log))
		}
		if err := commit(log, "b"); !errors.Is(err, registry.ErrUncertain) {
			t.Errorf("commit after a lost one: %v", err)
		}
		old := log
		log = log.Reopen()
		if got := allocs(t, log); got != 1+n {
			t.Errorf("written %v: %d records after reopening", written, got)
		}
		if err := commit(old, "b"); !errors.Is(err, registry.ErrFenced) {
			t.Errorf("commit to the old log: %v", err)
		}
	}
}
