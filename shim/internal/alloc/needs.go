package alloc

import (
	"context"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Claims is who may use which volume.
type Claims interface {
	// Take is idempotent by the claim's key. What the usage does not say of mount options becomes the volume's. ErrConflict names the
	// holders.
	Take(ctx context.Context, c registry.Claim) (registry.Claim, error)
	// Release refuses while something of the claim may be published.
	Release(ctx context.Context, k registry.ClaimKey) (existed bool, err error)
}

// Controller attaches volumes to nodes, where their plugin wants it. Calls for one volume are never concurrent, but for those that wait.
type Controller interface {
	// AwaitAttach and AwaitDetach return once the plugin can be asked to attach or detach the volume, or has not to be. They call waits if
	// they have to wait.
	AwaitAttach(ctx context.Context, v registry.Volume, waits func(what string)) error
	AwaitDetach(ctx context.Context, by intent.Caller, v registry.VolumeKey, waits func(what string)) error
	Attach(ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage, node registry.NodeID) error
	Detach(ctx context.Context, by intent.Caller, v registry.VolumeKey) error
	// Settle has an open call of a controller come to a certain end: nil says that it has one, whichever.
	Settle(ctx context.Context, by intent.Caller, open registry.Intent) error
}

// Node stages and publishes volumes. Calls for one volume are never concurrent.
type Node interface {
	Stage(ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage) error
	// Grow has an expansion that is pending seen to, if it can be now. What the plugin refuses is no error.
	Grow(ctx context.Context, by intent.Caller, v registry.VolumeKey) error
	Publish(ctx context.Context, by intent.Caller, v registry.Volume, k registry.ClaimKey, u registry.Usage) (hooks.Published, error)
	// MountParts mounts parts of what is published, and says where.
	MountParts(ctx context.Context, k registry.ClaimKey, parts []hooks.Part) (map[string]string, error)
	// Unpublish takes parts off first.
	Unpublish(ctx context.Context, by intent.Caller, k registry.ClaimKey) error
	// Unstage does nothing while somebody uses the volume.
	Unstage(ctx context.Context, by intent.Caller, v registry.VolumeKey) error
	// Settle has an open call of a node come to a certain end: nil says that it has one, whichever.
	Settle(ctx context.Context, by intent.Caller, open registry.Intent) error
}

// Plugins is the live table of instances.
type Plugins interface {
	Find(role registry.Role, id registry.PluginID) (registry.Instance, bool)
	Await(ctx context.Context, role registry.Role, id registry.PluginID) (registry.Instance, error)
}
