package controller

import (
	"slices"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// acceptOne copies the plugin's answer to the snapshot after checking it. Of an answer that cannot be used it keeps only
// the id, and not even that if the plugin says that the snapshot is of another volume: others may have taken it, and
// its deletion would lose their data.
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

// acceptGroup copies the plugin's answer to the group snapshot after checking it. The group is ready once each of its
// snapshots is, whatever the plugin says of the group. Of an answer that cannot be used it keeps only the ids, and none if
// it has a snapshot of another volume, as in acceptOne.
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

// isForeign reports whether the plugin says that a snapshot of its answer is of a volume that the group does not have.
func isForeign(group registry.VolumeSnapshot, one csi.Snapshot) bool {
	return one.Volume != "" && !slices.ContainsFunc(group.Members, func(m registry.GroupMember) bool {
		return m.Source == one.Volume
	})
}

// keepIDs keeps the ids of an answer that cannot be used, so that the snapshot or group snapshot can be deleted. The ids
// of an earlier answer stay. None is kept if another record has one of them.
func keepIDs(view registry.View, snap *registry.VolumeSnapshot, answered string, members []csi.Snapshot) {
	id, err := registry.ParseExternalID(answered)
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
		same := other.IsGroup() && other.External == id
		if !snap.IsGroup() {
			same = has(id)
		}
		if same || slices.ContainsFunc(ids, has) {
			return
		}
	}
	snap.External, snap.Unusable = id, ids
}

// checkGroup returns the members of a group snapshot as the plugin describes them: one snapshot of each volume, and none
// of another.
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
			return nil, registry.Invalid("it calls the group snapshot %q, which is %s already", id, nameOf(other.SnapshotSpec))
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
			return nil, registry.Invalid("snapshot %q in group snapshot %q says that it is in group %q", one.ID, id, one.Group)
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

// checkAnswer checks what the plugin says of the snapshot of one volume.
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
			return registry.Invalid("it calls the snapshot %q, which belongs to %s already", id, nameOf(other.SnapshotSpec))
		}
	}
	return nil
}
