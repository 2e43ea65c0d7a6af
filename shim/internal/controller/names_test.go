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

// What is learnt before anybody joins spares the first who does the reading, and finds as much. What is read too late is not used: a volume that has
// joined meanwhile may not be in it. After a commit that maybe never came true all is read anew.
func TestNamesAreLearntInTime(t *testing.T) {
	log := registrytest.NewLog(time.Now)
	volume := func(id, name string) registry.Volume {
		spec := registry.VolumeSpec{Namespace: "default", ID: registry.VolumeID(id), Name: name, Plugin: "disk"}
		return registry.Volume{VolumeSpec: spec, Created: true, State: registry.VolumeCreating}
	}
	early, mine := volume("early", "n"), volume("mine", "m")
	if _, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
		return registry.Change{Put: []registry.Record{early}}, nil
	}); err != nil {
		t.Fatal(err)
	}
	nothing := registrytest.NewLog(time.Now)
	join := func(n *names, from registry.Log, v registry.Volume) (others []registry.VolumeName) {
		t.Helper()
		if err := from.View(t.Context(), func(view registry.View) error { others = n.join(view, v); return nil }); err != nil {
			t.Fatal(err)
		}
		return others
	}
	var n names
	n.learn(t.Context(), log)
	if others := join(&n, nothing, volume("late", "n")); len(others) != 1 || others[0] != early.VolumeName() { // that log has none: it was not read
		t.Errorf("learnt: %v", others)
	}
	var late names
	join(&late, nothing, mine)
	late.learn(t.Context(), log)
	if others := join(&late, nothing, volume("other", "m")); len(others) != 1 || others[0] != mine.VolumeName() {
		t.Errorf("learnt too late: %v", others)
	}
	late.forget()
	if others := join(&late, log, volume("last", "n")); len(others) != 1 || others[0] != early.VolumeName() {
		t.Errorf("read anew: %v", others)
	}
	if others := join(&late, log, volume("last", "m")); len(others) != 0 {
		t.Errorf("what never came true is still known: %v", others)
	}
}
