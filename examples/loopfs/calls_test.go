package main

import (
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func capability(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4",
			MountFlags: flags}},
	}
}

// blockOf returns a capability of the same mode for a raw volume.
func blockOf(c *csi.VolumeCapability) *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessMode: c.AccessMode,
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
}

// mountOf returns a capability of the same mode for a file system of that type and group.
func mountOf(c *csi.VolumeCapability, fs, group string) *csi.VolumeCapability {
	m := &csi.VolumeCapability_MountVolume{FsType: fs, VolumeMountGroup: group}
	return &csi.VolumeCapability{AccessMode: c.AccessMode, AccessType: &csi.VolumeCapability_Mount{Mount: m}}
}

var (
	reader = capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY)
	writer = capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
	single = capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER)
	multi  = capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)
)

// tryCreate makes a volume, from a snapshot or another volume if source is not empty.
func (p *process) tryCreate(
	name, source string, least, most int64, caps ...*csi.VolumeCapability,
) (*csi.Volume, error) {
	req := &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: caps,
		CapacityRange: &csi.CapacityRange{RequiredBytes: least, LimitBytes: most}}
	if strings.HasPrefix(source, "snap-") {
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: source}}}
	} else if source != "" {
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: source}}}
	}
	answer, err := p.CreateVolume(p.t.Context(), req)
	return answer.GetVolume(), err
}

// create makes a volume of 16 MiB.
func (p *process) create(name string, caps ...*csi.VolumeCapability) *csi.Volume {
	p.t.Helper()
	v, err := p.tryCreate(name, "", 16<<20, 0, caps...)
	must(p.t, err)
	return v
}

func (p *process) snapshot(name, source string) (*csi.Snapshot, error) {
	answer, err := p.CreateSnapshot(p.t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: source})
	return answer.GetSnapshot(), err
}

func (p *process) deleteSnapshot(id string) error {
	_, err := p.DeleteSnapshot(p.t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
	return err
}

func (p *process) snapshotGroup(name string, sources ...string) (*csi.VolumeGroupSnapshot, error) {
	answer, err := p.CreateVolumeGroupSnapshot(p.t.Context(), &csi.CreateVolumeGroupSnapshotRequest{
		Name: name, SourceVolumeIds: sources,
	})
	return answer.GetGroupSnapshot(), err
}

func (p *process) deleteGroup(id string, snapshots ...string) error {
	_, err := p.DeleteVolumeGroupSnapshot(p.t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{
		GroupSnapshotId: id, SnapshotIds: snapshots,
	})
	return err
}

func (p *process) modify(id, key, value string) error {
	_, err := p.ControllerModifyVolume(p.t.Context(), &csi.ControllerModifyVolumeRequest{
		VolumeId: id, MutableParameters: map[string]string{key: value},
	})
	return err
}

func (p *process) expand(id string, least, most int64) error {
	_, err := p.ControllerExpandVolume(p.t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: least, LimitBytes: most},
	})
	return err
}

func (p *process) expandOnNode(id, at string) error {
	_, err := p.NodeExpandVolume(p.t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: at})
	return err
}

// stats returns the bytes and inodes (nil if there are none) at a path.
func (p *process) stats(id, at string) (bytes, inodes *csi.VolumeUsage, err error) {
	answer, err := p.NodeGetVolumeStats(p.t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: at})
	for _, u := range answer.GetUsage() {
		if u.Unit == csi.VolumeUsage_BYTES {
			bytes = u
		} else {
			inodes = u
		}
	}
	return bytes, inodes, err
}

func (p *process) delete(id string) error {
	_, err := p.DeleteVolume(p.t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	return err
}

func (p *process) stage(id, at string, c *csi.VolumeCapability) error {
	_, err := p.NodeStageVolume(p.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: at,
		VolumeCapability: c})
	return err
}

func (p *process) unstage(id, at string) error {
	_, err := p.NodeUnstageVolume(p.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: at})
	return err
}

func (p *process) publish(id, from, to string, c *csi.VolumeCapability, readOnly bool) error {
	_, err := p.NodePublishVolume(p.t.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: id, StagingTargetPath: from, TargetPath: to, VolumeCapability: c, Readonly: readOnly,
	})
	return err
}

func (p *process) unpublish(id, at string) error {
	_, err := p.NodeUnpublishVolume(p.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: at})
	return err
}

// bringUp stages and publishes a volume.
func (p *process) bringUp(id, staging, target string, c *csi.VolumeCapability) {
	p.t.Helper()
	step(p.t, "stage", p.stage(id, staging, c), codes.OK)
	step(p.t, "publish", p.publish(id, staging, target, c, false), codes.OK)
}

// takeDown unpublishes and unstages a volume.
func (p *process) takeDown(id, staging, target string) {
	p.t.Helper()
	var err error
	until(p.t, "unpublished", func() bool { // a child that is being started has the files of this process open
		err = p.unpublish(id, target)
		return status.Code(err) != codes.FailedPrecondition
	})
	step(p.t, "unpublish", err, codes.OK)
	step(p.t, "unstage", p.unstage(id, staging), codes.OK)
}

// confirms reports whether the volume has these capabilities.
func (p *process) confirms(req *csi.ValidateVolumeCapabilitiesRequest) bool {
	p.t.Helper()
	answer, err := p.ValidateVolumeCapabilities(p.t.Context(), req)
	if err != nil || (answer.Confirmed == nil) == (answer.Message == "") {
		p.t.Errorf("ValidateVolumeCapabilities: neither confirmed nor a reason, or both: %+v, %v", answer, err)
	}
	return answer.GetConfirmed() != nil
}
