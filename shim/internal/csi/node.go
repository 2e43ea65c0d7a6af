package csi

import (
	"context"
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/registry"
)

// Stage sends NodeStageVolume.
func (f *Fleet) Stage(ctx context.Context, at registry.InstanceKey, r StageRequest) error {
	req := &csi.NodeStageVolumeRequest{
		VolumeId: string(r.VolumeID), PublishContext: r.PublishContext, StagingTargetPath: r.StagingPath,
		VolumeCapability: usageCapability(r.Usage), Secrets: reveal(r.Secrets), VolumeContext: r.VolumeContext,
	}
	return f.send(ctx, registry.NodeStageRPC, at, req, &csi.NodeStageVolumeResponse{}, nil)
}

// Unstage sends NodeUnstageVolume.
func (f *Fleet) Unstage(ctx context.Context, at registry.InstanceKey, r UnstageRequest) error {
	req := &csi.NodeUnstageVolumeRequest{VolumeId: string(r.VolumeID), StagingTargetPath: r.StagingPath}
	return f.send(ctx, registry.NodeUnstageRPC, at, req, &csi.NodeUnstageVolumeResponse{}, r.Private)
}

// Publish sends NodePublishVolume.
func (f *Fleet) Publish(ctx context.Context, at registry.InstanceKey, r PublishRequest) error {
	req := &csi.NodePublishVolumeRequest{
		VolumeId: string(r.VolumeID), PublishContext: r.PublishContext, StagingTargetPath: r.StagingPath,
		TargetPath: r.TargetPath, VolumeCapability: usageCapability(r.Usage), Readonly: r.Usage.ReadOnly,
		Secrets: reveal(r.Secrets), VolumeContext: r.VolumeContext,
	}
	return f.send(ctx, registry.NodePublishRPC, at, req, &csi.NodePublishVolumeResponse{}, nil)
}

// Unpublish sends NodeUnpublishVolume.
func (f *Fleet) Unpublish(ctx context.Context, at registry.InstanceKey, r UnpublishRequest) error {
	req := &csi.NodeUnpublishVolumeRequest{VolumeId: string(r.VolumeID), TargetPath: r.TargetPath}
	return f.send(ctx, registry.NodeUnpublishRPC, at, req, &csi.NodeUnpublishVolumeResponse{}, r.Private)
}

// NodeExpand sends NodeExpandVolume. It returns the capacity in the plugin's answer, or 0 if the answer has none.
func (f *Fleet) NodeExpand(
	ctx context.Context, at registry.InstanceKey, r NodeExpandRequest,
) (capacity int64, err error) {
	req := &csi.NodeExpandVolumeRequest{
		VolumeId: string(r.VolumeID), VolumePath: r.Path, CapacityRange: capacityRange(r.Range),
		StagingTargetPath: r.StagingPath, VolumeCapability: usageCapability(r.Usage), Secrets: reveal(r.Secrets),
	}
	var reply csi.NodeExpandVolumeResponse
	err = f.send(ctx, registry.NodeExpandRPC, at, req, &reply, r.Private.asFunc)
	return reply.GetCapacityBytes(), err
}

// maxUnits bounds the units of one answer; CSI 1.13 has two.
const maxUnits = 8

// Stats sends NodeGetVolumeStats.
func (f *Fleet) Stats(
	ctx context.Context, at registry.InstanceKey, r StatsRequest,
) (out registry.VolumeReport, err error) {
	req := &csi.NodeGetVolumeStatsRequest{
		VolumeId: string(r.VolumeID), VolumePath: r.Path, StagingTargetPath: r.StagingPath,
	}
	var reply csi.NodeGetVolumeStatsResponse
	if err = f.send(ctx, registry.NodeStatsRPC, at, req, &reply, r.Private); err != nil {
		return out, err
	}
	if out.Usage, err = usages(reply.GetUsage()); err != nil {
		err = AnswerError(registry.NodeStatsRPC, at, "%v", err)
	}
	out.Condition = condition(&reply, f.lazyRedactor(ctx, at, req, r.Private))
	return out, err
}

// usages returns the entries that are not empty, at most maxUnits. A negative number is an error (CSI VolumeUsage).
func usages(list []*csi.VolumeUsage) (out []registry.VolumeUsage, err error) {
	for _, u := range list {
		total, used, available := u.GetTotal(), u.GetUsed(), u.GetAvailable()
		switch {
		case total < 0 || used < 0 || available < 0:
			return nil, fmt.Errorf(
				"the plugin's answer cannot be used: total %d, used %d, available %d %s, and none may be negative",
				total, used, available, unit(u.GetUnit()))
		case total == 0 && used == 0 && available == 0 && u.GetUnit() == csi.VolumeUsage_UNKNOWN:
			continue
		case len(out) == maxUnits:
			return out, nil
		}
		out = append(out, registry.VolumeUsage{Unit: unit(u.GetUnit()), Total: total, Used: used, Available: available})
	}
	return out, nil
}

// unit returns the name of a unit, also of one that this build does not know.
func unit(u csi.VolumeUsage_Unit) string {
	if name, known := csi.VolumeUsage_Unit_name[int32(u)]; known {
		return strings.ToLower(name)
	}
	return fmt.Sprintf("unknown-%d", u)
}
