package csi

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"holdfast/registry"
)

// Stage is NodeStageVolume.
func (f *Fleet) Stage(ctx context.Context, at registry.InstanceKey, r StageRequest) error {
	hide := hidden(r.Secrets, r.Usage.MountFlags, r.PublishContext, r.VolumeContext)
	return f.send(ctx, registry.NodeStageRPC, at, hide, func(ctx context.Context, cc grpc.ClientConnInterface) error {
		_, err := csi.NewNodeClient(cc).NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId: string(r.VolumeID), PublishContext: r.PublishContext, StagingTargetPath: r.StagingPath,
			VolumeCapability: usageCapability(r.Usage), Secrets: reveal(r.Secrets), VolumeContext: r.VolumeContext,
		})
		return err
	})
}

// Unstage is NodeUnstageVolume.
func (f *Fleet) Unstage(ctx context.Context, at registry.InstanceKey, r UnstageRequest) error {
	return f.send(ctx, registry.NodeUnstageRPC, at, later(ctx, r.Private), func(ctx context.Context, cc grpc.ClientConnInterface) error {
		_, err := csi.NewNodeClient(cc).NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
			VolumeId: string(r.VolumeID), StagingTargetPath: r.StagingPath,
		})
		return err
	})
}

// Publish is NodePublishVolume.
func (f *Fleet) Publish(ctx context.Context, at registry.InstanceKey, r PublishRequest) error {
	hide := hidden(r.Secrets, r.Usage.MountFlags, r.PublishContext, r.VolumeContext)
	return f.send(ctx, registry.NodePublishRPC, at, hide, func(ctx context.Context, cc grpc.ClientConnInterface) error {
		_, err := csi.NewNodeClient(cc).NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
			VolumeId: string(r.VolumeID), PublishContext: r.PublishContext, StagingTargetPath: r.StagingPath, TargetPath: r.TargetPath,
			VolumeCapability: usageCapability(r.Usage), Readonly: r.Usage.ReadOnly, Secrets: reveal(r.Secrets), VolumeContext: r.VolumeContext,
		})
		return err
	})
}

// Unpublish is NodeUnpublishVolume.
func (f *Fleet) Unpublish(ctx context.Context, at registry.InstanceKey, r UnpublishRequest) error {
	return f.send(ctx, registry.NodeUnpublishRPC, at, later(ctx, r.Private), func(ctx context.Context, cc grpc.ClientConnInterface) error {
		_, err := csi.NewNodeClient(cc).NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
			VolumeId: string(r.VolumeID), TargetPath: r.TargetPath,
		})
		return err
	})
}

// Grow is NodeExpandVolume. It returns the capacity that the plugin tells; 0: it tells none.
func (f *Fleet) Grow(ctx context.Context, at registry.InstanceKey, r GrowRequest) (capacity int64, err error) {
	hide := hidden(r.Secrets, r.Usage.MountFlags, r.Private.Contexts...)
	err = f.send(ctx, registry.NodeExpandRPC, at, hide, func(ctx context.Context, cc grpc.ClientConnInterface) error {
		reply, err := csi.NewNodeClient(cc).NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
			VolumeId: string(r.VolumeID), VolumePath: r.Path, CapacityRange: capacityRange(r.Range), StagingTargetPath: r.StagingPath,
			VolumeCapability: maybeCapability(r.Usage), Secrets: reveal(r.Secrets),
		})
		capacity = reply.GetCapacityBytes()
		return err
	})
	return capacity, err
}

// later is the veil of a call that carries nothing private.
func later(ctx context.Context, private func(context.Context) Private) veil {
	if private == nil {
		return veil{}
	}
	return veil{more: func() (veil, bool) {
		p := private(ctx)
		return hidden(p.Secrets, p.MountFlags, p.Contexts...), p.Unknown
	}}
}
