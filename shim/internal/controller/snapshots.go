package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"sync"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// SnapshotDriver makes the CSI calls for snapshots.
type SnapshotDriver interface {
	CreateSnapshot(context.Context, registry.InstanceKey, csi.CreateSnapshotRequest) (csi.Snapshot, error)
	DeleteSnapshot(context.Context, registry.InstanceKey, csi.SnapshotRequest) error
	GetSnapshot(context.Context, registry.InstanceKey, csi.SnapshotRequest) (csi.Snapshot, error)
	ListSnapshots(ctx context.Context, at registry.InstanceKey, volume registry.ExternalID, token string) (
		page []csi.Snapshot, next string, err error)
}

// Snapshots creates and deletes snapshots of volumes. The state of a snapshot's record says which call is to be made;
// it is stored before the call. A call whose outcome is not certain is repeated with the same fields, by its caller or
// by Run. Until the outcome of CreateSnapshot is certain, no DeleteSnapshot is sent.
type Snapshots struct {
	*Controller
	driver SnapshotDriver
	wake   chan struct{} // holds one token after a caller has left an unfinished snapshot
}

// NewSnapshots returns Snapshots that call plugins through driver.
func NewSnapshots(volumes *Controller, driver SnapshotDriver) *Snapshots {
	return &Snapshots{Controller: volumes, driver: driver, wake: make(chan struct{}, 1)}
}

// Create takes a snapshot and waits until volumes can be created from it, or until ctx ends. Repeating the same spec
// returns the existing snapshot. Another spec under the same name is an ErrExists.
func (s *Snapshots) Create(ctx context.Context, spec registry.SnapshotSpec) (registry.VolumeSnapshot, error) {
	if spec.Name == "" {
		spec.Name = string(spec.ID)
	}
	unlock, err := s.Locks.Lock(ctx, spec.SnapshotName(), "its creation")
	if err != nil {
		return registry.VolumeSnapshot{}, err
	}
	defer unlock()
	isNew, err := s.begin(ctx, spec)
	if err == nil {
		err = s.finish(ctx, spec.SnapshotName(), isNew, finished)
	}
	snap, look := s.snapshot(context.WithoutCancel(ctx), spec.SnapshotName())
	if err != nil {
		return snap, fmt.Errorf("create snapshot %s: %w", spec.SnapshotName(), adviseSnapshot(err, snap))
	}
	return snap, look
}

// adviseSnapshot adds to an error what becomes of the snapshot.
func adviseSnapshot(err error, snap registry.VolumeSnapshot) error {
	switch snap.State {
	case registry.SnapshotCreating:
		return fmt.Errorf("%w; Holdfast repeats the call; `snapshot delete` deletes what it made", err)
	case registry.SnapshotProcessing:
		return fmt.Errorf("%w; the snapshot was taken and its plugin is processing it: `snapshot status` shows when it is ready", err)
	case registry.SnapshotDeleting:
		return fmt.Errorf("%w; Holdfast repeats the deletion", err)
	case registry.SnapshotFailed:
		return fmt.Errorf("%w; `snapshot delete` removes it", err)
	}
	return err
}

// begin stores the record of a new snapshot, unless the same snapshot exists. isNew reports whether it did.
func (s *Snapshots) begin(ctx context.Context, spec registry.SnapshotSpec) (isNew bool, err error) {
	volume, err := s.volume(ctx, spec.VolumeName())
	if errors.Is(err, registry.ErrNotFound) {
		if snap, look := s.snapshot(ctx, spec.SnapshotName()); look == nil && sameSnapshot(snap.SnapshotSpec, spec) {
			return false, nil // taken before its volume was deleted
		}
	}
	if err != nil {
		return false, err
	}
	if spec.Secrets == nil {
		spec.Secrets = volume.Secrets
	}
	if _, err := s.snapshotter(ctx, volume.Plugin); err != nil {
		return false, err
	}
	_, err = registry.Ensure(ctx, s.State, func(view registry.View) (registry.Change, error) {
		isNew = false
		if old, found := view.Snapshot(spec.SnapshotName()); found {
			return registry.Change{}, existingSnapshot(old, spec)
		}
		v, found := view.Volume(spec.VolumeName())
		switch {
		case !found:
			return registry.Change{}, unknown(spec.VolumeName())
		case v.State != registry.VolumeReady:
			return registry.Change{}, registry.Errorf(registry.ErrConflict,
				"volume %s is %s; a snapshot is taken of a volume that is %s", v.VolumeName(), v.State, registry.VolumeReady)
		}
		for _, other := range view.Snapshots() {
			if other.Plugin == v.Plugin && other.Name == spec.Name {
				return registry.Change{}, registry.Errorf(registry.ErrExists,
					"snapshot %s has the name %q at plugin %s already; give this one another name", other.SnapshotName(),
					spec.Name, v.Plugin)
			}
		}
		isNew = true
		return registry.Change{Put: []registry.Record{registry.VolumeSnapshot{
			SnapshotSpec: spec, Plugin: v.Plugin, Source: v.External, State: registry.SnapshotCreating, Since: s.Now(),
		}}}, nil
	})
	return isNew, err
}

