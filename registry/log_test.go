package registry_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// What is so already is found without waiting for a commit; what is not is committed, or refused.
func TestEnsure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := registrytest.NewLog(time.Now)
		wanted := func(id registry.AllocID) func(registry.View) (registry.Change, error) {
			return func(v registry.View) (registry.Change, error) {
				if _, known := v.Alloc(id); known {
					return registry.Change{}, nil
				}
				return registry.Change{Put: []registry.Record{registry.Alloc{ID: id}}}, nil
			}
		}
		first, err := registry.Ensure(t.Context(), log, wanted("a"))
		if err != nil || first == 0 {
			t.Fatalf("at %d: %v", first, err)
		}
		release := log.Hold()
		held := make(chan error, 1)
		go func() { _, err := registry.Ensure(t.Context(), log, wanted("b")); held <- err }()
		synctest.Wait()
		if again, err := registry.Ensure(t.Context(), log, wanted("a")); err != nil || again != first {
			t.Errorf("what is so already: at %d, and not %d: %v", again, first, err)
		}
		select {
		case err := <-held:
			t.Errorf("a change did not wait for its commit: %v", err)
		default:
		}
		release()
		if err := <-held; err != nil {
			t.Error(err)
		}
		refused := errors.New("refused")
		if _, err := registry.Ensure(t.Context(), log, func(registry.View) (registry.Change, error) { return registry.Change{}, refused }); !errors.Is(err, refused) {
			t.Errorf("a refusal is told as %v", err)
		}
	})
}
