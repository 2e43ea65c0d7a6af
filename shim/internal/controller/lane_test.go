package controller

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"holdfast/registry"
)

// Whoever asks, one creation or deletion at a time is sent for a volume: of several callers one does it, and the others find it done.
func TestOneCreationAtATime(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if _, err := d.Mediator.Create(t.Context(), registry.Call{}, spec()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	d.expect("CreateVolume data")
	if kinds := d.kinds(); !slices.Equal(kinds, []registry.EventKind{registry.EventVolumeCreated}) {
		t.Errorf("events %v", kinds)
	}
	for range 8 {
		all.Go(func() {
			if err := d.Mediator.Delete(t.Context(), registry.Call{}, name); err != nil && !errors.Is(err, registry.ErrNotFound) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	d.expect("DeleteVolume vol-data")
}
