package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Snapshots creates and deletes snapshots of volumes. The state of a snapshot's record says which call is to be made,
// and is stored before the call. A call whose outcome is not certain is repeated with the same fields, by its caller or
// by Run. No DeleteSnapshot is sent before the outcome of CreateSnapshot is certain.
//
// Commits decide by the record. The lock of the snapshot's name, and with it that of its volume, is held for one call.
type Snapshots struct {
	volumes *Controller
	driver  SnapshotDriver
	wake    chan struct{} // holds one token after a caller has left an unfinished snapshot
}

// NewSnapshots returns Snapshots that call plugins through driver.
func NewSnapshots(volumes *Controller, driver SnapshotDriver) *Snapshots {
	return &Snapshots{volumes: volumes, driver: driver, wake: make(chan struct{}, 1)}
}

// Create takes a snapshot and waits until volumes can be created from it, or until ctx ends. Repeating the same spec
// returns the existing snapshot. Another spec under the same name is an ErrExists.
func (s *Snapshots) Create(
	ctx context.Context, call registry.Call, spec registry.SnapshotSpec,
) (registry.VolumeSnapshot, error) {
	if spec.Name == "" {
		spec.Name = string(spec.ID)
	}
	w := work{name: spec.SnapshotName(), op: call.ID, wanted: finished}
	var err error
	if w.created, w.fresh, err = s.begin(ctx, spec); err == nil {
		err = s.advise(ctx, w, s.finish(ctx, w))
	}
	if err != nil {
		s.wakeRun() // a commit that seemed to fail may have stored the record
		return registry.VolumeSnapshot{}, fmt.Errorf("create snapshot %s: %w", w.name, err)
	}
	return s.snapshot(ctx, w.name)
}

// advise adds to the error of a call for a snapshot what becomes of the snapshot.
func (s *Snapshots) advise(ctx context.Context, w work, err error) error {
	snap, look := s.snapshot(context.WithoutCancel(ctx), w.name)
	if err == nil || look != nil || snap.CreateIndex != w.created {
		return err
	}
	switch snap.State {
	case registry.SnapshotCreating:
		return fmt.Errorf("%w; Holdfast repeats the call; `snapshot delete` deletes what it made", err)
	case registry.SnapshotProcessing:
		return fmt.Errorf("%w; the snapshot was taken and its plugin is processing it: `snapshot status` shows when it is ready",
			err)
	case registry.SnapshotDeleting:
		return fmt.Errorf("%w; Holdfast repeats the deletion", err)
	case registry.SnapshotFailed:
		return fmt.Errorf("%w; `snapshot delete` deletes it, `snapshot deregister` only removes its record", err)
	}
	return err
}

// begin stores the record of a new snapshot, unless the same snapshot exists. It returns the CreateIndex of the record,
// and whether the record is new.
func (s *Snapshots) begin(ctx context.Context, spec registry.SnapshotSpec) (created registry.Seq, isNew bool, err error) {
	var volume registry.Volume
	err = s.volumes.State.View(ctx, func(view registry.View) error {
		volume, _ = view.Volume(spec.VolumeName())
		if old, found := view.Snapshot(spec.SnapshotName()); found {
			created = old.CreateIndex
			return checkSame(view, old, spec)
		}
		return checkSnapshotable(view, spec)
	})
	if err != nil || created != 0 {
		return created, false, err
	}
	if _, err := s.snapshotter(ctx, volume.Plugin); err != nil {
		return 0, false, err
	}
	_, err = registry.Ensure(ctx, s.volumes.State, func(view registry.View) (registry.Change, error) {
		if old, found := view.Snapshot(spec.SnapshotName()); found {
			created, isNew = old.CreateIndex, false
			return registry.Change{}, checkSame(view, old, spec)
		}
		if err := checkSnapshotable(view, spec); err != nil {
			return registry.Change{}, err
		}
		v, _ := view.Volume(spec.VolumeName())
		snap := registry.VolumeSnapshot{
			SnapshotSpec: spec, Plugin: v.Plugin, Source: v.External, State: registry.SnapshotCreating, Since: s.volumes.Now(),
		}
		if snap.Secrets == nil {
			snap.Secrets = v.Secrets
		}
		created, isNew = view.Index()+1, true
		return registry.Change{Put: []registry.Record{snap}}, nil
	})
	if err == nil && isNew {
		snap, look := s.snapshot(ctx, spec.SnapshotName())
		created, err = snap.CreateIndex, look
	}
	return created, isNew, err
}

