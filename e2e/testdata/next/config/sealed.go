package config

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"holdfast/hooks"
	"holdfast/registry"
)

// sealedVersion is raised when an older reader would misread what a newer one writes. New fields do not raise it,
// unless what would be done without them is worse than nothing: then what has them is of a newer version, and the rest
// is not.
const (
	firstVersion    = 1
	subPathsVersion = 2 // a task that is to see a part of a volume must not be given all of it
	sealedVersion   = scratchVersion
)

// sealed is the form of hooks.Sealed: JSON, exactly one of the parts.
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

// least is the oldest version whose readers know all that matters of s.
func (s sealed) least() int {
	if s.Task != nil && s.Task.Plugin.ScratchDir != "" {
		return scratchVersion
	}
	if s.Group == nil {
		return firstVersion
	}
	for _, mounts := range s.Group.Mounts {
		if slices.ContainsFunc(mounts, func(m hooks.VolumeMount) bool { return m.SubPath != "" }) {
			return subPathsVersion
		}
	}
	return firstVersion
}

// OpenTask is our part of a task that runs a plugin. Fields that it does not know are left alone: the bytes stay what
// they are.
func OpenTask(text hooks.Sealed) (hooks.TaskSpec, error) { return openTask(text, sealedVersion) }

// OpenRunning is our part of a task that was started already, whichever shim has started it: what only a newer one
// knows was done then, and what is read of a task that runs (its plugin, and how that is watched) means the same in
// every version.
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

// OpenGroup is our part of a group that uses volumes.
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
