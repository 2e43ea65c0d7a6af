package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Snapshots creates and deletes snapshots of volumes, and group snapshots of several volumes. The state of a snapshot's
// record says which call is to be made, and is stored before the call. If the outcome of a call is not certain, the
// caller or Run repeats the call with the same fields. No DeleteSnapshot is sent before the outcome of CreateSnapshot
// is certain.
//
// Commits decide on the record. For the time of one call, the locks of the snapshot's name and of its volumes are held.
type Snapshots struct {
	volumes *Controller
	driver  SnapshotDriver
	wakeup
}

// NewSnapshots returns Snapshots that call plugins through driver.
func NewSnapshots(volumes *Controller, driver SnapshotDriver) *Snapshots {
	return &Snapshots{volumes: volumes, driver: driver, wakeup: make(wakeup, 1)}
}

// Create takes a snapshot and waits until volumes can be created from it, or until ctx ends. Repeating the same spec
// returns the existing snapshot. Another spec under the same name is an ErrExists.
func (s *Snapshots) Create(
	ctx context.Context, call registry.Call, spec registry.SnapshotSpec,
) (registry.VolumeSnapshot, error) {
	if spec.Name == "" {
		spec.Name = string(spec.ID)
	}
	w := &work{snapshotRef: snapshotRef{name: nameOf(spec)}, wanted: finished}
	created, isNew, err := s.storeNew(ctx, spec)
	w.created = created
	if isNew {
		w.fresh = created
	}
	if err == nil {
		err = s.advise(ctx, w.snapshotRef, s.finish(ctx, w))
	}
	if err != nil {
		s.Wake() // a commit that seemed to fail may have stored the record
		return registry.VolumeSnapshot{}, fmt.Errorf("create %s: %w", w.name, err)
	}
	return s.snapshot(ctx, w.name)
}

// advise adds to the error of a call for a snapshot what Holdfast does next, and which commands apply.
func (s *Snapshots) advise(ctx context.Context, ref snapshotRef, err error) error {
	snap, viewErr := s.snapshot(context.WithoutCancel(ctx), ref.name)
	command := ref.name.command()
	if err == nil || viewErr != nil || snap.CreateIndex != ref.created {
		return err
	}
	switch snap.State {
	case registry.SnapshotCreating:
		return fmt.Errorf("%w; Holdfast repeats the call; %sdelete` deletes what it made, "+
			"%sderegister` only removes its record", err, command, command)
	case registry.SnapshotProcessing:
		return fmt.Errorf("%w; the snapshot was taken and its plugin is processing it: "+
			"%sstatus` shows when it is ready", err, command)
	case registry.SnapshotDeleting:
		return fmt.Errorf("%w; Holdfast repeats the deletion; %sderegister` only removes its record", err, command)
	case registry.SnapshotFailed:
		return fmt.Errorf("%w; %sdelete` deletes it, %sderegister` only removes its record", err, command, command)
	}
	return err
}

// storeNew stores the record of a new snapshot, unless the same snapshot exists. It returns the CreateIndex of the
// record, and whether the record is new.
func (s *Snapshots) storeNew(
	ctx context.Context, spec registry.SnapshotSpec,
) (created registry.Seq, isNew bool, err error) {
	name := nameOf(spec)
	var snap registry.VolumeSnapshot
	read := func(view registry.View) (err error) {
		old, found := name.find(view)
		if created, isNew = old.CreateIndex, !found; found {
			return checkSameSpec(view, old, spec)
		}
		snap, err = newSnapshot(view, spec)
		return err
	}
	if err := registry.Confirm(ctx, s.volumes.State, read); err != nil || !isNew {
		return created, false, err
	}
	if _, err := s.snapshotter(ctx, snap); err != nil {
		return 0, false, err
	}
	at, err := registry.Ensure(ctx, s.volumes.State, func(view registry.View) (_ registry.Change, err error) {
		if err := read(view); err != nil || !isNew {
			return registry.Change{}, err
		}
		snap.Since = s.volumes.Now()
		if snap.Senders, err = s.senders(view, snap); err != nil {
			return registry.Change{}, err
		}
		return registry.Change{Put: []registry.Record{snap}}, nil
	})
	if isNew {
		created = at
	}
	return created, isNew, err
}

