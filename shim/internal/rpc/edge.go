package rpc

import (
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// This file validates incoming messages once. A host may send values that no Parse function has checked.

func taskKey(m *pb.TaskKey) (registry.TaskKey, error) {
	k := wire.TaskKey(m)
	if _, err := registry.ParseAllocID(string(k.Alloc)); err != nil {
		return k, err
	}
	_, err := registry.ParseTaskName(string(k.Task))
	return k, err
}

func volumeName(m *pb.VolumeName) (registry.VolumeName, error) {
	n := wire.VolumeName(m)
	if n.Namespace == "" {
		n.Namespace = registry.DefaultNamespace
	}
	if _, err := registry.ParseNamespace(string(n.Namespace)); err != nil {
		return n, err
	}
	_, err := registry.ParseVolumeID(string(n.ID))
	return n, err
}

// optional parses s unless it is empty.
func optional[T ~string](s string, parse func(string) (T, error)) (T, error) {
	if s == "" {
		return "", nil
	}
	return parse(s)
}

// filters validates list filters. An invalid filter could match no record, so it is an error.
func filters(namespace, volume, role, plugin string) error {
	if _, err := optional(namespace, registry.ParseNamespace); err != nil {
		return err
	}
	if _, err := optional(volume, registry.ParseVolumeID); err != nil {
		return err
	}
	if _, err := optional(role, registry.ParseRole); err != nil {
		return err
	}
	_, err := optional(plugin, registry.ParsePluginID)
	return err
}

// checkSpec validates the spec and returns it with the default namespace and name filled in.
func checkSpec(s registry.VolumeSpec) (registry.VolumeSpec, error) {
	name, err := volumeName(wire.VolumeNameProto(s.VolumeName()))
	if err != nil {
		return s, err
	}
	s.Namespace = name.Namespace
	if _, err := registry.ParsePluginID(string(s.Plugin)); err != nil {
		return s, err
	}
	sources := 0
	for _, external := range []registry.ExternalID{s.External, s.CloneExternal, s.SnapshotID} {
		if _, err := optional(string(external), registry.ParseExternalID); err != nil {
			return s, err
		}
	}
	if _, err := optional(string(s.CloneID), registry.ParseVolumeID); err != nil {
		return s, err
	}
	for _, source := range []string{string(s.CloneID), string(s.CloneExternal), string(s.SnapshotID)} {
		if source != "" {
			sources++
		}
	}
	if sources > 1 {
		return s, registry.Invalid("volume %s names %d sources; a volume is filled from one", s.ID, sources)
	}
	if len(s.Capabilities) == 0 {
		return s, registry.Invalid("volume %s names no capability; say at least one access_mode and attachment_mode",
			s.ID)
	}
	if s.Name == "" {
		s.Name = string(s.ID)
	}
	_, err = registry.ParseCreateName(s.Name)
	return s, err
}
