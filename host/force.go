package host

import (
	"context"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// ForceReleaseAlloc ends a release of an alloc that cannot end by itself, because a plugin or its backend is gone for
// good. It sends each CSI call that can still succeed, skips the others, unmounts what nothing uses, and releases the
// claims. A mount in use is never unmounted: ErrConflict names its users. f.Confirm is the ID of the alloc, because
// skipped calls may lose data. Without it, ErrDenied says what may be lost. ErrConflict: ReleaseAlloc was not called
// before. ForceReleaseAlloc returns the steps, or none if an earlier shim has carried them out.
func (h *Host) ForceReleaseAlloc(ctx context.Context, id AllocID, f Force) ([]ReleaseStep, error) {
	reply, err := call(ctx, h, writes, pb.NewAllocsClient, pb.AllocsClient.ForceRelease,
		&pb.ForceReleaseRequest{Call: mutating(), Alloc: string(id), Force: wire.ForceProto(f)})
	return convert(reply.GetSteps(), wire.ReleaseStep), err
}

// ForceReleaseClaim releases the claims of an alloc on a volume if they cannot be released in order: claims of a node
// that is not alive, or of this node if it does not know the alloc. Attachments that no other claim needs are detached
// first. f.Confirm is the ID of the alloc: if the node still has the volume mounted, two writers may destroy its data.
// ErrDenied: f.Confirm is not that ID. ErrConflict says who can release the claim instead. ErrNotFound: there is no
// such claim.
func (h *Host) ForceReleaseClaim(ctx context.Context, n VolumeName, alloc AllocID, f Force) ([]ReleaseStep, error) {
	reply, err := call(ctx, h, writes, pb.NewClaimsClient, pb.ClaimsClient.ForceRelease, &pb.ForceReleaseClaimRequest{
		Call: mutating(), Name: wire.VolumeNameProto(n), Alloc: string(alloc), Force: wire.ForceProto(f)})
	return convert(reply.GetSteps(), wire.ReleaseStep), err
}

// DetachVolume takes down attachments of a volume that is not in use (ControllerUnpublishVolume of CSI): from one node,
// or from all if node is empty. A node name that is not used any more is allowed. Another node than this one has to be
// fenced first (Config.Fence). Only a host that cannot fence needs the ID of the volume in f.Confirm instead; ErrDenied
// says what may be lost. With the confirmation, a call whose plugin is gone is skipped. ErrNotFound: there is no such
// attachment. Once it has begun, a detach continues without its caller, until it has certainly ended or the volume is
// used again.
func (h *Host) DetachVolume(ctx context.Context, n VolumeName, node string, f Force) ([]ReleaseStep, error) {
	reply, err := call(ctx, h, writes, pb.NewVolumesClient, pb.VolumesClient.Detach, &pb.DetachVolumeRequest{
		Call: mutating(), Name: wire.VolumeNameProto(n), Node: node, Force: wire.ForceProto(f)})
	return convert(reply.GetSteps(), wire.ReleaseStep), err
}
