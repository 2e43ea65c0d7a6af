package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// accept checks the plugin's answer and copies it to the snapshot or group snapshot.
func (a snapshotAnswer) accept(view registry.View, snap *registry.VolumeSnapshot) error {
	if snap.IsGroup() {
		return acceptGroup(view, snap, a.group)
	}
	return acceptOne(view, snap, a.one)
}

// acceptOne checks the plugin's answer and copies it to the snapshot. If the answer cannot be used, it keeps only the
// id. It keeps nothing if the plugin says that the snapshot is of another volume: another client may have taken it, and
// its deletion would lose that client's data.
func acceptOne(view registry.View, snap *registry.VolumeSnapshot, answer csi.Snapshot) error {
	err := checkAnswer(view, *snap, snap.Each()[0], answer)
	if err == nil && answer.Group != "" {
		_, err = registry.ParseExternalID(string(answer.Group))
	}
	if err != nil {
		if answer.Volume == "" || answer.Volume == snap.Source {
			keepIDs(view, snap, answer.ID, nil)
		}
		return err
	}
	snap.External = registry.ExternalID(answer.ID)
	snap.Size, snap.Taken, snap.Group, snap.Failure = answer.Size, answer.Taken, answer.Group, registry.Failure{}
	snap.State = registry.SnapshotProcessing
	if answer.Ready {
		snap.State = registry.SnapshotReady
	}
	return nil
}

// acceptGroup checks the plugin's answer and copies it to the group snapshot. The group is ready once each of its
// snapshots is ready, whatever the plugin says of the group. If the answer cannot be used, acceptGroup keeps only the
// ids, or nothing if a snapshot is of another volume, as in acceptOne.
func acceptGroup(view registry.View, snap *registry.VolumeSnapshot, answer csi.GroupSnapshot) error {
	members, err := checkGroup(view, *snap, answer)
	if err != nil {
		if !slices.ContainsFunc(answer.Snapshots, func(one csi.Snapshot) bool { return isForeign(*snap, one) }) {
			keepIDs(view, snap, answer.ID, answer.Snapshots)
		}
		return err
	}
	ready := answer.Ready
	for _, m := range members {
		ready = ready && m.Ready
	}
	snap.External, snap.Taken, snap.Members = registry.ExternalID(answer.ID), answer.Taken, members
	snap.Failure, snap.Unusable, snap.State = registry.Failure{}, nil, registry.SnapshotProcessing
	if ready {
		snap.State = registry.SnapshotReady
	}
	return nil
}

// isForeign reports whether the plugin says that the snapshot is of a volume that does not belong to the group.
func isForeign(group registry.VolumeSnapshot, one csi.Snapshot) bool {
	return one.Volume != "" && !slices.ContainsFunc(group.Members, func(m registry.GroupMember) bool {
		return m.Source == one.Volume
	})
}

// keepIDs keeps the ids of an answer that cannot be used, so that the snapshot or group snapshot can be deleted. It
// keeps the ids of an earlier answer if there are any. If another record has one of the new ids, it keeps none of them.
func keepIDs(view registry.View, snap *registry.VolumeSnapshot, reported string, members []csi.Snapshot) {
	id, err := registry.ParseExternalID(reported)
	if err != nil || snap.External != "" {
		return
	}
	var ids []registry.ExternalID
	for _, one := range members {
		if m, err := registry.ParseExternalID(one.ID); err == nil && !slices.Contains(ids, m) {
			ids = append(ids, m)
		}
	}
	for _, other := range view.SnapshotRecords() {
		if other.Plugin != snap.Plugin || other.Key() == snap.Key() {
			continue
		}
		has := func(m registry.ExternalID) bool { return slices.Contains(other.Externals(), m) }
		taken := has(id)
		if snap.IsGroup() {
			taken = other.IsGroup() && other.External == id
		}
		if taken || slices.ContainsFunc(ids, has) {
			return
		}
	}
	snap.External, snap.Unusable = id, ids
}

