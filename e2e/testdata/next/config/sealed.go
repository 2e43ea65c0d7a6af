package config

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"holdfast/hooks"
	"holdfast/registry"
)

// Versions of sealed data. A new field that an older reader must not ignore gets a version of its own. Only data with
// that field has this version (see least). Other new fields need no version. sealedVersion is the newest;
// raise it with each new version.
const (
	firstVersion    = 1
	subPathsVersion = 2 // ignoring a sub_path would expose the whole volume to the task
	createVersion   = 3 // ignoring name or mutable_parameters of a create block would create another volume
	sealedVersion   = scratchVersion
)

// sealed is the JSON form of hooks.Sealed, with exactly one part.
type sealed struct {
	Version int              `json:"version"`
	Task    *hooks.TaskSpec  `json:"task,omitempty"`
	Group   *hooks.GroupSpec `json:"group,omitempty"`
}

func seal(s sealed) hooks.Sealed {
	s.Version = s.least()
	text, err := json.Marshal(s)
	if err != nil {
		panic(err) // plain data cannot fail
	}
	return text
}

// least returns the oldest version whose readers can safely read s.
func (s sealed) least() int {
	if s.Task != nil && s.Task.Plugin.ScratchDir != "" {
		return scratchVersion
	}
	if s.Group == nil {
		return firstVersion
	}
	version := firstVersion
	for _, mounts := range s.Group.Mounts {
		if slices.ContainsFunc(mounts, func(m hooks.VolumeMount) bool { return m.SubPath != "" }) {
			version = subPathsVersion
		}
	}
	for _, v := range s.Group.Volumes {
		if v.Create != nil && (v.Create.Name != "" || len(v.Create.Mutable) > 0) {
			version = createVersion
		}
	}
	return version
}

// OpenTask returns the sealed part of a task that runs a plugin. It ignores unknown fields and does not change the
// bytes.
func OpenTask(text hooks.Sealed) (hooks.TaskSpec, error) { return openTask(text, sealedVersion) }

// OpenRunning is OpenTask for a running task, of any version. Fields that this build does not know took effect at the
// start. Those that are read after the start (plugin, supervision) mean the same in every version.
func OpenRunning(text hooks.Sealed) (hooks.TaskSpec, error) { return openTask(text, math.MaxInt) }

func openTask(text hooks.Sealed, newest int) (hooks.TaskSpec, error) {
	s, err := unseal(text, newest)
	if err == nil && s.Task == nil {
		err = registry.Invalid("this is not the sealed part of a task that runs a plugin")
	}
	if err != nil {
		return hooks.TaskSpec{}, fmt.Errorf("open the sealed part of a task: %w", err)
	}
	return *s.Task, nil
}

// OpenGroup returns the sealed part of a group that uses volumes.
func OpenGroup(text hooks.Sealed) (hooks.GroupSpec, error) {
	s, err := unseal(text, sealedVersion)
	if err == nil && s.Group == nil {
		err = registry.Invalid("this is not the sealed part of a group that uses volumes")
	}
	if err != nil {
		return hooks.GroupSpec{}, fmt.Errorf("open the sealed part of a group: %w", err)
	}
	return *s.Group, nil
}

func unseal(text hooks.Sealed, newest int) (sealed, error) {
	var s sealed
	if err := json.Unmarshal(text, &s); err != nil {
		return s, registry.Errorf(registry.ErrDamaged, "it is not what was sealed: %w", err)
	}
	switch {
	case s.Version < 1:
		return s, registry.Errorf(registry.ErrDamaged, "it has no version")
	case s.Version > newest:
		return s, registry.Errorf(registry.ErrUnsupported,
			"it has version %d; this shim reads up to %d; use a newer shim", s.Version, newest)
	}
	return s, nil
}
