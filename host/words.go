package host

import (
	"holdfast/hooks"
	"holdfast/registry"
)

// The words that callers of this package write and read. They are those of packages registry and hooks, so that an orchestrator needs
// this one import.
type (
	AllocID           = registry.AllocID
	AllocStatus       = registry.AllocStatus
	BootTime          = registry.BootTime
	Claim             = registry.Claim
	Diagnostics       = registry.Diagnostics
	Event             = registry.Event
	EventKind         = registry.EventKind
	Instance          = registry.Instance
	PendingRestart    = registry.PendingRestart
	PluginFingerprint = registry.PluginFingerprint
	PluginID          = registry.PluginID
	PluginTask        = registry.PluginTask
	Role              = registry.Role
	Seq               = registry.Seq
	TaskKey           = registry.TaskKey
	TaskName          = registry.TaskName
	VolumeName        = registry.VolumeName
	VolumeSpec        = registry.VolumeSpec
	VolumeID          = registry.VolumeID
	VolumeStatus      = registry.VolumeStatus

	AllocGroup = hooks.AllocGroup
	AllocTask  = hooks.AllocTask
	Job        = hooks.Job
	Operation  = hooks.Operation
	Plan       = hooks.Plan
	Sealed     = hooks.Sealed
)

// The kinds of error, for errors.Is.
var (
	ErrInvalid     = registry.ErrInvalid
	ErrNotFound    = registry.ErrNotFound
	ErrConflict    = registry.ErrConflict
	ErrExists      = registry.ErrExists
	ErrUnavailable = registry.ErrUnavailable
	ErrUncertain   = registry.ErrUncertain
	ErrUnsupported = registry.ErrUnsupported
	ErrExhausted   = registry.ErrExhausted
	ErrDenied      = registry.ErrDenied
	ErrDamaged     = registry.ErrDamaged
	ErrInternal    = registry.ErrInternal
)