// sameSnapshot reports whether two specs describe one snapshot. A spec without secrets has those of the volume.
func sameSnapshot(old, spec registry.SnapshotSpec) bool {
	if spec.Secrets == nil {
		spec.Secrets = old.Secrets
	}
	return old.Volume == spec.Volume && old.Name == spec.Name && maps.Equal(old.Parameters, spec.Parameters) &&
		maps.Equal(old.Secrets, spec.Secrets)
}

// existingSnapshot returns nil if old is what spec describes and can become ready.
func existingSnapshot(old registry.VolumeSnapshot, spec registry.SnapshotSpec) error {
	switch {
	case !sameSnapshot(old.SnapshotSpec, spec):
		return registry.Errorf(registry.ErrExists, "a snapshot %s exists already, and is another one (%q of volume %s); "+
			"choose another id, or delete it first", old.SnapshotName(), old.Name, old.VolumeName())
	case old.State == registry.SnapshotDeleting:
		return registry.Errorf(registry.ErrConflict, "snapshot %s is being deleted; wait until it is gone", old.SnapshotName())
	case old.State == registry.SnapshotFailed:
		return registry.Errorf(registry.ErrConflict, "snapshot %s has failed: %s: %s", old.SnapshotName(), old.Failure.Code,
			old.Failure.Detail)
	}
	return nil
}

// Delete deletes the snapshot at its plugin, and then removes its record.
func (s *Snapshots) Delete(ctx context.Context, name registry.SnapshotName) error {
	unlock, err := s.Locks.Lock(ctx, name, "its deletion")
	if err != nil {
		return err
	}
	defer unlock()
	if err := s.delete(ctx, name); err != nil {
		snap, look := s.snapshot(context.WithoutCancel(ctx), name)
		if errors.Is(look, registry.ErrNotFound) && !errors.Is(err, registry.ErrNotFound) {
			return nil // its creation has certainly failed meanwhile
		}
		return fmt.Errorf("delete snapshot %s: %w", name, adviseSnapshot(err, snap))
	}
	return nil
}

func (s *Snapshots) delete(ctx context.Context, name registry.SnapshotName) error {
	if _, err := s.snapshot(ctx, name); err != nil {
		return err
	}
	// The outcome of its creation has to be known first.
	known := func(snap registry.VolumeSnapshot) bool { return snap.External != "" || finished(snap) }
	if err := s.finish(ctx, name, false, known); err != nil {
		return err
	}
	_, err := registry.Ensure(ctx, s.State, func(view registry.View) (registry.Change, error) {
		snap, found := view.Snapshot(name)
		switch {
		case !found:
			return registry.Change{}, unknownSnapshot(name)
		case snap.External == "": // the plugin has named none that could be deleted
			return registry.Change{Delete: []registry.Key{snap.Key()}, Events: []registry.Event{s.snapshotEvent(
				registry.EventSnapshotDeleted, snap, "its plugin has not named it")}}, nil
		case snap.State == registry.SnapshotDeleting:
			return registry.Change{}, nil
		}
		snap.State, snap.Failure = registry.SnapshotDeleting, registry.Failure{}
		return registry.Change{Put: []registry.Record{snap}}, nil
	})
	if err != nil {
		return err
	}
	return s.finish(ctx, name, false, finished)
}

// List returns the snapshots of a namespace, or all of them if it is empty.
func (s *Snapshots) List(ctx context.Context, namespace registry.Namespace) (list []registry.VolumeSnapshot, err error) {
	err = s.State.View(ctx, func(view registry.View) error {
		for _, snap := range view.Snapshots() {
			if namespace == "" || snap.Namespace == namespace {
				list = append(list, snap)
			}
		}
		return nil
	})
	return list, err
}

// readyBackoff is the wait between two questions whether a snapshot is ready_to_use.
var readyBackoff = intent.Backoff{First: 200 * time.Millisecond, Max: 30 * time.Second}

