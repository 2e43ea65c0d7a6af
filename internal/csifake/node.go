package csifake

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

type nodeService struct {
	csi.UnimplementedNodeServer
	p *Plugin
}

func (s nodeService) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (
	*csi.NodeGetCapabilitiesResponse, error,
) {
	reply := &csi.NodeGetCapabilitiesResponse{}
	for _, n := range s.p.caps["node"] {
		rpc := &csi.NodeServiceCapability_RPC{Type: csi.NodeServiceCapability_RPC_Type(n)}
		reply.Capabilities = append(reply.Capabilities,
			&csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: rpc}})
	}
	return reply, nil
}

func (s nodeService) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: s.p.cfg.NodeID, MaxVolumesPerNode: s.p.cfg.MaxVolumes,
		AccessibleTopology: s.p.topology()}, nil
}

// onNode runs f on a volume of this node.
func (s nodeService) onNode(id string, f func(*volume, *onNode) error) error {
	return s.p.cfg.Backend.change(func(c *contents) error {
		v, err := s.p.find(c, id)
		if err != nil {
			return err
		}
		return f(v, v.on(s.p.cfg.NodeID))
	})
}

func (s nodeService) NodeStageVolume(_ context.Context, r *csi.NodeStageVolumeRequest) (
	*csi.NodeStageVolumeResponse, error,
) {
	path := r.GetStagingTargetPath()
	if path == "" || r.GetVolumeCapability() == nil {
		return nil, invalid("staging_target_path or volume_capability is missing")
	}
	return &csi.NodeStageVolumeResponse{}, s.onNode(r.GetVolumeId(), func(v *volume, n *onNode) error {
		as := hashMessage(r.GetVolumeCapability())
		if n.Staging != "" && (n.Staging != path || n.Staged != as) {
			return status.Errorf(codes.AlreadyExists, "volume %q is staged at %s otherwise", v.ID, n.Staging)
		}
		if err := s.p.mountStaging(v.ID, path, r.GetVolumeCapability()); err != nil {
			return err
		}
		n.Staging, n.Staged = path, as
		return nil
	})
}

func (s nodeService) NodeUnstageVolume(_ context.Context, r *csi.NodeUnstageVolumeRequest) (
	*csi.NodeUnstageVolumeResponse, error,
) {
	if r.GetStagingTargetPath() == "" {
		return nil, invalid("staging_target_path is missing")
	}
	return &csi.NodeUnstageVolumeResponse{}, s.onNode(r.GetVolumeId(), func(_ *volume, n *onNode) error {
		if err := s.p.unmount(r.GetStagingTargetPath()); err != nil {
			return err
		}
		if n.Staging == r.GetStagingTargetPath() {
			n.Staging, n.Staged = "", ""
		}
		return nil
	})
}

func (s nodeService) NodePublishVolume(_ context.Context, r *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error,
) {
	if r.GetTargetPath() == "" || r.GetVolumeCapability() == nil {
		return nil, invalid("target_path or volume_capability is missing")
	}
	return &csi.NodePublishVolumeResponse{}, s.onNode(r.GetVolumeId(), func(v *volume, n *onNode) error {
		if s.p.caps.has("node/STAGE_UNSTAGE_VOLUME") &&
			(r.GetStagingTargetPath() == "" || n.Staging != r.GetStagingTargetPath()) {
			return status.Errorf(codes.FailedPrecondition, "volume %q is not staged at %q", v.ID, r.GetStagingTargetPath())
		}
		as := hashMessage(r.GetVolumeCapability())
		if r.GetReadonly() {
			as += " ro"
		}
		if was, there := n.Published[r.GetTargetPath()]; there && was != as {
			return status.Errorf(codes.AlreadyExists, "volume %q is published at %s otherwise", v.ID, r.GetTargetPath())
		}
		if err := s.p.mountTarget(v.ID, r); err != nil {
			return err
		}
		n.Published[r.GetTargetPath()] = as
		return nil
	})
}