// checkSnapshotable returns nil if the snapshot can be taken: its volume is ready, and its name is free at the plugin.
func checkSnapshotable(view registry.View, spec registry.SnapshotSpec) error {
	v, found := view.Volume(spec.VolumeName())
	switch {
	case !found:
		return unknown(spec.VolumeName())
	case v.State != registry.VolumeReady:
		return registry.Errorf(registry.ErrConflict, "volume %s is %s; a snapshot is taken of a volume that is %s",
			v.VolumeName(), v.State, registry.VolumeReady)
	}
	for _, other := range view.Snapshots() {
		if other.Plugin == v.Plugin && other.Name == spec.Name {
			return registry.Errorf(registry.ErrExists,
				"snapshot %s has the name %q at plugin %s already; give this one another name", other.SnapshotName(),
				spec.Name, v.Plugin)
		}
	}
	return nil
}

// checkSame returns nil if old is what spec describes and is ready or can become so. A spec without secrets has those of
// the record.
func checkSame(view registry.View, old registry.VolumeSnapshot, spec registry.SnapshotSpec) error {
	v, found := view.Volume(spec.VolumeName())
	switch {
	case old.Volume != spec.Volume || old.Name != spec.Name || !maps.Equal(old.Parameters, spec.Parameters),
		spec.Secrets != nil && !maps.Equal(old.Secrets, spec.Secrets):
		return registry.Errorf(registry.ErrExists, "a snapshot %s exists already, and is another one (%q of volume %s); "+
			"choose another id, or delete it first", old.SnapshotName(), old.Name, old.VolumeName())
	case found && v.External != old.Source:
		return registry.Errorf(registry.ErrExists, "a snapshot %s exists already, of an earlier volume %s; "+
			"choose another id, or delete it first", old.SnapshotName(), old.VolumeName())
	case old.State == registry.SnapshotDeleting:
		return registry.Errorf(registry.ErrConflict, "snapshot %s is being deleted; wait until it is gone", old.SnapshotName())
	case old.State == registry.SnapshotFailed:
		return registry.Errorf(registry.ErrConflict, "snapshot %s has failed: %s: %s", old.SnapshotName(), old.Failure.Code,
			old.Failure.Detail)
	}
	return nil
}

// Delete deletes the snapshot at its plugin, and then removes its record.
func (s *Snapshots) Delete(ctx context.Context, call registry.Call, name registry.SnapshotName) error {
	snap, err := s.snapshot(ctx, name)
	if err != nil {
		return fmt.Errorf("delete snapshot %s: %w", name, err)
	}
	w := work{name: name, op: call.ID, created: snap.CreateIndex}
	if snap.External == "" {
		err = s.learn(ctx, w)
	}
	if err == nil {
		if w.fresh, err = s.beginDeletion(ctx, w); err == nil {
			w.wanted = func(snap registry.VolumeSnapshot) bool { return snap.State != registry.SnapshotDeleting }
			err = s.advise(ctx, w, s.finish(ctx, w))
		}
	}
	if err != nil {
		s.wakeRun()
		return fmt.Errorf("delete snapshot %s: %w", name, err)
	}
	return nil
}

// learn makes the plugin name a snapshot that it may have taken, by CreateSnapshot once more.
func (s *Snapshots) learn(ctx context.Context, w work) error {
	w.wanted = func(snap registry.VolumeSnapshot) bool { return snap.External != "" || finished(snap) }
	_, err := registry.Ensure(ctx, s.volumes.State, func(view registry.View) (change registry.Change, err error) {
		if snap, found := w.find(view); found && snap.State == registry.SnapshotFailed && snap.External == "" {
			snap.State = registry.SnapshotCreating
			change.Put = []registry.Record{snap}
		}
		return change, nil
	})
	if err == nil {
		err = s.finish(ctx, w)
	}
	if err != nil {
		return fmt.Errorf("it may or may not have been taken, and its plugin has not named it; "+
			"`snapshot deregister` only removes its record: %w", err)
	}
	return nil
}

// beginDeletion stores that the snapshot is to be deleted. isNew reports whether it was not before. A snapshot that is
// gone is no error.
func (s *Snapshots) beginDeletion(ctx context.Context, w work) (isNew bool, err error) {
	_, err = registry.Ensure(ctx, s.volumes.State, func(view registry.View) (registry.Change, error) {
		isNew = false
		snap, found := w.find(view)
		switch {
		case !found || snap.State == registry.SnapshotDeleting:
			return registry.Change{}, nil
		case snap.Group != "":
			return registry.Change{}, registry.Errorf(registry.ErrConflict,
				"it belongs to group snapshot %q, which its plugin deletes as a whole", snap.Group)
		}
		for _, v := range view.Volumes() {
			if v.Plugin == snap.Plugin && v.Source.Snapshot == snap.External && v.State != registry.VolumeReady {
				return registry.Change{}, registry.Errorf(registry.ErrConflict,
					"volume %s is %s, and is to be filled from it; wait until it is ready, or delete it", v.VolumeName(), v.State)
			}
		}
		isNew = true
		snap.Before, snap.State = snap.State, registry.SnapshotDeleting
		return registry.Change{Put: []registry.Record{snap}}, nil
	})
	return isNew, err
}