func finished(snap registry.VolumeSnapshot) bool { return !snap.State.Unfinished() }

// finish makes calls until the snapshot is as wanted or gone, until the retry policy gives up, or until ctx ends. isNew
// means that no call for the snapshot was sent before.
func (s *Snapshots) finish(
	ctx context.Context, name registry.SnapshotName, isNew bool, wanted func(registry.VolumeSnapshot) bool,
) error {
	answers := map[string]int{} // by code
	for try := uint64(1); ; try++ {
		snap, err := s.snapshot(ctx, name)
		if errors.Is(err, registry.ErrNotFound) || err == nil && wanted(snap) {
			return nil
		}
		rpc := registry.CreateSnapshotRPC
		if snap.State == registry.SnapshotDeleting {
			rpc = registry.DeleteSnapshotRPC
		}
		policy, backoff := intent.PolicyOf(rpc), readyBackoff
		if err == nil {
			err = s.try(ctx, name, policy, isNew && try == 1)
		}
		failure, is := errors.AsType[*registry.CallError](err)
		switch {
		case err == nil:
			if snap, look := s.snapshot(ctx, name); errors.Is(look, registry.ErrNotFound) || look == nil && wanted(snap) {
				return nil
			}
		case is:
			row := policy.Row(failure.Code)
			backoff = row.Backoff
			if answers[failure.Code]++; failure.Outcome == registry.OutcomeFailed || answers[failure.Code] >= row.Tries {
				s.wakeRun()
				return fmt.Errorf("%w; %s", err, row.Advice)
			}
		default:
			s.wakeRun()
			return err
		}
		if !intent.Sleep(ctx, backoff.Delay(try, rand.Float64())) {
			s.wakeRun()
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// try makes one call for an unfinished snapshot and stores what came of it. The error of the call is a
// *registry.CallError. The caller holds the lock of the snapshot's name. first means that no call was sent before.
func (s *Snapshots) try(ctx context.Context, name registry.SnapshotName, policy intent.Policy, first bool) error {
	snap, err := s.snapshot(ctx, name)
	if err != nil {
		return err
	}
	inst, err := s.snapshotter(ctx, snap.Plugin)
	if err != nil {
		return err
	}
	unlock, err := s.Locks.Lock(ctx, registry.VolumeKey{Plugin: snap.Plugin, External: snap.Source},
		"a call for its snapshot "+snap.SnapshotName().String())
	if err != nil {
		return err
	}
	defer unlock()
	secrets, err := s.Secrets.Resolve(ctx, snap.Secrets)
	if err != nil {
		return fmt.Errorf("secrets of snapshot %s: %w", name, err)
	}
	limited, cancel := context.WithTimeout(ctx, policy.Deadline)
	defer cancel()
	asked := csi.SnapshotRequest{Snapshot: snap.External, Secrets: secrets,
		Private: csi.Private{Contexts: []map[string]string{snap.Parameters}}}
	switch {
	case snap.State == registry.SnapshotDeleting:
		err = s.driver.DeleteSnapshot(limited, inst.InstanceKey, asked)
		if answered(err, "NOT_FOUND") {
			err = nil
		}
		return s.deleted(ctx, snap, err)
	case snap.State == registry.SnapshotProcessing && inst.Fingerprint.Has(registry.GetSnapshot):
		answer, err := s.driver.GetSnapshot(limited, inst.InstanceKey, asked)
		return s.taken(ctx, snap, inst.InstanceKey, registry.GetSnapshotRPC, answer, err, false)
	}
	answer, err := s.driver.CreateSnapshot(limited, inst.InstanceKey, csi.CreateSnapshotRequest{
		Name: snap.Name, Volume: snap.Source, Parameters: snap.Parameters, Secrets: secrets})
	return s.taken(ctx, snap, inst.InstanceKey, registry.CreateSnapshotRPC, answer, err, first)
}

// taken stores the answer to CreateSnapshot or GetSnapshot. It returns the error of the call, or of an answer that
// cannot be used.
func (s *Snapshots) taken(
	ctx context.Context, snap registry.VolumeSnapshot, at registry.InstanceKey, rpc registry.RPC, answer csi.Snapshot,
	failed error, first bool,
) error {
	was := snap
	if failed == nil {
		failed = s.accept(&snap, at, rpc, answer)
	}
	call, is := errors.AsType[*registry.CallError](failed)
	if failed != nil && !is {
		return failed // it was not sent
	}
	var events []registry.Event
	switch {
	case failed == nil:
		if was.External == "" {
			events = append(events, s.snapshotEvent(registry.EventSnapshotTaken, snap, ""))
		}
		if snap.State == registry.SnapshotReady {
			events = append(events, s.snapshotEvent(registry.EventSnapshotReady, snap, fmt.Sprintf("%d bytes", snap.Size)))
		}
	default:
		snap.Failure = registry.Failure{RPC: rpc, Code: call.Code, Detail: call.Detail, Since: s.Now()}
		switch {
		case call.Outcome != registry.OutcomeFailed:
		case call.Code != "OK" && first: // no other call may have taken it
			return errors.Join(failed, s.store(ctx, registry.Change{Delete: []registry.Key{snap.Key()},
				Events: []registry.Event{s.snapshotEvent(registry.EventSnapshotFailed, snap, call.Code+": "+call.Detail)}}))
		case call.Code == "OK" || call.Code == "NOT_FOUND" || intent.Answers(call.Code):
			snap.State = registry.SnapshotFailed
			events = append(events, s.snapshotEvent(registry.EventSnapshotFailed, snap, call.Code+": "+call.Detail))
		}
		if snap.State == was.State && snap.Failure.Code == was.Failure.Code {
			return failed // it is stored already
		}
	}
	if reflect.DeepEqual(snap, was) {
		return failed
	}
	return errors.Join(failed, s.store(ctx, registry.Change{Put: []registry.Record{snap}, Events: events}))
}

// accept copies the plugin's answer to the snapshot after checking it. If only the id can be used, the snapshot gets
// that alone, so that it can be deleted.
func (s *Snapshots) accept(
	snap *registry.VolumeSnapshot, at registry.InstanceKey, rpc registry.RPC, answer csi.Snapshot,
) error {
	refuse := func(err error) error {
		return badResponse(rpc, at, registry.ErrInternal, "the plugin's answer cannot be used: %v", err)
	}
	id, err := registry.ParseExternalID(answer.ID)
	if err != nil {
		return refuse(err)
	}
	if snap.External != "" && snap.External != id {
		return refuse(registry.Invalid("it calls the snapshot %q, and called it %q before", id, snap.External))
	}
	snap.External = id
	switch {
	case answer.Volume != snap.Source:
		return refuse(registry.Invalid("it was asked for a snapshot of volume %q, and says that %q is one of volume %q",
			snap.Source, id, answer.Volume))
	case answer.Size < 0:
		return refuse(registry.Invalid("the size of snapshot %q is %d", id, answer.Size))
	}
	snap.Size, snap.Taken, snap.Group, snap.Failure = answer.Size, answer.Taken, answer.Group, registry.Failure{}
	snap.State = registry.SnapshotProcessing
	if answer.Ready {
		snap.State = registry.SnapshotReady
	}
	return nil
}

// deleted stores the answer to DeleteSnapshot.
func (s *Snapshots) deleted(ctx context.Context, snap registry.VolumeSnapshot, failed error) error {
	if failed == nil {
		return s.store(ctx, registry.Change{Delete: []registry.Key{snap.Key()},
			Events: []registry.Event{s.snapshotEvent(registry.EventSnapshotDeleted, snap, "")}})
	}
	call, is := errors.AsType[*registry.CallError](failed)
	if !is || snap.Failure.Code == call.Code && call.Outcome != registry.OutcomeFailed {
		return failed
	}
	snap.Failure = registry.Failure{RPC: registry.DeleteSnapshotRPC, Code: call.Code, Detail: call.Detail, Since: s.Now()}
	change := registry.Change{}
	if call.Outcome == registry.OutcomeFailed {
		snap.State = registry.SnapshotReady
		change.Events = []registry.Event{s.snapshotEvent(registry.EventSnapshotKept, snap, call.Code+": "+call.Detail)}
	}
	change.Put = []registry.Record{snap}
	return errors.Join(failed, s.store(ctx, change))
}

// store commits an outcome, even if ctx has ended. It commits nothing if the record is gone.
func (s *Snapshots) store(ctx context.Context, change registry.Change) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), intent.Grace)
	defer cancel()
	_, err := s.State.Commit(ctx, func(registry.View) (registry.Change, error) { return change, nil })
	if err != nil {
		err = fmt.Errorf("store the outcome: %w", err)
	}
	return err
}

