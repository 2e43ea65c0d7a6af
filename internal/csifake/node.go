package csifake

import (
	"context"

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

// work returns the work at a path for a call. It may take long, so it is done without a lock of the backend. The volume
// is reserved meanwhile.
func (s nodeService) work(ctx context.Context, volume, path string) work {
	return work{p: s.p, c: callOf(ctx), volume: volume, path: path}
}

func (s nodeService) NodeStageVolume(ctx context.Context, r *csi.NodeStageVolumeRequest) (
	*csi.NodeStageVolumeResponse, error,
) {
	path := r.GetStagingTargetPath()
	if path == "" || r.GetVolumeCapability() == nil {
		return nil, invalid("staging_target_path or volume_capability is missing")
	}
	as := hashMessage(r.GetVolumeCapability())
	err := s.onNode(r.GetVolumeId(), func(v *volume, n *onNode) error {
		if n.Staging != "" && (n.Staging != path || n.Staged != as) {
			return status.Errorf(codes.AlreadyExists, "volume %q is staged at %s otherwise", v.ID, n.Staging)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if err := s.work(ctx, r.GetVolumeId(), path).stage(r.GetVolumeCapability()); err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, s.onNode(r.GetVolumeId(), func(v *volume, n *onNode) error {
		n.Staging, n.Staged, n.Size = path, as, v.Capacity
		return nil
	})
}

func (s nodeService) NodeUnstageVolume(ctx context.Context, r *csi.NodeUnstageVolumeRequest) (
	*csi.NodeUnstageVolumeResponse, error,
) {
	path := r.GetStagingTargetPath()
	if path == "" {
		return nil, invalid("staging_target_path is missing")
	}
	known, err := s.isPlaced(r.GetVolumeId(), path)
	if err != nil {
		return nil, err
	}
	if !known {
		return &csi.NodeUnstageVolumeResponse{}, s.p.runMiddleRule(callOf(ctx))
	}
	if err := s.work(ctx, r.GetVolumeId(), path).unstage(); err != nil {
		return nil, err
	}
	return &csi.NodeUnstageVolumeResponse{}, s.onNode(r.GetVolumeId(), func(_ *volume, n *onNode) error {
		if n.Staging == path {
			n.Staging, n.Staged = "", ""
		}
		return nil
	})
}

// isPlaced reports whether an unstage or unpublish has something to remove at the path. A plugin that has forgotten its
// records removes nothing that it does not know. For a volume that was not used since then, it answers NOT_FOUND.
func (s nodeService) isPlaced(id, path string) (known bool, err error) {
	err = s.p.cfg.Backend.change(func(c *contents) error {
		if c.Forgotten && id != "" && c.Volumes[id] == nil {
			return status.Errorf(codes.NotFound, "volume %q does not exist", id)
		}
		v, err := s.p.find(c, id)
		known = err == nil && (!c.Forgotten || v.on(s.p.cfg.NodeID).hasPath(path))
		return err
	})
	return known, err
}

// inline is the volume_context key that asks for an ephemeral volume.
const inline = "csi.storage.k8s.io/ephemeral"

func (s nodeService) NodePublishVolume(ctx context.Context, r *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error,
) {
	if r.GetTargetPath() == "" || r.GetVolumeCapability() == nil {
		return nil, invalid("target_path or volume_capability is missing")
	}
	if r.GetVolumeContext()[inline] == "true" {
		if err := s.p.makeEphemeral(r.GetVolumeId()); err != nil {
			return nil, err
		}
	}
	as := hashMessage(r.GetVolumeCapability())
	if r.GetReadonly() {
		as += " ro"
	}
	err := s.onNode(r.GetVolumeId(), func(v *volume, n *onNode) error { return s.publishable(r, as, v, n) })
	if err != nil {
		return nil, err
	}
	if err := s.work(ctx, r.GetVolumeId(), r.GetTargetPath()).publish(r); err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, s.onNode(r.GetVolumeId(), func(v *volume, n *onNode) error {
		n.Published[r.GetTargetPath()], n.Block = as, r.GetVolumeCapability().GetBlock() != nil
		if n.Staging == "" && len(n.Published) == 1 {
			n.Size = v.Capacity
		}
		return nil
	})
}

// publishable returns why a volume cannot be published as requested.
func (s nodeService) publishable(r *csi.NodePublishVolumeRequest, as string, v *volume, n *onNode) error {
	stages := s.p.caps.has("node/STAGE_UNSTAGE_VOLUME") && !v.Ephemeral
	if stages && (r.GetStagingTargetPath() == "" || n.Staging != r.GetStagingTargetPath()) {
		return status.Errorf(codes.FailedPrecondition, "volume %q is not staged at %q", v.ID, r.GetStagingTargetPath())
	}
	was, there := n.Published[r.GetTargetPath()]
	if there && was != as {
		return status.Errorf(codes.AlreadyExists, "volume %q is published at %s otherwise", v.ID, r.GetTargetPath())
	}
	mode := r.GetVolumeCapability().GetAccessMode().GetMode()
	single := mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	if single && !there && len(n.Published) > 0 {
		return status.Errorf(codes.FailedPrecondition, "volume %q is published at another target", v.ID)
	}
	return nil
}

// makeEphemeral makes a volume that lives as long as its publish.
func (p *Plugin) makeEphemeral(id string) error {
	if id == "" {
		return invalid("volume_id is missing")
	}
	return p.cfg.Backend.change(func(c *contents) error {
		v := c.Volumes[id]
		if v != nil && !v.Ephemeral {
			return status.Errorf(codes.AlreadyExists, "volume %q exists and is not ephemeral", id)
		}
		if v == nil {
			c.Volumes[id] = &volume{ID: id, Capacity: 1 << 30, Ephemeral: true}
		}
		return nil
	})
}

func (s nodeService) NodeUnpublishVolume(ctx context.Context, r *csi.NodeUnpublishVolumeRequest) (
	*csi.NodeUnpublishVolumeResponse, error,
) {
	if r.GetTargetPath() == "" {
		return nil, invalid("target_path is missing")
	}
	known, err := s.isPlaced(r.GetVolumeId(), r.GetTargetPath())
	if err != nil {
		return nil, err
	}
	if !known {
		return &csi.NodeUnpublishVolumeResponse{}, s.p.runMiddleRule(callOf(ctx))
	}
	w := s.work(ctx, r.GetVolumeId(), r.GetTargetPath())
	if err := w.unpublish(); err != nil {
		return nil, err
	}
	last := false
	err = s.onNode(r.GetVolumeId(), func(_ *volume, n *onNode) error {
		delete(n.Published, r.GetTargetPath())
		last = len(n.Published) == 0
		return nil
	})
	if err == nil && last {
		err = w.last()
	}
	return &csi.NodeUnpublishVolumeResponse{}, err
}

// last cleans up after the last user of the volume on the node.
func (w work) last() error {
	if err := w.freeBlock(); err != nil {
		return err
	}
	return w.p.cfg.Backend.change(func(c *contents) error {
		if v := c.Volumes[w.volume]; v != nil && v.Ephemeral && !v.inUse() {
			delete(c.Volumes, w.volume)
		}
		return nil
	})
}

// hasPath reports whether the volume is staged or published at a path.
func (n *onNode) hasPath(path string) bool {
	_, published := n.Published[path]
	return published || path != "" && n.Staging == path
}

// NodeGetVolumeStats reports values of the backend: the size that this node knows, and the used bytes of
// Backend.SetUsed.
func (s nodeService) NodeGetVolumeStats(ctx context.Context, r *csi.NodeGetVolumeStatsRequest) (
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
		reply.Usage = usage(v, n)
		s.p.addCondition(ctx, "node", v.ID, reply)
		return nil
	})
}

// usage returns the usage in bytes. For a file system it adds the usage in inodes. The used bytes of a block device are
// unknown.
func usage(v *volume, n *onNode) []*csi.VolumeUsage {
	bytes := &csi.VolumeUsage{Unit: csi.VolumeUsage_BYTES, Total: n.Size}
	if n.Block {
		return []*csi.VolumeUsage{bytes}
	}
	bytes.Used = n.Size / 4
	if v.Used != nil {
		bytes.Used = *v.Used
	}
	bytes.Available = max(0, n.Size-bytes.Used)
	return []*csi.VolumeUsage{bytes, {Unit: csi.VolumeUsage_INODES, Total: 1000, Used: 10, Available: 990}}
}

// NodeExpandVolume sets the node's size of the volume to the controller's. If the plugin's controller does not expand
// volumes, NodeExpandVolume expands the volume itself.
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
		size, err := capacity(&csi.CapacityRange{RequiredBytes: max(r.GetCapacityRange().GetRequiredBytes(),
			v.Capacity),
			LimitBytes: r.GetCapacityRange().GetLimitBytes()})
		if err != nil {
			return err
		}
		if size > v.Capacity && s.p.caps.has("controller/EXPAND_VOLUME") {
			return status.Errorf(codes.OutOfRange, "volume %q has %d bytes", v.ID, v.Capacity)
		}
		v.Capacity, n.Size = size, size
		reply.CapacityBytes = size
		return nil
	})
}