// Deregister removes the record of the snapshot without a call to its plugin, which keeps the snapshot.
func (s *Snapshots) Deregister(ctx context.Context, name registry.SnapshotName) error {
	unlock, err := s.volumes.Locks.Lock(ctx, name, "its deregistration")
	if err != nil {
		return err
	}
	defer unlock()
	_, err = s.volumes.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		snap, found := view.Snapshot(name)
		if !found {
			return registry.Change{}, unknownSnapshot(name)
		}
		return registry.Change{Delete: []registry.Key{snap.Key()}, Events: []registry.Event{
			s.event(registry.EventSnapshotDeregistered, snap, "its plugin was not asked to delete it")}}, nil
	})
	return err
}

// List returns all snapshots with a record.
func (s *Snapshots) List(ctx context.Context) (list []registry.VolumeSnapshot, err error) {
	err = s.volumes.State.View(ctx, func(view registry.View) error { list = view.Snapshots(); return nil })
	return list, err
}

// snapshotter returns the active controller of the plugin if it makes snapshots.
func (s *Snapshots) snapshotter(ctx context.Context, id registry.PluginID) (registry.Instance, error) {
	inst, has, err := s.volumes.awaitController(ctx, id, false)
	if err == nil && (!has || !inst.Fingerprint.Has(registry.CreateSnapshot)) {
		err = registry.Errorf(registry.ErrUnsupported, "plugin %s cannot make or delete snapshots (it lacks %s)", id,
			registry.CreateSnapshot)
	}
	return inst, err
}

// snapshot returns the stored snapshot of that name.
func (s *Snapshots) snapshot(
	ctx context.Context, name registry.SnapshotName,
) (snap registry.VolumeSnapshot, err error) {
	err = s.volumes.State.View(ctx, func(view registry.View) error {
		var found bool
		if snap, found = view.Snapshot(name); !found {
			return unknownSnapshot(name)
		}
		return nil
	})
	return snap, err
}

func unknownSnapshot(name registry.SnapshotName) error {
	return registry.Errorf(registry.ErrNotFound, "snapshot %s not found", name)
}

func (s *Snapshots) event(kind registry.EventKind, snap registry.VolumeSnapshot, detail string) registry.Event {
	text := "snapshot " + snap.SnapshotName().String()
	if detail != "" {
		text += ": " + detail
	}
	return registry.Event{
		Kind: kind, Role: registry.RoleController, Plugin: snap.Plugin, Volume: snap.VolumeName(), External: snap.Source,
		Detail: text, At: s.volumes.Now(),
	}
}

// wakeRun makes Run look for unfinished snapshots.
func (s *Snapshots) wakeRun() {
	select {
	case s.wake <- struct{}{}:
	default: // Run has yet to take the pending token
	}
}

// Run finishes snapshots without a caller until ctx ends.
func (s *Snapshots) Run(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	var mu sync.Mutex // guards busy
	busy := map[registry.SnapshotName]bool{}
	for first := true; ; first = false {
		list, err := s.List(ctx)
		if err != nil {
			return fmt.Errorf("load unfinished snapshots: %w", err)
		}
		for _, snap := range list {
			w := work{name: snap.SnapshotName(), created: snap.CreateIndex, wanted: finished}
			mu.Lock()
			if snap.State.Unfinished() && !busy[w.name] {
				busy[w.name] = true
				all.Go(func() {
					s.resume(ctx, w, first)
					mu.Lock()
					delete(busy, w.name)
					mu.Unlock()
					s.wakeRun() // another operation may have been left meanwhile
				})
			}
			mu.Unlock()
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// resume tries until the snapshot is finished or ctx ends.
func (s *Snapshots) resume(ctx context.Context, w work, atOnce bool) {
	for try := uint64(1); ; try++ {
		if wait := resumeBackoff.Delay(try, rand.Float64()); !atOnce && !intent.Sleep(ctx, wait) {
			return
		}
		atOnce = false
		limited, cancel := context.WithTimeout(ctx, resumeLimit)
		done, _, err := s.step(limited, w)
		cancel()
		if done || ctx.Err() != nil {
			return
		}
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			s.volumes.logger.Warn("a snapshot is not finished yet", "snapshot", w.name, "error", err)
		}
	}
}

// resumeLimit bounds one try of Run with its wait for the plugin, so that Run notices a deregistered snapshot.
const resumeLimit = 10 * time.Minute
