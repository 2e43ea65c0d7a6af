package csi

import (
	"context"
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"holdfast/registry"
)

// statsRPC changes nothing.
const statsRPC = registry.NodeStatsRPC

// maxUnits bounds the units of one answer; CSI 1.13 has two.
const maxUnits = 8

// Stats is NodeGetVolumeStats.
func (f *Fleet) Stats(ctx context.Context, at registry.InstanceKey, r StatsRequest) (out registry.VolumeReport, err error) {
	var reply *csi.NodeGetVolumeStatsResponse
	private := later(ctx, r.Private)
	err = f.send(ctx, statsRPC, at, private, func(ctx context.Context, cc grpc.ClientConnInterface) (err error) {
		reply, err = csi.NewNodeClient(cc).NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
			VolumeId: string(r.VolumeID), VolumePath: r.Path, StagingTargetPath: r.StagingPath,
		})
		return err
	})
	if err != nil {
		return out, err
	}
	if out.Usage, err = usages(reply.GetUsage()); err != nil {
		err = &registry.CallError{
			RPC: statsRPC, Instance: at, Code: "OK", Outcome: registry.OutcomeFailed, Kind: registry.ErrInternal, Detail: err.Error(),
		}
	}
	out.Condition = condition(reply, func() (*strings.Replacer, bool) { return f.memory(at.Plugin).unsaid(private, true) })
	return out, err
}

// usages is what the plugin says, unit by unit, without what says nothing. No number may be negative (CSI VolumeUsage).
func usages(list []*csi.VolumeUsage) (out []registry.VolumeUsage, err error) {
	for _, u := range list {
		total, used, available := u.GetTotal(), u.GetUsed(), u.GetAvailable()
		switch {
		case total < 0 || used < 0 || available < 0:
			return nil, fmt.Errorf("the plugin's answer cannot be used: total %d, used %d, available %d %s, and none may be negative",
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

// unit names a unit, also one that this build does not know.
func unit(u csi.VolumeUsage_Unit) string {
	if name, known := csi.VolumeUsage_Unit_name[int32(u)]; known {
		return strings.ToLower(name)
	}
	return fmt.Sprintf("unknown-%d", u)
}
