package controller

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
)

// Of concurrent callers, one sends the creation or deletion of a volume. The others find it done.
func TestOneCreationAtATime(t *testing.T) {
	d := open(t, of(registry.CreateDelete))
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			noErr(t, "", errOf(d.Controller.Create(t.Context(), registry.Call{}, spec())))
		})
	}
	all.Wait()
	d.expect("CreateVolume data")
	if kinds := d.kinds(); !slices.Equal(kinds, []registry.EventKind{registry.EventVolumeCreated}) {
		t.Errorf("events %v", kinds)
	}
	for range 8 {
		all.Go(func() {
			if err := d.Controller.Delete(t.Context(), registry.Call{}, name); err != nil &&
				!errors.Is(err, registry.ErrNotFound) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	d.expect("DeleteVolume vol-data")
}

// While a call for a volume is under way or waits for its next try, the volume is neither deregistered nor registered
// under another name.
func TestVolumeUnderWayIsNeitherForgottenNorRegistered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, of(registry.CreateDelete), ready())
		d.made["vol-data"], d.faults = true, []fault{uncertain("UNAVAILABLE", false), uncertain("UNAVAILABLE", false),
			uncertain("UNAVAILABLE", false)}
		deleted := make(chan error, 1)
		go func() { deleted <- d.Controller.Delete(t.Context(), call, name) }()
		synctest.Wait() // the call waits for its second try
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		other := ready().VolumeSpec
		other.ID, other.External = "other", key.External
		wantErr(t, "registered while it is being deleted", errOf(d.Controller.Register(ctx, other)),
			context.DeadlineExceeded, "its deletion is under way")
		err := d.Controller.Deregister(t.Context(), name)
		wantErr(t, "forgotten while it is being deleted", err,
			registry.ErrConflict, "DeleteVolume of data has had no certain answer")
		if err := <-deleted; err != nil || len(d.made) > 0 {
			t.Errorf("%v, %v", err, d.made)
		}
	})
}