// checkGroup returns the members of a group snapshot as the plugin describes them. There must be exactly one snapshot
// of each volume.
func checkGroup(
	view registry.View, snap registry.VolumeSnapshot, answer csi.GroupSnapshot,
) ([]registry.GroupMember, error) {
	id, err := registry.ParseExternalID(answer.ID)
	switch {
	case err != nil:
		return nil, err
	case snap.External != "" && snap.External != id:
		return nil, registry.Invalid("it calls the group snapshot %q, and called it %q before", id, snap.External)
	case len(answer.Snapshots) != len(snap.Members):
		return nil, registry.Invalid("group snapshot %q has %d snapshots, of %d volumes", id, len(answer.Snapshots),
			len(snap.Members))
	}
	for _, other := range view.GroupSnapshots() {
		if other.Plugin == snap.Plugin && other.External == id && other.Key() != snap.Key() {
			return nil, registry.Invalid("it calls the group snapshot %q, which is %s already",
				id, nameOf(other.SnapshotSpec))
		}
	}
	members, seen := slices.Clone(snap.Members), map[string]bool{}
	for i, m := range members {
		at := slices.IndexFunc(answer.Snapshots, func(one csi.Snapshot) bool { return one.Volume == m.Source })
		if at < 0 {
			return nil, registry.Invalid("group snapshot %q has no snapshot of volume %q", id, m.Source)
		}
		one := answer.Snapshots[at]
		if err := checkAnswer(view, snap, m, one); err != nil {
			return nil, err
		}
		if one.Group != id {
			return nil, registry.Invalid("snapshot %q in group snapshot %q says that it is in group %q",
				one.ID, id, one.Group)
		}
		if seen[one.ID] {
			return nil, registry.Invalid("group snapshot %q has snapshot %q twice", id, one.ID)
		}
		seen[one.ID] = true
		members[i].External, members[i].Size, members[i].Taken = registry.ExternalID(one.ID), one.Size, one.Taken
		members[i].Ready = one.Ready
	}
	return members, nil
}

// checkAnswer checks the plugin's description of the snapshot of one volume.
func checkAnswer(
	view registry.View, snap registry.VolumeSnapshot, m registry.GroupMember, answer csi.Snapshot,
) error {
	id, err := registry.ParseExternalID(answer.ID)
	if err == nil {
		_, err = registry.ParseExternalID(string(answer.Volume))
	}
	switch {
	case err != nil:
		return err
	case m.External != "" && m.External != id:
		return registry.Invalid("it calls the snapshot %q, and called it %q before", id, m.External)
	case answer.Volume != m.Source:
		return registry.Invalid("it was asked for a snapshot of volume %q, and says that %q is one of volume %q",
			m.Source, id, answer.Volume)
	case answer.Size < 0:
		return registry.Invalid("the size of snapshot %q is %d", id, answer.Size)
	}
	for _, other := range view.SnapshotRecords() {
		if other.Plugin == snap.Plugin && other.Key() != snap.Key() && slices.Contains(other.Externals(), id) {
			return registry.Invalid("it calls the snapshot %q, which belongs to %s already",
				id, nameOf(other.SnapshotSpec))
		}
	}
	return nil
}

// storeTaken stores the outcome of CreateSnapshot or GetSnapshot. next is the snapshot as the plugin describes it.
// fresh means that no other call may have taken the snapshot.
func (s *Snapshots) storeTaken(
	ctx context.Context, snap, next registry.VolumeSnapshot, rpc registry.RPC, failure *registry.CallError, fresh bool,
) (*registry.VolumeSnapshot, error) {
	if failure == nil {
		return s.store(ctx, snap, next, s.successEvents(snap, next), nil)
	}
	next.Failure = registry.Failure{RPC: rpc, Code: failure.Code, Detail: failure.Detail, Since: s.volumes.Now()}
	detail := failure.Code + ": " + failure.Detail
	switch {
	case keepsState(rpc, snap, failure):
		return s.store(ctx, snap, next, nil, failure)
	case fresh && failure.Code != "OK":
		return nil, errors.Join(failure, s.remove(ctx, snap, s.event(registry.EventSnapshotFailed, snap, detail)))
	}
	next.State = registry.SnapshotFailed
	return s.store(ctx, snap, next, []registry.Event{s.event(registry.EventSnapshotFailed, next, detail)}, failure)
}

// keepsState reports whether a snapshot that is being taken keeps its state after a failure, so that the call is
// repeated.
func keepsState(rpc registry.RPC, snap registry.VolumeSnapshot, failure *registry.CallError) bool {
	switch {
	case failure.Code == "OK": // the answer cannot be used
		return false
	case rpc == registry.GetSnapshotRPC, rpc == registry.GetGroupSnapshotRPC:
		return failure.Code != "NOT_FOUND"
	case failure.Outcome != registry.OutcomeFailed, snap.State == registry.SnapshotProcessing:
		return true
	}
	earlier := snap.ModifyIndex != snap.CreateIndex // an earlier call may have taken the snapshot
	return earlier && intent.RejectsCall(failure.Code)
}