// newSnapshot returns the record of a new snapshot. It returns an error unless the volumes are ready and of one plugin,
// and the names are free.
func newSnapshot(view registry.View, spec registry.SnapshotSpec) (registry.VolumeSnapshot, error) {
	snap := registry.VolumeSnapshot{SnapshotSpec: spec, State: registry.SnapshotCreating}
	volumes := volumesIn(spec)
	for i, name := range volumes {
		v, found := view.Volume(name)
		switch {
		case !found:
			return snap, unknownSource(view, name)
		case v.Ephemeral:
			return snap, registry.Errorf(registry.ErrUnsupported,
				"volume %s is an inline volume of alloc %s; no snapshot can be taken of it", name, v.Owner)
		case v.State != registry.VolumeReady:
			return snap, registry.Errorf(registry.ErrConflict,
				"volume %s is %s; a snapshot is taken of a volume that is %s", name, v.State, registry.VolumeReady)
		case i > 0 && v.Plugin != snap.Plugin:
			return snap, registry.Invalid("volume %s belongs to plugin %s, and volume %s to plugin %s; "+
				"a group snapshot is taken of volumes of one plugin", name, v.Plugin, volumes[0].ID, snap.Plugin)
		case slices.ContainsFunc(snap.Members, func(m registry.GroupMember) bool { return m.Source == v.External }):
			return snap, registry.Invalid("volume %s is the same volume at its plugin as another one of the group: %q",
				name, v.External)
		}
		if i > 0 && v.Node != snap.Node {
			return snap, registry.Invalid("volume %s is on node %s, and volume %s on node %s; "+
				"a group snapshot is taken of volumes of one node", name, v.Node, volumes[0].ID, snap.Node)
		}
		snap.Plugin, snap.Node = v.Plugin, v.Node
		if snap.Secrets == nil {
			snap.Secrets = v.Secrets
		}
		if spec.IsGroup() {
			snap.Members = append(snap.Members, registry.GroupMember{Volume: name.ID, Source: v.External})
		} else {
			snap.Source = v.External
		}
	}
	return snap, checkNames(view, snap)
}

// unknownSource returns the error for a snapshot of a volume that does not exist.
func unknownSource(view registry.View, name registry.VolumeName) error {
	other := registry.SnapshotName{Namespace: name.Namespace, ID: registry.SnapshotID(name.ID)}
	if _, found := view.Snapshot(other); found {
		return registry.Invalid("%s is a snapshot, and a snapshot is taken of a volume; "+
			"create a volume from it first, with snapshot_id = %q", name.ID, other.ID)
	}
	return errUnknown(name)
}

// checkNames returns nil if the snapshot's name at the plugin and the names of its members are free.
func checkNames(view registry.View, snap registry.VolumeSnapshot) error {
	for _, id := range snap.IDs() {
		if _, err := registry.ParseSnapshotID(string(id)); err != nil {
			return err
		}
	}
	for _, other := range view.SnapshotRecords() {
		if other.Plugin == snap.Plugin && other.Name == snap.Name && other.IsGroup() == snap.IsGroup() {
			return registry.Errorf(registry.ErrExists,
				"%s has the name %q at plugin %s already; give this one another name",
				nameOf(other.SnapshotSpec), snap.Name, snap.Plugin)
		}
		if other.Namespace != snap.Namespace {
			continue
		}
		for _, id := range other.IDs() {
			if slices.Contains(snap.IDs(), id) {
				return registry.Errorf(registry.ErrExists,
					"the id of its snapshot would be %s, which %s has already; choose another id",
					id, nameOf(other.SnapshotSpec))
			}
		}
	}
	return nil
}

