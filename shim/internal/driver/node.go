package driver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/registry"
	"holdfast/shim/internal/volume"
)

var _ volume.Node = (*Fleet)(nil)

// Stage is NodeStageVolume.
func (f *Fleet) Stage(ctx context.Context, at registry.InstanceKey, r volume.StageRequest) error {
	c, err := f.of(at)
	if err != nil {
		return unsent(registry.NodeStageRPC, at, err)
	}
	_, err = csi.NewNodeClient(c.cc).NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: string(r.VolumeID), PublishContext: r.PublishContext, StagingTargetPath: r.StagingPath, VolumeCapability: usageCapability(r.Usage),
		Secrets: reveal(r.Secrets), VolumeContext: r.VolumeContext,
	})
	return failure(registry.NodeStageRPC, at, err, hidden(r.Secrets, r.Usage.MountFlags, r.PublishContext, r.VolumeContext))
}

// Unstage is NodeUnstageVolume.
func (f *Fleet) Unstage(ctx context.Context, at registry.InstanceKey, r volume.UnstageRequest) error {
	c, err := f.of(at)
	if err != nil {
		return unsent(registry.NodeUnstageRPC, at, err)
	}
	_, err = csi.NewNodeClient(c.cc).NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: string(r.VolumeID), StagingTargetPath: r.StagingPath})
	return failure(registry.NodeUnstageRPC, at, err, nil)
}

// Publish is NodePublishVolume.
func (f *Fleet) Publish(ctx context.Context, at registry.InstanceKey, r volume.PublishRequest) error {
	c, err := f.of(at)
	if err != nil {
		return unsent(registry.NodePublishRPC, at, err)
	}
	_, err = csi.NewNodeClient(c.cc).NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: string(r.VolumeID), PublishContext: r.PublishContext, StagingTargetPath: r.StagingPath, TargetPath: r.TargetPath,
		VolumeCapability: usageCapability(r.Usage), Readonly: r.Usage.ReadOnly, Secrets: reveal(r.Secrets), VolumeContext: r.VolumeContext,
	})
	return failure(registry.NodePublishRPC, at, err, hidden(r.Secrets, r.Usage.MountFlags, r.PublishContext, r.VolumeContext))
}

// Unpublish is NodeUnpublishVolume.
func (f *Fleet) Unpublish(ctx context.Context, at registry.InstanceKey, r volume.UnpublishRequest) error {
	c, err := f.of(at)
	if err != nil {
		return unsent(registry.NodeUnpublishRPC, at, err)
	}
	_, err = csi.NewNodeClient(c.cc).NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: string(r.VolumeID), TargetPath: r.TargetPath})
	return failure(registry.NodeUnpublishRPC, at, err, nil)
}

// unsent is the error of a call that never left: it can have no effect.
func unsent(rpc registry.RPC, at registry.InstanceKey, err error) error {
	return &registry.CallError{RPC: rpc, Instance: at, Code: "UNAVAILABLE", Outcome: registry.OutcomeFailed, Detail: err.Error(), Kind: registry.ErrUnavailable}
}