// successEvents returns the events of a success.
func (s *Snapshots) successEvents(was, is registry.VolumeSnapshot) (events []registry.Event) {
	if was.External == "" {
		events = append(events, s.event(registry.EventSnapshotTaken, is, ""))
	}
	if is.State == registry.SnapshotReady {
		size := int64(0)
		for _, m := range is.Each() {
			size += m.Size
		}
		events = append(events, s.event(registry.EventSnapshotReady, is, fmt.Sprintf("%d bytes", size)))
	}
	return events
}

// storeDeleted stores the outcome of DeleteSnapshot. fresh means that no earlier call may have deleted the snapshot.
func (s *Snapshots) storeDeleted(
	ctx context.Context, snap registry.VolumeSnapshot, rpc registry.RPC, failure *registry.CallError, fresh bool,
) (*registry.VolumeSnapshot, error) {
	if failure == nil || failure.Code == "NOT_FOUND" {
		return nil, s.remove(ctx, snap, s.event(registry.EventSnapshotDeleted, snap, ""))
	}
	next := snap
	next.Failure = registry.Failure{RPC: rpc, Code: failure.Code, Detail: failure.Detail, Since: s.volumes.Now()}
	// If an earlier call has no certain outcome, only FAILED_PRECONDITION shows that the snapshot still exists.
	if failure.Outcome != registry.OutcomeFailed || !fresh && failure.Code != "FAILED_PRECONDITION" {
		return s.store(ctx, snap, next, nil, failure)
	}
	next.State, next.Before = snap.Before, ""
	return s.store(ctx, snap, next,
		[]registry.Event{s.event(registry.EventSnapshotKept, next, failure.Code+": "+failure.Detail)}, failure)
}

// store commits the next record, unless it repeats the last failure and the senders stay. It returns the failure of the
// call, if any.
func (s *Snapshots) store(
	ctx context.Context, was, next registry.VolumeSnapshot, events []registry.Event, failure *registry.CallError,
) (*registry.VolumeSnapshot, error) {
	var err error
	ended := false // the call has ended at the plugin of this node
	if failure != nil {
		err = failure
		ended = intent.EndsCall(failure) && slices.Contains(next.Senders, s.volumes.Node) &&
			s.volumes.Executors.OneInstance(next.Plugin)
	}
	sameFailure := next.Failure.RPC == was.Failure.RPC && next.Failure.Code == was.Failure.Code
	if sameFailure {
		next.Failure.Since = was.Failure.Since
	}
	unchanged := sameFailure && next.State == was.State && next.External == was.External &&
		slices.Equal(next.Members, was.Members)
	if unchanged && !ended && len(events) == 0 {
		return &next, err
	}
	return &next, errors.Join(err, s.commit(ctx, was, func(now registry.VolumeSnapshot) registry.Change {
		next.Senders = now.Senders
		if ended {
			next.Senders = intent.WithoutSender(now.Senders, s.volumes.Node)
		}
		return registry.Change{Put: []registry.Record{next}, Events: events}
	}))
}

// remove deletes the record, with an event.
func (s *Snapshots) remove(ctx context.Context, snap registry.VolumeSnapshot, event registry.Event) error {
	return s.commit(ctx, snap, func(registry.VolumeSnapshot) registry.Change {
		return registry.Change{Delete: []registry.Key{snap.Key()}, Events: []registry.Event{event}}
	})
}

// commit stores an outcome, even if ctx has ended. If the record is gone, it stores nothing.
func (s *Snapshots) commit(
	ctx context.Context, was registry.VolumeSnapshot, change func(now registry.VolumeSnapshot) registry.Change,
) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), intent.Grace)
	defer cancel()
	_, err := s.volumes.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		now, found := view.Get(was.Key()).(registry.VolumeSnapshot)
		switch {
		case !found || now.CreateIndex != was.CreateIndex:
			return registry.Change{}, nil
		case now.State != was.State:
			return registry.Change{}, registry.Errorf(registry.ErrConflict, "%s is %s now",
				nameOf(was.SnapshotSpec), now.State)
		}
		if err := s.volumes.Executes(view, was.ExecutedBy()); err != nil {
			return registry.Change{}, err // the new executor repeats the call
		}
		return s.endedChange(view, now, change(now)), nil
	})
	if err != nil {
		err = fmt.Errorf("store the outcome: %w", err)
	}
	return err
}
