package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// However many volumes have come and gone, the ones that have a name are found, and what is remembered of those that are gone is bounded.
func TestNamesAreFound(t *testing.T) {
	log := registrytest.NewLog(time.Now)
	var n names
	volume := func(id, name string) registry.Volume {
		spec := registry.VolumeSpec{Namespace: "default", ID: registry.VolumeID(id), Name: name, Plugin: "disk"}
		return registry.Volume{VolumeSpec: spec, Created: true, State: registry.VolumeCreating}
	}
	create := func(v registry.Volume) (others []registry.VolumeName) {
		_, err := log.Commit(t.Context(), func(view registry.View) (registry.Change, error) {
			others = n.join(view, v)
			return registry.Change{Put: []registry.Record{v}}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return others
	}
	remove := func(v registry.Volume) {
		if _, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
			return registry.Change{Delete: []registry.Key{v.Key()}}, nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	early := volume("early", "kept")
	if _, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
		return registry.Change{Put: []registry.Record{early}}, nil // by an earlier shim
	}); err != nil {
		t.Fatal(err)
	}
	most := 0
	for i := range 3*fewNames + 10 {
		v := volume(fmt.Sprint("v", i), fmt.Sprint("name-", i))
		if others := create(v); len(others) > 0 {
			t.Fatalf("%s: %v", v.ID, others)
		}
		remove(v)
		most = max(most, len(n.of))
		if i%500 == 0 {
			again := volume(fmt.Sprint("late-", i), "kept")
			if others := create(again); !slices.Contains(others, early.VolumeName()) {
				t.Errorf("after %d volumes: %v", i, others)
			}
			remove(again)
		}
	}
	if most > 2*fewNames {
		t.Errorf("%d names are remembered", most)
	}
}
