package node

import (
	"context"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Driver calls node plugins. Calls for one volume are never concurrent. An error of a call that may have been sent is a
// *registry.CallError. The outcome of any other error counts as unknown.
type Driver interface {
	Stage(context.Context, registry.InstanceKey, csi.StageRequest) error
	Unstage(context.Context, registry.InstanceKey, csi.UnstageRequest) error
	Publish(context.Context, registry.InstanceKey, csi.PublishRequest) error
	Unpublish(context.Context, registry.InstanceKey, csi.UnpublishRequest) error
	// NodeExpand returns the capacity in the plugin's response; 0: none.
	NodeExpand(context.Context, registry.InstanceKey, csi.NodeExpandRequest) (int64, error)
	// Stats changes nothing, so it has no uncertain outcome.
	Stats(context.Context, registry.InstanceKey, csi.StatsRequest) (registry.VolumeReport, error)
	// NodeHealth and StorageHealth change nothing either.
	NodeHealth(context.Context, registry.InstanceKey, csi.HealthRequest) (registry.Condition, error)
	StorageHealth(context.Context, registry.InstanceKey) (registry.Condition, error)
}

// Kernel reads the mount table, and makes and removes directories. No method follows a path into a mount: a dead mount
// would block the caller.
type Kernel interface {
	// Mounted reports whether the host's path is a mount point.
	Mounted(path string) (bool, error)
	// Served reports whether a process serves what is mounted at the host's path.
	Served(path string) bool
	// MakeDir makes the directory and its parents, with mode 0700. It may exist.
	MakeDir(path string) error
	// RemoveDir removes an empty directory that is no mount point (rmdir(2)). It may be gone.
	RemoveDir(path string) error
	// Boot returns the ID of this boot.
	Boot() string
}

// Controller changes what nodes share: claims, and the attachments of volumes to nodes. Only Claim, AwaitAttach and
// AwaitDetach may run beside another call for the volume.
type Controller interface {
	// Provide returns the volume of a create block. It creates the volume unless it exists.
	Provide(
		ctx context.Context, call registry.Call, s registry.VolumeSpec, from registry.Origin,
	) (registry.Volume, error)
	// Discard has the volume deleted if the create block has made it and nothing claims it.
	Discard(ctx context.Context, name registry.VolumeName, from registry.Origin, alloc registry.AllocID) error
	// Claim is idempotent by the claim's key. The volume provides the mount options that the usage lacks. ErrConflict
	// names the holders. The claim follows the decisions of first in the same commit.
	Claim(ctx context.Context, c registry.Claim, first ...registry.Decision) (registry.Claim, error)
	// Feasible returns the claim as Claim would grant it, or every reason against it. planned count as granted.
	Feasible(
		view registry.View, v registry.Volume, c registry.Claim, planned []registry.Claim,
	) (registry.Claim, []registry.Infeasible)
	// FeasibleAttach returns why AwaitAttach would wait, or Attach would fail.
	FeasibleAttach(view registry.View, v registry.Volume, u registry.Usage, to intent.AttachTo) []registry.Infeasible
	// FeasibleCreate returns why Provide would wait or fail.
	FeasibleCreate(view registry.View, s registry.VolumeSpec) []registry.Infeasible
	// Unclaim releases a claim. last means that the node has released the volume; else another claim has to remain.
	Unclaim(ctx context.Context, k registry.ClaimKey, last bool) (existed bool, err error)
	// UnclaimChange returns the change that Unclaim commits.
	UnclaimChange(v registry.View, k registry.ClaimKey, last bool) (registry.Change, error)
	// SettleClaims waits until each claim that this node has asked for is stored, or will never be.
	SettleClaims(ctx context.Context) error
	// AwaitAttach and AwaitDetach return when the plugin can attach or detach the volume, or need not. They call waits
	// if they have to wait.
	AwaitAttach(ctx context.Context, v registry.Volume, to intent.AttachTo, waits func(what string)) error
	AwaitDetach(
		ctx context.Context, by intent.Caller, v registry.VolumeKey, node registry.NodeName, waits func(what string),
	) error
	Attach(ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage, to intent.AttachTo) error
	// Detach commits then with the success of the call.
	Detach(ctx context.Context, by intent.Caller, v registry.VolumeKey, node registry.NodeName,
		then ...registry.Decision) error
	// AbandonSteps returns what DetachOrAbandon would do.
	AbandonSteps(ctx context.Context, k registry.AttachmentKey) ([]registry.ReleaseStep, error)
	// DetachOrAbandon detaches, or deletes the record of the attachment if the plugin cannot detach.
	DetachOrAbandon(ctx context.Context, by intent.Caller, k registry.AttachmentKey, f registry.Forced) error
	// NodeExpanded records the node's progress with the volume's expansion. The node has stored it before.
	NodeExpanded(ctx context.Context, v registry.VolumeKey, done registry.NodeExpansion) error
	// Owned records the result of setting the ownership of the volume's files.
	Owned(ctx context.Context, v registry.VolumeKey, o registry.Ownership, r registry.OwnershipResult) error
	// LeaveAlteration closes an open expansion or modification at the controller, and reports whether there was one.
	LeaveAlteration(ctx context.Context, v registry.VolumeKey) (left bool, err error)
	// Settle brings an open call of the controller to a certain outcome, success or failure. Then it returns nil.
	Settle(ctx context.Context, by intent.Caller, open registry.Intent) error
}

// Mounter stages and publishes volumes. Calls for one volume are never concurrent.
type Mounter interface {
	Stage(ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage) error
	// Grow sends a pending expansion to the node plugin, if that is possible now, and returns the node's progress.
	// again also sends one that the plugin has refused. A refusal is no error.
	Grow(ctx context.Context, by intent.Caller, v registry.VolumeKey, again bool) (registry.NodeExpansion, error)
	// LeaveExpansion closes an open expansion on the node, and reports whether there was one.
	LeaveExpansion(ctx context.Context, v registry.VolumeKey) (left bool, err error)
	// Publish stages the volume before, if it is not staged. then is Then of the call, for the published volume. It may
	// be nil.
	Publish(ctx context.Context, by intent.Caller, v registry.Volume, k registry.ClaimKey, u registry.Usage,
		then func(registry.View, hooks.Published) (registry.Change, error)) (hooks.Published, error)
	// MountParts mounts parts of the published volume, and returns their paths.
	MountParts(ctx context.Context, k registry.ClaimKey, parts []hooks.Part) (map[string]string, error)
	// Own sets the ownership of the files of the published volume.
	Own(ctx context.Context, k registry.ClaimKey, o registry.Ownership) (registry.OwnershipResult, error)
	// Unused returns ErrConflict while tasks or containers with a mount namespace of their own have the volume mounted
	// that is published for the claim. Such a mount does not keep the plugin from unmounting its own.
	Unused(ctx context.Context, k registry.ClaimKey) error
	// Unpublish unmounts parts first. last: it unstages the volume afterwards, unless that is published for another
	// claim. then is Then of the last call.
	Unpublish(ctx context.Context, by intent.Caller, k registry.ClaimKey, last bool, then ...registry.Decision) error
	// Unstage does nothing while the volume is published.
	Unstage(ctx context.Context, by intent.Caller, v registry.VolumeKey) error
	// AbandonSteps returns what Abandon would do, and adds the paths that it would unmount to going: these count as
	// unmounted. Abandon takes down a claim's mounts without its plugin.
	AbandonSteps(
		ctx context.Context, k registry.ClaimKey, last bool, going map[string]bool,
	) ([]registry.ReleaseStep, error)
	Abandon(ctx context.Context, k registry.ClaimKey, last bool, by registry.Forced, why string) error
	// Down returns nil if the volume is not mounted for the claim on this node.
	Down(v registry.View, k registry.ClaimKey) error
	// Settle brings an open call of the node to a certain outcome, success or failure. Then it returns nil.
	Settle(ctx context.Context, by intent.Caller, open registry.Intent) error
}