func (s nodeService) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (
	*csi.NodeUnpublishVolumeResponse, error,
) {
	if r.GetTargetPath() == "" {
		return nil, invalid("target_path is missing")
	}
	return &csi.NodeUnpublishVolumeResponse{}, s.onNode(r.GetVolumeId(), func(_ *volume, n *onNode) error {
		if err := s.p.removeTarget(r.GetTargetPath()); err != nil {
			return err
		}
		delete(n.Published, r.GetTargetPath())
		return nil
	})
}

// hasPath tells whether a volume is staged or published at a path.
func (n *onNode) hasPath(path string) bool {
	_, published := n.Published[path]
	return published || path != "" && n.Staging == path
}

func (s nodeService) NodeGetVolumeStats(_ context.Context, r *csi.NodeGetVolumeStatsRequest) (
	*csi.NodeGetVolumeStatsResponse, error,
) {
	if r.GetVolumePath() == "" {
		return nil, invalid("volume_path is missing")
	}
	reply := &csi.NodeGetVolumeStatsResponse{}
	return reply, s.onNode(r.GetVolumeId(), func(v *volume, n *onNode) error {
		if !n.hasPath(r.GetVolumePath()) {
			return status.Errorf(codes.NotFound, "volume %q is not at %s", v.ID, r.GetVolumePath())
		}
		reply.Usage = []*csi.VolumeUsage{
			{Unit: csi.VolumeUsage_BYTES, Total: v.Capacity, Used: v.Capacity / 4, Available: v.Capacity - v.Capacity/4},
			{Unit: csi.VolumeUsage_INODES, Total: 1000, Used: 10, Available: 990}}
		return nil
	})
}

func (s nodeService) NodeExpandVolume(_ context.Context, r *csi.NodeExpandVolumeRequest) (
	*csi.NodeExpandVolumeResponse, error,
) {
	if r.GetVolumePath() == "" {
		return nil, invalid("volume_path is missing")
	}
	reply := &csi.NodeExpandVolumeResponse{}
	return reply, s.onNode(r.GetVolumeId(), func(v *volume, n *onNode) error {
		if !n.hasPath(r.GetVolumePath()) {
			return status.Errorf(codes.NotFound, "volume %q is not at %s", v.ID, r.GetVolumePath())
		}
		v.Capacity = max(v.Capacity, r.GetCapacityRange().GetRequiredBytes())
		reply.CapacityBytes = v.Capacity
		return nil
	})
}

func (s nodeService) NodeGetVolumeHealth(_ context.Context, r *csi.NodeGetVolumeHealthRequest) (
	*csi.NodeGetVolumeHealthResponse, error,
) {
	err := s.onNode(r.GetVolumeId(), func(*volume, *onNode) error { return nil })
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: r.GetVolumeId()}}, err
}

func (s nodeService) NodeGetStorageHealth(context.Context, *csi.NodeGetStorageHealthRequest) (
	*csi.NodeGetStorageHealthResponse, error,
) {
	return &csi.NodeGetStorageHealthResponse{}, nil
}

func (s controller) ControllerGetVolumeHealth(_ context.Context, r *csi.ControllerGetVolumeHealthRequest) (
	*csi.ControllerGetVolumeHealthResponse, error,
) {
	err := s.p.cfg.Backend.change(func(c *contents) error {
		_, err := s.p.find(c, r.GetVolumeId())
		return err
	})
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: r.GetVolumeId()}}, err
}

func (s controller) ControllerListVolumeHealth(_ context.Context, r *csi.ControllerListVolumeHealthRequest) (
	*csi.ControllerListVolumeHealthResponse, error,
) {
	reply := &csi.ControllerListVolumeHealthResponse{}
	return reply, s.p.cfg.Backend.change(func(c *contents) error {
		ids := make([]string, 0, len(c.Volumes))
		for id := range c.Volumes {
			ids = append(ids, id)
		}
		slices.Sort(ids)
		ids, next, err := page(ids, r.GetMaxEntries(), r.GetStartingToken())
		for _, id := range ids {
			reply.Entries = append(reply.Entries, &csi.VolumeHealth{VolumeId: id})
		}
		reply.NextToken = next
		return err
	})
}