// snapshotter returns the active controller of the plugin if it makes snapshots.
func (s *Snapshots) snapshotter(ctx context.Context, id registry.PluginID) (registry.Instance, error) {
	inst, has, err := s.awaitController(ctx, id, false)
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
	err = s.State.View(ctx, func(view registry.View) error {
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

func (s *Snapshots) snapshotEvent(kind registry.EventKind, snap registry.VolumeSnapshot, detail string) registry.Event {
	text := "snapshot " + snap.SnapshotName().String()
	if detail != "" {
		text += ": " + detail
	}
	return registry.Event{
		Kind: kind, Role: registry.RoleController, Plugin: snap.Plugin, Volume: snap.VolumeName(), External: snap.Source,
		Detail: text, At: s.Now(),
	}
}

// wakeRun makes Run look for unfinished snapshots.
func (s *Snapshots) wakeRun() {
	select {
	case s.wake <- struct{}{}:
	default: // Run has yet to take the pending token
	}
}

// Run finishes snapshots without a caller until ctx ends. Each is tried again after resumeBackoff, so that other
// operations get the lock in between.
func (s *Snapshots) Run(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	var mu sync.Mutex // guards busy
	busy := map[registry.SnapshotName]bool{}
	for first := true; ; first = false {
		list, err := s.List(ctx, "")
		if err != nil {
			return fmt.Errorf("load unfinished snapshots: %w", err)
		}
		for _, snap := range list {
			name := snap.SnapshotName()
			mu.Lock()
			if begins := snap.State.Unfinished() && !busy[name]; begins {
				busy[name] = true
				all.Go(func() {
					s.resume(ctx, name, first)
					mu.Lock()
					delete(busy, name)
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
func (s *Snapshots) resume(ctx context.Context, name registry.SnapshotName, atOnce bool) {
	for try := uint64(1); ; try++ {
		if wait := resumeBackoff.Delay(try, rand.Float64()); !atOnce && !intent.Sleep(ctx, wait) {
			return
		}
		atOnce = false
		unlock, err := s.Locks.Lock(ctx, name, "an operation without a caller")
		if err != nil {
			return
		}
		snap, err := s.snapshot(ctx, name)
		if err == nil && snap.State.Unfinished() {
			err = s.try(ctx, name, intent.PolicyOf(registry.CreateSnapshotRPC), false)
			snap, _ = s.snapshot(ctx, name)
		}
		unlock()
		if ctx.Err() != nil || errors.Is(err, registry.ErrNotFound) || !snap.State.Unfinished() {
			return
		}
		if err != nil {
			s.logger.Warn("a snapshot is not finished yet", "snapshot", name, "error", err)
		}
	}
}

// maxListed bounds a list of a plugin's snapshots, so that a list without an end ends.
const maxListed = 100_000

// ListAtPlugin lists the snapshots that the plugin has, of one volume or of all. Those with a record have its fields.
func (s *Snapshots) ListAtPlugin(
	ctx context.Context, id registry.PluginID, volume registry.ExternalID,
) (list []registry.VolumeSnapshot, err error) {
	inst, has, err := s.awaitController(ctx, id, false)
	if err == nil && (!has || !inst.Fingerprint.Has(registry.ListSnapshots)) {
		err = registry.Errorf(registry.ErrUnsupported, "plugin %s cannot list snapshots (it lacks %s)", id,
			registry.ListSnapshots)
	}
	if err != nil {
		return nil, err
	}
	known, err := s.List(ctx, "")
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for token := ""; ; {
		page, next, err := s.driver.ListSnapshots(ctx, inst.InstanceKey, volume, token)
		if err != nil {
			return nil, fmt.Errorf("list the snapshots of plugin %s: %w", id, err)
		}
		for _, found := range page {
			list = append(list, describe(id, found, known))
		}
		if next == "" {
			return list, nil
		}
		if seen[next] || len(list) > maxListed {
			return nil, registry.Errorf(registry.ErrInternal, "plugin %s lists its snapshots without an end", id)
		}
		seen[next], token = true, next
	}
}

// describe returns a snapshot as its plugin lists it, with the fields of its record if there is one.
func describe(id registry.PluginID, found csi.Snapshot, known []registry.VolumeSnapshot) registry.VolumeSnapshot {
	out := registry.VolumeSnapshot{Plugin: id, External: registry.ExternalID(found.ID)}
	for _, snap := range known {
		if snap.Plugin == id && snap.External == out.External {
			out.SnapshotSpec, out.CreateIndex, out.Since = snap.SnapshotSpec, snap.CreateIndex, snap.Since
		}
	}
	out.Source, out.Size, out.Taken, out.Group = found.Volume, found.Size, found.Taken, found.Group
	out.State = registry.SnapshotProcessing
	if found.Ready {
		out.State = registry.SnapshotReady
	}
	return out
}
