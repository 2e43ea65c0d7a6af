package agent

import (
	"context"

	"holdfast/host"
)

// Tasks is what the agent tells of tasks that run a plugin, and what it is asked to do with them.
type Tasks interface {
	TaskStarting(ctx context.Context, t host.AllocTask) (host.Plan, error)
	TaskStarted(ctx context.Context, k host.TaskKey, attempt uint64) error
	TaskStopping(ctx context.Context, k host.TaskKey, attempt uint64) error
	TaskExited(ctx context.Context, k host.TaskKey, attempt uint64, code, signal int, final bool) error
	// Restarts calls fn with the complete list of restarts asked for, at once and after each change, until ctx ends.
	Restarts(ctx context.Context, fn func([]host.PendingRestart) error) error
}

// Volumes is what allocs with volumes need.
type Volumes interface {
	PrepareAlloc(ctx context.Context, g host.AllocGroup) (map[string]host.Plan, error)
	ReleaseAlloc(ctx context.Context, id host.AllocID) error
	// Fingerprints calls fn whenever a plugin has changed, until ctx ends. The agent takes it as a hint to try again what waits.
	Fingerprints(ctx context.Context, q host.PluginQuery, fn func(changed []host.PluginFingerprint, complete bool) error) error
	// Allocs says what an alloc waits for.
	Allocs(ctx context.Context, only host.AllocID) ([]host.AllocStatus, host.Seq, error)
	// Volumes says who holds a plugin's volumes, so that the plugin is not stopped under them.
	Volumes(ctx context.Context, q host.VolumeQuery) ([]host.VolumeStatus, host.Seq, error)
}

// Storage is the part of a *host.Host that running jobs needs.
type Storage interface {
	Tasks
	Volumes
}

var _ Storage = (*host.Host)(nil)
