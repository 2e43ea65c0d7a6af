package main

import (
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

func capability(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4",
			MountFlags: flags}},
	}
}

// blockOf is a capability of the same mode for a raw volume.
func blockOf(c *csi.VolumeCapability) *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessMode: c.AccessMode,
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
}

// mountOf is a capability of the same mode for a file system of that type and group.
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

func (p *process) create(name string, c *csi.VolumeCapability) *csi.Volume {
	p.t.Helper()
	answer, err := p.CreateVolume(p.t.Context(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{c},
		CapacityRange: &csi.CapacityRange{RequiredBytes: 16 << 20},
	})
	if err != nil {
		p.t.Fatalf("create %q: %v", name, err)
	}
	return answer.Volume
}

// createFrom makes a volume of a snapshot or another volume.
func (p *process) createFrom(name, source string, c *csi.VolumeCapability, least, most int64) (*csi.Volume, error) {
	from := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: source},
	}}
	if strings.HasPrefix(source, "snap-") {
		from.Type = &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: source}}
	}
	answer, err := p.CreateVolume(p.t.Context(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{c}, VolumeContentSource: from,
		CapacityRange: &csi.CapacityRange{RequiredBytes: least, LimitBytes: most},
	})
	return answer.GetVolume(), err
}

func (p *process) snapshot(name, source string) (*csi.Snapshot, error) {
	answer, err := p.CreateSnapshot(p.t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: source})
	return answer.GetSnapshot(), err
}

func (p *process) deleteSnapshot(id string) error {
	_, err := p.DeleteSnapshot(p.t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
	return err
}

func (p *process) snapshots(req *csi.ListSnapshotsRequest) []string {
	p.t.Helper()
	answer, err := p.ListSnapshots(p.t.Context(), req)
	if err != nil {
		p.t.Fatal(err)
	}
	var ids []string
	for _, e := range answer.Entries {
		ids = append(ids, e.Snapshot.SnapshotId)
	}
	return ids
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

// stats are the bytes and inodes (nil if there are none) at a path.
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

// publishInline publishes an ephemeral volume; without a size if that is "".
func (p *process) publishInline(id, to, size string, c *csi.VolumeCapability, readOnly bool) error {
	context := map[string]string{"csi.storage.k8s.io/ephemeral": "true"}
	if size != "" {
		context["size"] = size
	}
	_, err := p.NodePublishVolume(p.t.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: id, TargetPath: to, VolumeCapability: c, Readonly: readOnly, VolumeContext: context,
	})
	return err
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

func (p *process) list(max int32, token string) ([]string, string) {
	p.t.Helper()
	answer, err := p.ListVolumes(p.t.Context(), &csi.ListVolumesRequest{MaxEntries: max, StartingToken: token})
	if err != nil {
		p.t.Fatal(err)
	}
	var ids []string
	for _, e := range answer.Entries {
		ids = append(ids, e.Volume.VolumeId)
	}
	return ids, answer.NextToken
}
