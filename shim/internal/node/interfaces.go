package node

import (
	"context"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Driver is what node needs of a node plugin. Calls for one volume are never concurrent. Every error of a call that was
// or may have been sent is a *registry.CallError or is treated as one of unknown outcome.
type Driver interface {
	Stage(context.Context, registry.InstanceKey, csi.StageRequest) error
	Unstage(context.Context, registry.InstanceKey, csi.UnstageRequest) error
	Publish(context.Context, registry.InstanceKey, csi.PublishRequest) error
	Unpublish(context.Context, registry.InstanceKey, csi.UnpublishRequest) error
	// Grow returns the capacity that the plugin tells; 0: it tells none.
	Grow(context.Context, registry.InstanceKey, csi.GrowRequest) (int64, error)
	// Stats changes nothing: it may be under way beside another call, and its error never means that something is
	// uncertain.
	Stats(context.Context, registry.InstanceKey, csi.StatsRequest) (registry.VolumeReport, error)
}

// Kernel is the mount table, and the few things done to directories that may be mount points. None of them may follow a
// path into a mount: a dead one would freeze its caller.
type Kernel interface {
	// Mounted says whether path, as the host sees it, is a mount point.
	Mounted(path string) (bool, error)
	// MakeDir makes the directory and its parents, with mode 0700. It may exist.
	MakeDir(path string) error
	// RemoveDir removes an empty directory that is no mount point (rmdir(2)). It may be gone.
	RemoveDir(path string) error
	// Boot is the boot id of this boot.
	Boot() string
}

// Controller is what node needs of the records and calls that nodes share: claims, and the attachment of volumes to
// nodes where their plugin wants it. Calls for one volume are never concurrent, but for Claim and Await.
type Controller interface {
	// Claim is idempotent by the claim's key. What the usage does not say of mount options becomes the volume's.
	// ErrConflict names the holders.
	Claim(ctx context.Context, c registry.Claim) (registry.Claim, error)
	// Unclaim gives a claim up. last: the node has taken the volume down for it; else another claim has to remain.
	Unclaim(ctx context.Context, k registry.ClaimKey, last bool) (existed bool, err error)
	// AwaitAttach and AwaitDetach return once the plugin can be asked to attach or detach the volume, or has not to be.
	// They call waits if they have to wait.
	AwaitAttach(ctx context.Context, v registry.Volume, to intent.AttachTo, waits func(what string)) error
	AwaitDetach(
		ctx context.Context, by intent.Caller, v registry.VolumeKey, node registry.NodeName, waits func(what string),
	) error
	Attach(ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage, to intent.AttachTo) error
	Detach(ctx context.Context, by intent.Caller, v registry.VolumeKey, node registry.NodeName) error
	// NodeExpanded records what the node has done of the volume's expansion. The node has stored that before.
	NodeExpanded(ctx context.Context, v registry.VolumeKey, done registry.NodeExpansion) error
	// LeaveExpansion closes an open expansion at the controller, and says whether there was one.
	LeaveExpansion(ctx context.Context, v registry.VolumeKey) (left bool, err error)
	// Settle has an open call of a controller come to a certain end: nil says that it has one, whichever.
	Settle(ctx context.Context, by intent.Caller, open registry.Intent) error
}

// Mounter stages and publishes volumes. Calls for one volume are never concurrent.
type Mounter interface {
	Stage(ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage) error
	// Grow makes what is pending of an expansion, if it can now, and returns how far the node has come. again: also
	// what the plugin has refused. What the plugin refuses is no error.
	Grow(ctx context.Context, by intent.Caller, v registry.VolumeKey, again bool) (registry.NodeExpansion, error)
	// LeaveExpansion closes an open expansion on the node, and says whether there was one.
	LeaveExpansion(ctx context.Context, v registry.VolumeKey) (left bool, err error)
	Publish(ctx context.Context, by intent.Caller, v registry.Volume, k registry.ClaimKey,
		u registry.Usage) (hooks.Published, error)
	// MountParts mounts parts of what is published, and says where.
	MountParts(ctx context.Context, k registry.ClaimKey, parts []hooks.Part) (map[string]string, error)
	// Unpublish takes parts off first.
	Unpublish(ctx context.Context, by intent.Caller, k registry.ClaimKey) error
	// Unstage does nothing while somebody uses the volume.
	Unstage(ctx context.Context, by intent.Caller, v registry.VolumeKey) error
	// Down returns nil if nothing that the claim stands for is up on this node.
	Down(ctx context.Context, k registry.ClaimKey) error
	// Settle has an open call of a node come to a certain end: nil says that it has one, whichever.
	Settle(ctx context.Context, by intent.Caller, open registry.Intent) error
}
