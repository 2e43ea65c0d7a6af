package main

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// NodeGetVolumeStats returns the bytes and inodes of a file system, or the bytes of a device.
func (n *node) NodeGetVolumeStats(
	_ context.Context, req *csi.NodeGetVolumeStatsRequest,
) (*csi.NodeGetVolumeStatsResponse, error) {
	id, err := parseVolumeID(req.GetVolumeId())
	if req.GetVolumePath() == "" {
		err = disk.Errorf(disk.ErrInvalid, "the volume path is missing")
	}
	if err != nil {
		return nil, err
	}
	r, err := n.pool.Find(id)
	if err != nil {
		return nil, err
	}
	now, path, err := n.at(r, req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if now.stage.Usage.Access == disk.Raw {
		return now.rawStats()
	}
	s, err := now.backend.Stats(r.ID, r.Bytes, path)
	if err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		usage(csi.VolumeUsage_BYTES, s.Bytes), usage(csi.VolumeUsage_INODES, s.Inodes),
	}}, nil
}

func usage(unit csi.VolumeUsage_Unit, c disk.Count) *csi.VolumeUsage {
	return &csi.VolumeUsage{Unit: unit, Total: c.Total, Used: c.Used, Available: c.Free}
}

func (v view) rawStats() (*csi.NodeGetVolumeStatsResponse, error) {
	d, err := v.devices()
	if err != nil {
		return nil, err
	}
	size, err := d.Size(v.record.ID)
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: size}}}, err
}

// at returns the view of a volume and the resolved path, if it is staged or published there. Else the error is
// ErrNotFound.
func (n *node) at(r disk.Record, path string) (view, string, error) {
	gone := disk.Errorf(disk.ErrNotFound, "volume %s is neither staged nor published at %.128q", r.ID, path)
	p, err := mount.Resolve(path)
	if err != nil {
		return view{}, "", gone
	}
	now, err := n.inspect(r)
	if err != nil {
		return view{}, "", err
	}
	there := false
	if _, published := now.stage.Published[p.String()]; published {
		there, err = now.shown(p.String())
	} else if now.stage.Path == p.String() {
		there, err = now.staged()
	}
	if errors.Is(err, disk.ErrInUse) || err == nil && !there { // something else is mounted there
		return view{}, "", gone
	}
	return now, p.String(), err
}

// NodeExpandVolume enlarges the file system or the devices of a volume in use, after ControllerExpandVolume.
func (n *node) NodeExpandVolume(
	_ context.Context, req *csi.NodeExpandVolumeRequest,
) (*csi.NodeExpandVolumeResponse, error) {
	id, err := disk.ParseID(disk.Volume, req.GetVolumeId())
	if req.GetVolumePath() == "" && !errors.Is(err, disk.ErrInvalid) {
		err = disk.Errorf(disk.ErrInvalid, "the volume path is missing")
	}
	if err != nil {
		return nil, err
	}
	h, r, err := n.pool.Acquire(id)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	if err := checkCapability(r, req.GetVolumeCapability()); err != nil {
		return nil, err
	}
	now, _, err := n.at(r, req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if err := now.expand(req.GetCapacityRange()); err != nil {
		return nil, err
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: r.Bytes}, nil
}

func (v view) expand(want *csi.CapacityRange) error {
	r, raw := v.record, v.stage.Usage.Access == disk.Raw
	switch {
	case want.GetRequiredBytes() > r.Bytes:
		return disk.Errorf(disk.ErrRange, "volume %s has %d bytes: call ControllerExpandVolume first", r.ID, r.Bytes)
	case want.GetLimitBytes() > 0 && want.GetLimitBytes() < r.Bytes:
		return disk.Errorf(disk.ErrRange, "volume %s has %d bytes, and cannot shrink", r.ID, r.Bytes)
	case !raw && v.readOnly():
		return disk.Errorf(disk.ErrInUse, "volume %s is staged read-only, and a read-only file system does not grow; "+
			"the next stage enlarges it", r.ID)
	}
	if err := v.backend.Grow(r.ID, r.Bytes); err != nil {
		return err
	}
	return v.backend.Expand(r.ID, raw)
}