// checkSameSpec returns nil if old matches spec and is ready, or can become ready. Secrets need to match only if the
// spec has any.
func checkSameSpec(view registry.View, old registry.VolumeSnapshot, spec registry.SnapshotSpec) error {
	name := nameOf(spec)
	switch {
	case old.Volume != spec.Volume || !slices.Equal(old.Volumes, spec.Volumes) || old.Name != spec.Name,
		!maps.Equal(old.Parameters, spec.Parameters),
		spec.Secrets != nil && !maps.Equal(old.Secrets, spec.Secrets):
		for _, volume := range volumesIn(spec) {
			if _, found := view.Volume(volume); !found {
				return unknownSource(view, volume)
			}
		}
		return registry.Errorf(registry.ErrExists, "%s already exists with a different specification (%q of %s); "+
			"choose another id, or delete it first", name, old.Name, volumesOf(old))
	case old.State == registry.SnapshotDeleting:
		return registry.Errorf(registry.ErrConflict, "%s is being deleted; wait until it is gone", name)
	case old.State == registry.SnapshotFailed:
		return registry.Errorf(registry.ErrConflict, "%s has failed: %s: %s",
			name, old.Failure.Code, old.Failure.Detail)
	}
	for _, m := range old.Each() {
		of := registry.VolumeName{Namespace: old.Namespace, ID: m.Volume}
		if v, found := view.Volume(of); found && v.External != m.Source {
			return registry.Errorf(registry.ErrExists, "a %s exists already, of an earlier volume %s; "+
				"choose another id, or delete it first", name, of)
		}
	}
	return nil
}

// volumesOf lists the volumes of a snapshot, for people.
func volumesOf(snap registry.VolumeSnapshot) string {
	var ids []string
	for _, m := range snap.Each() {
		ids = append(ids, string(m.Volume))
	}
	return strings.Join(ids, ", ")
}

// Delete deletes the snapshot at its plugin, and then removes its record.
func (s *Snapshots) Delete(ctx context.Context, call registry.Call, name registry.SnapshotName) error {
	return s.delete(ctx, call, snapshotName{name, false})
}

// DeleteGroup deletes the group snapshot at its plugin, with all its snapshots, and then removes its record.
func (s *Snapshots) DeleteGroup(ctx context.Context, call registry.Call, name registry.SnapshotName) error {
	return s.delete(ctx, call, snapshotName{name, true})
}

func (s *Snapshots) delete(ctx context.Context, call registry.Call, name snapshotName) error {
	snap, err := s.confirmedSnapshot(ctx, name, nil)
	if err != nil {
		return fmt.Errorf("delete %s: %w", name, err)
	}
	w := &work{snapshotRef: snapshotRef{name, snap.CreateIndex}}
	if snap.State != registry.SnapshotDeleting {
		if _, err = s.secrets(ctx, snap); err != nil { // do not begin a deletion that could not be sent
			err = fmt.Errorf("%w; %sderegister` only removes its record", err, name.command())
		}
	}
	if err == nil && snap.External == "" {
		err = s.learnExternalID(ctx, w)
	}
	if err == nil {
		if w.fresh, err = s.beginDeletion(ctx, w.snapshotRef); err == nil {
			w.wanted = func(snap registry.VolumeSnapshot) bool { return snap.State != registry.SnapshotDeleting }
			err = s.advise(ctx, w.snapshotRef, s.finish(ctx, w))
		}
	}
	if err != nil {
		s.Wake()
		return fmt.Errorf("delete %s: %w", name, err)
	}
	return nil
}

// learnExternalID repeats CreateSnapshot to learn the external ID of a snapshot that the plugin may have taken.
func (s *Snapshots) learnExternalID(ctx context.Context, w *work) error {
	w.wanted = func(snap registry.VolumeSnapshot) bool { return snap.External != "" || finished(snap) }
	_, err := registry.Ensure(ctx, s.volumes.State, func(view registry.View) (change registry.Change, err error) {
		if snap, found := w.find(view); found && snap.State == registry.SnapshotFailed && snap.External == "" {
			snap.State, snap.Senders = registry.SnapshotCreating, nil
			change.Put = []registry.Record{snap}
		}
		return change, nil
	})
	if err == nil {
		err = s.finish(ctx, w)
	}
	if err != nil {
		return errNoExternalID(err)
	}
	return nil
}

