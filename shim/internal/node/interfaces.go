package node

import (
	"context"

	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Machine reads and changes the mounts and directories of this node. No method follows a path into a mount, because a
// dead mount would block the caller. Inspect, Unmount, SetOwnership and the methods for parts return within a limited
// time, even if a volume hangs. Their ErrUncertain means that the operation may still take effect; until it has ended,
// no other operation runs at its path.
type Machine interface {
	// Boot returns the ID of this boot.
	Boot() string
	// Mounted reports whether the host's path is a mount point.
	Mounted(path string) (bool, error)
	// Served reports whether a process serves what is mounted at the host's path.
	Served(path string) bool
	// Inspect returns what is at each path.
	Inspect(ctx context.Context, paths ...string) (map[string]mount.Info, error)
	// Users returns the users of the mount at each point and below.
	Users(points []string) (map[string][]mount.User, error)
	// Unmount unmounts the uppermost mount at a path, neither lazily nor by force. ErrConflict names the users.
	Unmount(ctx context.Context, path string) error
	// MakeDir makes the directory and its parents, with mode 0700. It may exist.
	MakeDir(path string) error
	// RemoveDir removes an empty directory that is no mount point (rmdir(2)). It may be gone.
	RemoveDir(path string) error
	// SetOwnership sets owner, group and mode of the volume mounted at target.
	SetOwnership(ctx context.Context, target string, o registry.Ownership) (registry.OwnershipResult, error)
	// HasPart reports whether a part of what is mounted at target is mounted at a path, and whether anything is mounted
	// there.
	HasPart(target, at string) (has, mounted bool, err error)
	// MountPart mounts a path of the volume at target at another path, where nothing is mounted. If create is set, it
	// makes missing directories; else a missing path is ErrNotFound. ErrDenied means that the path leads out of the
	// volume.
	MountPart(ctx context.Context, target, path, at string, create bool) error
	// UnmountPart unmounts a part, if there is one. ErrConflict means that it is in use, and names the users.
	UnmountPart(ctx context.Context, at string) error
}

// Controller changes what nodes share: claims, and the attachments of volumes to nodes. Only Claim, AwaitAttach and
// AwaitDetach may run beside another call for the volume.
type Controller interface {
	// Provide returns the volume of a create block. It creates the volume unless it exists.
	Provide(
		ctx context.Context, call registry.Call, s registry.VolumeSpec, from registry.Origin,
	) (registry.Volume, error)
	// Discard begins to delete the volume of an ended alloc, if the create block has made it and nothing claims it.
	Discard(ctx context.Context, name registry.VolumeName, from registry.Origin, alloc registry.AllocID) error
	// Claim is idempotent by the claim's key. The volume provides the mount options that the usage lacks. ErrConflict
	// names the holders. The same commit stores the decisions of first before the claim.
	Claim(ctx context.Context, c registry.Claim, first ...registry.Decision) (registry.Claim, error)
	// Feasible returns the claim as Claim would grant it, or every reason against it. The claims in planned
	// count as granted.
	Feasible(
		view registry.View, v registry.Volume, c registry.Claim, planned []registry.Claim,
	) (registry.Claim, []registry.Infeasible)
	// FeasibleAttach returns why AwaitAttach would wait, or Attach would wait or fail.
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
