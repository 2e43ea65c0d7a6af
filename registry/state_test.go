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

// Records of two buckets that no commit may write together, and what Mixed says of changes to them.
func TestChangeThatMixesSharedAndNodeRecords(t *testing.T) {
	volume, inline := registry.Volume{}, registry.Volume{Ephemeral: true}
	attach, stage := registry.Intent{RPC: registry.ControllerPublishRPC}, registry.Intent{RPC: registry.NodeStageRPC}
	event := []registry.Event{{Kind: registry.EventStaged}}
	for what, c := range map[string]struct {
		change registry.Change
		mixed  bool
	}{
		"nothing": {registry.Change{Events: event}, false},
		"shared records": {registry.Change{
			Put: []registry.Record{volume, registry.Claim{}, registry.Attachment{}}, Delete: []registry.Key{attach.Key()}, Events: event,
		}, false},
		"node records": {registry.Change{
			Put:    []registry.Record{inline, registry.Alloc{}, registry.Task{}, registry.Instance{}, registry.Staging{}, registry.Ref{}},
			Delete: []registry.Key{stage.Key(), registry.OperationRecord("o")}, Events: event,
		}, false},
		"a shared and a node record":                 {registry.Change{Put: []registry.Record{registry.Claim{}, registry.Ref{}}}, true},
		"a volume and an inline volume":              {registry.Change{Put: []registry.Record{volume, inline}}, true},
		"intents of a controller and of a node call": {registry.Change{Delete: []registry.Key{attach.Key(), stage.Key()}}, true},
		"a shared record and the key of a node's":    {registry.Change{Put: []registry.Record{volume}, Delete: []registry.Key{stage.Key()}}, true},
	} {
		if got := c.change.Mixed(); got != c.mixed {
			t.Errorf("%s: mixed is %v", what, got)
		}
	}
}