// errNoExternalID says that a snapshot cannot be deleted because its external ID is unknown, and why (err).
func errNoExternalID(err error) error {
	return fmt.Errorf("it may or may not have been taken, and its plugin has not named it; "+
		"deregistering it only removes its record: %w", err)
}

// beginDeletion stores that the snapshot is to be deleted. fresh is the index of that commit; 0: the deletion had begun
// before, or the snapshot is gone.
func (s *Snapshots) beginDeletion(ctx context.Context, ref snapshotRef) (fresh registry.Seq, err error) {
	begins := false
	at, err := registry.Ensure(ctx, s.volumes.State, func(view registry.View) (_ registry.Change, err error) {
		begins = false
		snap, found := ref.find(view)
		switch {
		case !found || snap.State == registry.SnapshotDeleting:
			return registry.Change{}, nil
		case !ref.name.group && snap.Group != "":
			return registry.Change{}, errInGroup(view, snap)
		case snap.External == "":
			return registry.Change{}, errNoExternalID(registry.Errorf(registry.ErrConflict, "%s: %s",
				snap.Failure.Code, snap.Failure.Detail))
		}
		for _, v := range view.Volumes() {
			fills := v.Source.Snapshot != "" && slices.Contains(snap.Externals(), v.Source.Snapshot)
			if fills && v.Plugin == snap.Plugin && v.State != registry.VolumeReady {
				return registry.Change{}, registry.Errorf(registry.ErrConflict,
					"volume %s is %s, and is to be filled from it; wait until it is ready, or delete it",
					v.VolumeName(), v.State)
			}
		}
		executor, _ := view.Executor(snap.Plugin)
		if at, found := executor.FormerAmong(snap.Senders); found && snap.State.Unfinished() {
			return registry.Change{}, registry.Errorf(registry.ErrUnavailable, "%s",
				registry.MayRunAt(at, changingRPC(snap)))
		}
		begins = true
		snap.Before, snap.State = snap.State, registry.SnapshotDeleting
		snap.Senders = nil
		snap.Senders, err = s.senders(view, snap)
		return registry.Change{Put: []registry.Record{snap}}, err
	})
	if err != nil || !begins {
		return 0, err
	}
	return at, nil
}

// errInGroup returns the error of an operation on a member of a group, which is possible for the whole group only (CSI
// DeleteSnapshot).
func errInGroup(view registry.View, snap registry.VolumeSnapshot) error {
	for _, group := range view.GroupSnapshots() {
		if group.Plugin == snap.Plugin && group.External == snap.Group {
			return registry.Errorf(registry.ErrConflict, "it belongs to %s and is removed only with it; "+
				"use `group-snapshot delete` or `group-snapshot deregister`", nameOf(group.SnapshotSpec))
		}
	}
	return registry.Errorf(registry.ErrConflict, "it belongs to group snapshot %q, which its plugin deletes as a whole",
		snap.Group)
}

// Deregister removes the record of the snapshot without a call to its plugin, which keeps the snapshot.
func (s *Snapshots) Deregister(ctx context.Context, _ registry.Call, name registry.SnapshotName) error {
	return s.deregister(ctx, snapshotName{name, false})
}

// DeregisterGroup is Deregister for a group snapshot.
func (s *Snapshots) DeregisterGroup(ctx context.Context, _ registry.Call, name registry.SnapshotName) error {
	return s.deregister(ctx, snapshotName{name, true})
}

func (s *Snapshots) deregister(ctx context.Context, name snapshotName) error {
	unlock, err := s.volumes.Locks.Lock(ctx, name, "its deregistration")
	if err != nil {
		return err
	}
	defer unlock()
	_, err = s.volumes.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		snap, found := name.find(view)
		switch {
		case !found:
			return registry.Change{}, name.errUnknown()
		case view.Get(snap.Key()) == nil: // it has no record of its own
			return registry.Change{}, errInGroup(view, snap)
		}
		change := registry.Change{Delete: []registry.Key{snap.Key()}, Events: []registry.Event{
			s.event(registry.EventSnapshotDeregistered, snap, "its plugin was not asked to delete it")}}
		if !snap.State.Unfinished() {
			return change, nil
		}
		late := lateSnapshot(snap)
		late.Failed = true // so that former executors do not repeat its deletion
		return change.And(view.GivenUp(late, snap.Senders, s.volumes.Node)), nil
	})
	return err
}

