package controller

import "holdfast/registry"

// snapshotName names a snapshot or a group snapshot. It is the key of its lock.
type snapshotName struct {
	registry.SnapshotName
	group bool
}

func nameOf(s registry.SnapshotSpec) snapshotName { return snapshotName{s.SnapshotName(), s.IsGroup()} }

func (n snapshotName) String() string {
	if n.group {
		return "group snapshot " + n.SnapshotName.String()
	}
	return "snapshot " + n.SnapshotName.String()
}

// command returns the start of a command for the snapshot, for an error. The caller adds the rest.
func (n snapshotName) command() string {
	if n.group {
		return "`group-snapshot "
	}
	return "`snapshot "
}

func (n snapshotName) find(view registry.View) (registry.VolumeSnapshot, bool) {
	if n.group {
		return view.GroupSnapshot(n.SnapshotName)
	}
	return view.Snapshot(n.SnapshotName)
}

func (n snapshotName) errUnknown() error {
	return registry.Errorf(registry.ErrNotFound, "%s not found", n)
}

// volumesIn returns the names of the volumes of which a snapshot is to be taken.
func volumesIn(spec registry.SnapshotSpec) (names []registry.VolumeName) {
	ids := spec.Volumes
	if !spec.IsGroup() {
		ids = []registry.VolumeID{spec.Volume}
	}
	for _, id := range ids {
		names = append(names, registry.VolumeName{Namespace: spec.Namespace, ID: id})
	}
	return names
}
