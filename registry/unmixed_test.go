package registry_test

import (
	"errors"
	"testing"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// Of a use case, no commit writes both records that nodes share and records of one node.
func TestMixedCommitIsRefused(t *testing.T) {
	volume := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "v"}}
	inline := volume
	inline.Ephemeral, inline.ID = true, "i"
	for what, c := range map[string]struct {
		change registry.Change
		want   error
	}{
		"shared":    {registry.Change{Put: []registry.Record{volume, registry.Claim{}}}, nil},
		"of a node": {registry.Change{Put: []registry.Record{inline, registry.Ref{}}}, nil},
		"mixed":     {registry.Change{Put: []registry.Record{volume, registry.Ref{}}}, registry.ErrInternal},
		"mixed by a deletion": {registry.Change{Put: []registry.Record{inline}, Delete: []registry.Key{volume.Key()}},
			registry.ErrInternal},
	} {
		log := registrytest.NewLog(time.Now)
		_, err := registry.Unmixed(log).Commit(t.Context(), func(registry.View) (registry.Change, error) {
			return c.change, nil
		})
		if !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
