package host

import (
	"holdfast/hooks"
	"holdfast/registry"
)

// Types of packages registry and hooks. An orchestrator rarely names others, such as those in a VolumeSpec.
type (
	AllocID          = registry.AllocID
	AllocStatus      = registry.AllocStatus
	BootTime         = registry.BootTime
	CallMetric       = registry.CallMetric
	CapacityQuery    = registry.CapacityQuery
	CapacityRange    = registry.CapacityRange
	EndpointUse      = registry.EndpointUse
	ExternalID       = registry.ExternalID
	Claim            = registry.Claim
	Diagnosis        = registry.Diagnosis
	Diagnostic       = registry.Diagnostic
	Diagnostics      = registry.Diagnostics
	Event            = registry.Event
	Blocks           = registry.Blocks
	BlockQuery       = registry.BlockQuery
	BlockRange       = registry.BlockRange
	EventKind        = registry.EventKind
	Finding          = registry.Finding
	FindingAction    = registry.FindingAction
	FindingKind      = registry.FindingKind
	Force            = registry.Force
	Infeasible       = registry.Infeasible
	InfeasibleKind   = registry.InfeasibleKind
	Instance         = registry.Instance
	InstanceKey      = registry.InstanceKey
	NodeFeasible     = registry.NodeFeasible
	NodeName         = registry.NodeName
	NodePluginStatus = registry.NodePluginStatus
	NodeStatus       = registry.NodeStatus
	PluginCapacity   = registry.PluginCapacity
	PluginID         = registry.PluginID
	PluginTask       = registry.PluginTask
	ReleaseAction    = registry.ReleaseAction
	ReleaseStep      = registry.ReleaseStep
	Role             = registry.Role
	Seq              = registry.Seq
	Snapshot         = registry.VolumeSnapshot
	VolumeUpdate     = registry.VolumeUpdate
	FieldChange      = registry.FieldChange
	PluginVolume     = registry.PluginVolume
	SnapshotID       = registry.SnapshotID
	SnapshotName     = registry.SnapshotName
	SnapshotSpec     = registry.SnapshotSpec
	TaskKey          = registry.TaskKey
	TaskName         = registry.TaskName
	VolumeName       = registry.VolumeName
	VolumeSpec       = registry.VolumeSpec
	VolumeID         = registry.VolumeID
	VolumeStatus     = registry.VolumeStatus
	VolumeUsage      = registry.VolumeUsage

	AllocGroup  = hooks.AllocGroup
	AllocTask   = hooks.AllocTask
	Bind        = hooks.Bind
	Device      = hooks.Device
	DeviceRule  = hooks.DeviceRule
	Dir         = hooks.Dir
	Env         = hooks.Env
	Group       = hooks.Group
	Job         = hooks.Job
	Operation   = hooks.Operation
	Plan        = hooks.Plan
	Propagation = hooks.Propagation
	Sealed      = hooks.Sealed
	Task        = hooks.Task
)

// The plan operations, for Config.Operations, and the propagation of a Bind.
const (
	OpDir        = hooks.OpDir
	OpBind       = hooks.OpBind
	OpEnv        = hooks.OpEnv
	OpDevice     = hooks.OpDevice
	OpDeviceRule = hooks.OpDeviceRule

	Private       = hooks.Private
	HostToTask    = hooks.HostToTask
	Bidirectional = hooks.Bidirectional
)

// Values that callers compare fields of answers with.
const (
	RoleController = registry.RoleController
	RoleNode       = registry.RoleNode
	Healthy        = registry.Healthy
	Unhealthy      = registry.Unhealthy
	EventResync    = registry.EventResync
)

// The states of a node.
const (
	NodeReady        = registry.NodeReady
	NodeDraining     = registry.NodeDraining
	NodeOutOfService = registry.NodeOutOfService
	NodeFenced       = registry.NodeFenced
)

// The kinds of reasons of Feasible and FeasibleNodes.
const (
	InfeasibleRequest     = registry.InfeasibleRequest
	InfeasibleNoVolume    = registry.InfeasibleNoVolume
	InfeasibleNotReady    = registry.InfeasibleNotReady
	InfeasibleUnsupported = registry.InfeasibleUnsupported
	InfeasibleClaimed     = registry.InfeasibleClaimed
	InfeasibleTopology    = registry.InfeasibleTopology
	InfeasibleLimit       = registry.InfeasibleLimit
	InfeasibleNoPlugin    = registry.InfeasibleNoPlugin
	InfeasibleUnhealthy   = registry.InfeasibleUnhealthy
	InfeasibleNotFormed   = registry.InfeasibleNotFormed
	InfeasibleNode        = registry.InfeasibleNode
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