// snapshotter waits for the active controller of the snapshot's plugin. ErrUnsupported: the controller does not support
// this kind of snapshot.
func (s *Snapshots) snapshotter(ctx context.Context, snap registry.VolumeSnapshot) (registry.Instance, error) {
	needs, lacks := registry.CreateSnapshot, "plugin %s cannot make or delete snapshots (it lacks %s)"
	if snap.IsGroup() {
		needs, lacks = registry.GroupSnapshots, "plugin %s cannot make or delete group snapshots (it lacks %s)"
	}
	return s.volumes.capableController(ctx, snap.Plugin, false, needs, lacks)
}

// snapshot returns the stored snapshot of that name.
func (s *Snapshots) snapshot(ctx context.Context, name snapshotName) (snap registry.VolumeSnapshot, err error) {
	err = s.volumes.State.View(ctx, func(view registry.View) error {
		var found bool
		if snap, found = name.find(view); !found {
			return name.errUnknown()
		}
		return nil
	})
	return snap, err
}

// confirmedSnapshot returns the snapshot of that name if check accepts it, as Controller.confirmedVolume does.
func (s *Snapshots) confirmedSnapshot(
	ctx context.Context, name snapshotName, check func(registry.VolumeSnapshot) error,
) (snap registry.VolumeSnapshot, err error) {
	err = registry.Confirm(ctx, s.volumes.State, func(view registry.View) error {
		var found bool
		if snap, found = name.find(view); !found {
			return name.errUnknown()
		}
		if check == nil {
			return nil
		}
		return check(snap)
	})
	return snap, err
}

func (s *Snapshots) event(kind registry.EventKind, snap registry.VolumeSnapshot, detail string) registry.Event {
	text := nameOf(snap.SnapshotSpec).String()
	if detail != "" {
		text += ": " + detail
	}
	e := registry.Event{
		Kind: kind, Role: registry.RoleController, Plugin: snap.Plugin, Detail: text, At: s.volumes.Now(),
	}
	if !snap.IsGroup() {
		e.Volume, e.External = snap.VolumeName(), snap.Source
	}
	return e
}

// Run finishes snapshots without a caller until ctx ends.
func (s *Snapshots) Run(ctx context.Context) error {
	return runUnfinished(ctx, s.wakeup, s.unfinished, s.resume)
}

// unfinished lists the snapshots of which this node has to make calls.
func (s *Snapshots) unfinished(ctx context.Context) (list []snapshotRef, err error) {
	err = s.volumes.State.View(ctx, func(view registry.View) error {
		for _, snap := range view.SnapshotRecords() {
			if snap.State.Unfinished() && s.volumes.Executes(view, snap.ExecutedBy()) == nil {
				list = append(list, snapshotRef{nameOf(snap.SnapshotSpec), snap.CreateIndex})
			}
		}
		return nil
	})
	if err != nil {
		err = fmt.Errorf("load unfinished snapshots: %w", err)
	}
	return list, err
}

// resume tries until the snapshot is finished or ctx ends.
func (s *Snapshots) resume(ctx context.Context, ref snapshotRef, first bool) {
	w := &work{snapshotRef: ref, wanted: finished}
	for try := uint64(1); ; try++ {
		wait := resumeBackoff.Delay(try, rand.Float64())
		if !(first && try == 1) && !intent.Sleep(ctx, wait) {
			return
		}
		limited, cancel := context.WithTimeout(ctx, resumeLimit)
		done, err := s.step(limited, w)
		cancel()
		if done || ctx.Err() != nil || errors.Is(err, errElsewhere) {
			return
		}
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			s.volumes.logger.Warn("a snapshot is not finished yet", "snapshot", w.name.String(), "error", err)
		}
	}
}
