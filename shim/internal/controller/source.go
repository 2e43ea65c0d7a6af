package controller

import (
	"context"
	"errors"

	"holdfast/registry"
)

// sourceOf returns the source of the spec's volume, by the plugin's ids, and its size in bytes; 0: unknown. snapshot_id
// is the ID of a snapshot in the namespace, or otherwise the plugin's id of a snapshot.
func sourceOf(view registry.View, s registry.VolumeSpec) (from registry.Source, size int64, err error) {
	switch {
	case s.SnapshotID != "":
		return snapshotSource(view, s)
	case s.CloneExternal != "":
		known, found := view.VolumeByKey(registry.VolumeKey{Plugin: s.Plugin, External: s.CloneExternal})
		if found && known.State == registry.VolumeDeleting {
			return from, 0, errSourceDeleted("clone_external_id", s.CloneExternal, known.VolumeName().String())
		}
		return registry.Source{Volume: s.CloneExternal}, 0, nil
	case s.CloneID == "":
		return from, 0, nil
	}
	name := registry.VolumeName{Namespace: s.Namespace, ID: s.CloneID}
	volume, found := view.Volume(name)
	switch {
	case !found:
		return from, 0, registry.Errorf(registry.ErrNotFound,
			"clone_id names volume %s, which does not exist; "+
				"if it is the plugin's own id of a volume, write clone_external_id instead", name)
	case volume.Plugin != s.Plugin:
		return from, 0, registry.Invalid(
			"clone_id names volume %s, which belongs to plugin %s; a plugin clones only its own volumes",
			name, volume.Plugin)
	case volume.Node != "" && volume.Node != s.Node:
		return from, 0, errOnOtherNode("clone_id names volume "+name.String(), volume.Node, s)
	case volume.Ephemeral:
		return from, 0, registry.Errorf(registry.ErrUnsupported,
			"clone_id names volume %s, which is an inline volume of alloc %s; "+
				"choose a volume that was created or registered", name, volume.Owner)
	case volume.State != registry.VolumeReady:
		return from, 0, registry.Errorf(registry.ErrConflict,
			"clone_id names volume %s, which is %s; a volume must be %s to be cloned",
			name, volume.State, registry.VolumeReady)
	}
	return registry.Source{Volume: volume.External}, volume.Capacity,
		checkSize(s, volume.Capacity, "volume "+name.String())
}

// checkSource returns an error if a new volume cannot be filled from its source any more.
func checkSource(view registry.View, v registry.Volume) error {
	now, _, err := sourceOf(view, v.VolumeSpec)
	if err == nil && now != v.Source {
		err = registry.Errorf(registry.ErrConflict, "the source of volume %s was %s, and is now %s; "+
			"create the volume again", v.VolumeName(), v.Source, now)
	}
	return err
}

func snapshotSource(view registry.View, s registry.VolumeSpec) (from registry.Source, size int64, err error) {
	name := registry.SnapshotName{Namespace: s.Namespace, ID: registry.SnapshotID(s.SnapshotID)}
	snap, found := view.Snapshot(name)
	switch {
	case !found:
		for _, known := range view.Snapshots() {
			deleting := known.State == registry.SnapshotDeleting
			if deleting && known.Plugin == s.Plugin && known.External == s.SnapshotID {
				return from, 0, errSourceDeleted("snapshot_id", s.SnapshotID, known.SnapshotName().String())
			}
		}
		return registry.Source{Snapshot: s.SnapshotID}, 0, nil
	case snap.Plugin != s.Plugin:
		return from, 0, registry.Invalid(
			"snapshot_id names snapshot %s, which belongs to plugin %s; a plugin restores only its own snapshots",
			name, snap.Plugin)
	case snap.Node != "" && snap.Node != s.Node:
		return from, 0, errOnOtherNode("snapshot_id names snapshot "+name.String(), snap.Node, s)
	case snap.State != registry.SnapshotReady:
		return from, 0, registry.Errorf(registry.ErrConflict,
			"snapshot_id names snapshot %s, which is %s; a snapshot must be %s to be restored", name, snap.State,
			registry.SnapshotReady)
	}
	return registry.Source{Snapshot: snap.External}, snap.Size, checkSize(s, snap.Size, "snapshot "+name.String())
}

// confirmSnapshot returns once the last committed state has the snapshot that the spec names, or once etcd has
// confirmed that there is none. Otherwise sourceOf would take the name of a new snapshot for the plugin's id.
func (m *Controller) confirmSnapshot(ctx context.Context, spec registry.VolumeSpec) error {
	if spec.SnapshotID == "" {
		return nil
	}
	name := registry.SnapshotName{Namespace: spec.Namespace, ID: registry.SnapshotID(spec.SnapshotID)}
	err := registry.Confirm(ctx, m.State, func(view registry.View) error {
		if _, found := view.Snapshot(name); !found {
			return registry.Errorf(registry.ErrNotFound, "snapshot %s not found", name)
		}
		return nil
	})
	if errors.Is(err, registry.ErrNotFound) {
		return nil
	}
	return err
}

// errSourceDeleted returns the error for a source that the file names by the plugin's id, and whose deletion has begun.
func errSourceDeleted(field string, id registry.ExternalID, name string) error {
	return registry.Errorf(registry.ErrConflict, "%s names %q, which is %s and is being deleted", field, id, name)
}

func errOnOtherNode(what string, node registry.NodeName, s registry.VolumeSpec) error {
	return registry.Invalid("%s, which is on node %s, and the new volume would be on node %s; a plugin with "+
		"controller_scope = %q copies volumes on one node only", what, node, s.Node, registry.ScopeNode)
}

// checkSize returns an ErrInvalid if the spec asks for less than the size of the source. Either may be unknown (0).
func checkSize(s registry.VolumeSpec, size int64, source string) error {
	for _, limit := range []struct {
		name  string
		value int64
	}{{"capacity_min", s.CapacityMin}, {"capacity_max", s.CapacityMax}} {
		if limit.value > 0 && limit.value < size {
			return registry.Invalid("%s of volume %s is %d bytes, and %s has %d; raise it, or leave it out", limit.name,
				s.VolumeName(), limit.value, source, size)
		}
	}
	return nil
}
