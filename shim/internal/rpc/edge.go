package rpc

import (
	"cmp"
	"slices"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// This file validates incoming messages once. A host may send values that no Parse function has checked.

func taskKey(m *pb.TaskKey) (registry.TaskKey, error) {
	k := wire.TaskKey(m)
	return k, cmp.Or(check(k.Alloc, registry.ParseAllocID), check(k.Task, registry.ParseTaskName))
}

func volumeName(m *pb.VolumeName) (registry.VolumeName, error) {
	n := wire.VolumeName(m)
	n.Namespace = cmp.Or(n.Namespace, registry.DefaultNamespace)
	return n, cmp.Or(check(n.Namespace, registry.ParseNamespace), check(n.ID, registry.ParseVolumeID))
}

func snapshotName(m *pb.SnapshotName) (registry.SnapshotName, error) {
	n := wire.SnapshotName(m)
	n.Namespace = cmp.Or(n.Namespace, registry.DefaultNamespace)
	return n, cmp.Or(check(n.Namespace, registry.ParseNamespace), check(n.ID, registry.ParseSnapshotID))
}

// check returns the error of parsing a value.
func check[T ~string](v T, parse func(string) (T, error)) error {
	_, err := parse(string(v))
	return err
}

// checkOptional checks a value that may be empty.
func checkOptional[T ~string](v T, parse func(string) (T, error)) error {
	if v == "" {
		return nil
	}
	return check(v, parse)
}

// checkFilters validates list filters. An invalid filter is an error, because no record could match it.
func checkFilters(namespace, volume, role, plugin string) error {
	return cmp.Or(
		checkOptional(registry.Namespace(namespace), registry.ParseNamespace),
		checkOptional(registry.VolumeID(volume), registry.ParseVolumeID),
		checkOptional(registry.Role(role), registry.ParseRole),
		checkOptional(registry.PluginID(plugin), registry.ParsePluginID),
	)
}

// passes reports whether the value passes a filter of a list. An empty filter passes all values.
func passes[T ~string](filter string, value T) bool { return filter == "" || filter == string(value) }

// checkSpec validates the spec and returns it with the default namespace and name filled in.
func checkSpec(s registry.VolumeSpec) (registry.VolumeSpec, error) {
	name, err := volumeName(wire.VolumeNameProto(s.VolumeName()))
	s.Namespace, s.Name = name.Namespace, cmp.Or(s.Name, string(s.ID))
	if err := cmp.Or(err,
		check(s.Plugin, registry.ParsePluginID),
		checkOptional(s.External, registry.ParseExternalID),
		checkOptional(s.CloneID, registry.ParseVolumeID),
		checkOptional(s.CloneExternal, registry.ParseExternalID),
		checkOptional(s.Node, registry.ParseNodeName),
		checkOptional(s.SnapshotID, registry.ParseExternalID),
		check(s.Name, registry.ParseCreateName),
	); err != nil {
		return s, err
	}
	sources := 0
	for _, source := range []string{string(s.CloneID), string(s.CloneExternal), string(s.SnapshotID)} {
		if source != "" {
			sources++
		}
	}
	switch {
	case sources > 1:
		return s, registry.Invalid("volume %s names %d sources; a volume is filled from one", s.ID, sources)
	case len(s.Capabilities) == 0:
		return s, registry.Invalid("volume %s names no capability; give at least one access_mode and attachment_mode",
			s.ID)
	case s.CapacityMin < 0 || s.CapacityMax < 0:
		return s, registry.Invalid("volume %s has a negative capacity", s.ID)
	case s.CapacityMax > 0 && s.CapacityMax < s.CapacityMin:
		return s, registry.Invalid("volume %s: capacity_max is smaller than capacity_min", s.ID)
	}
	for _, c := range s.Capabilities {
		if !slices.Contains(registry.AccessModes, c.Access) ||
			c.Attachment != registry.FileSystem && c.Attachment != registry.BlockDevice {
			return s, registry.Invalid("volume %s has an unknown capability: access mode %q, attachment mode %q",
				s.ID, c.Access, c.Attachment)
		}
	}
	return s, nil
}
