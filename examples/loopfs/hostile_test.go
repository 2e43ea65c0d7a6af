package main

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/examples/loopfs/internal/disk"
)

// hostileText are strings that must never become ids, names or parts of paths. gRPC itself refuses what is not UTF-8.
var hostileText = []string{
	"", ".", "..", "/", "../victim", "a/../../victim", "/etc/passwd", "a/b", `a\b`, "a\x00b", "a\nb", "\x7f",
	strings.Repeat("a", 129), strings.Repeat("../", 60), "../work/victim",
}

// hostilePaths are paths where nothing must ever be mounted or removed. %data stands for the data directory.
var hostilePaths = []string{
	"", "/", ".", "..", "relative", "/tmp/../etc", "/tmp/./x", "//tmp", "/a\x00b", "/a//b", "/" +
		strings.Repeat("a", 4096),
	"/tmp/" + strings.Repeat("b", 256) + "/x", "%data", "%data/volumes", "%data/images/x", "%data/..", "%data/dirs/x/y",
}

func TestHostileRequests(t *testing.T) {
	need(t, disk.DirBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir", "--attach", "--node-id", "n1")
	victim := m.staging("victim") // empty, so that rmdir would succeed
	id := p.create("a", writer).VolumeId
	before := m.tree()

	for _, s := range hostileText {
		for what, call := range p.callsWithID(s, victim) {
			if got := status.Code(call(t.Context())); got != codes.InvalidArgument {
				t.Errorf("%s of volume %q: %s", what, s, got)
			}
		}
		_, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: s,
			VolumeCapabilities: []*csi.VolumeCapability{writer}})
		step(t, "create "+s, err, codes.InvalidArgument)
		_, err = p.snapshot(s, id)
		step(t, "snapshot "+s, err, codes.InvalidArgument)
		if s != "" && len(s) < 200 && len(s) != 129 { // node ids may be longer
			_, err = p.ControllerPublishVolume(t.Context(),
				&csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: s, VolumeCapability: writer})
			step(t, "attach to node "+s, err, codes.InvalidArgument)
			_, err = p.ControllerUnpublishVolume(t.Context(),
				&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: s})
			step(t, "detach from node "+s, err, codes.InvalidArgument)
		}
	}
	for _, path := range hostilePaths {
		path = strings.ReplaceAll(path, "%data", m.data)
		step(t, "stage at "+path, p.stage(id, path, writer), codes.InvalidArgument)
		step(t, "unstage "+path, p.unstage(id, path), codes.InvalidArgument)
		step(t, "publish at "+path, p.publish(id, victim, path, writer, false), codes.InvalidArgument)
		step(t, "unpublish "+path, p.unpublish(id, path), codes.InvalidArgument)
		step(t, "publish inline at "+path, p.publishInline("csi-1", path, "", writer, false), codes.InvalidArgument)
	}
	step(t, "unpublish a directory of somebody else", p.unpublish(id, victim), codes.OK)
	step(t, "unstage a directory of somebody else", p.unstage(id, victim), codes.OK)

	if after := m.tree(); !slices.Equal(before, after) {
		t.Errorf("the files were %q, are %q", before, after)
	}
	step(t, "the volume", p.delete(id), codes.OK)
}

func (p *process) callsWithID(id, path string) map[string]func(context.Context) error {
	unary := func(method string, req, answer proto.Message) func(context.Context) error {
		return func(ctx context.Context) error {
			return p.conn.Invoke(ctx, method, req, answer, grpc.WaitForReady(true))
		}
	}
	return map[string]func(context.Context) error{
		"delete": unary(csi.Controller_DeleteVolume_FullMethodName, &csi.DeleteVolumeRequest{VolumeId: id},
			&csi.DeleteVolumeResponse{}),
		"validate": unary(csi.Controller_ValidateVolumeCapabilities_FullMethodName,
			&csi.ValidateVolumeCapabilitiesRequest{
				VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{writer}},
			&csi.ValidateVolumeCapabilitiesResponse{}),
		"attach": unary(csi.Controller_ControllerPublishVolume_FullMethodName, &csi.ControllerPublishVolumeRequest{
			VolumeId: id, NodeId: "n1", VolumeCapability: writer}, &csi.ControllerPublishVolumeResponse{}),
		"detach": unary(csi.Controller_ControllerUnpublishVolume_FullMethodName, &csi.ControllerUnpublishVolumeRequest{
			VolumeId: id, NodeId: "n1"}, &csi.ControllerUnpublishVolumeResponse{}),
		"get": unary(csi.Controller_ControllerGetVolume_FullMethodName, &csi.ControllerGetVolumeRequest{
			VolumeId: id}, &csi.ControllerGetVolumeResponse{}),
		"snapshot": unary(csi.Controller_CreateSnapshot_FullMethodName, &csi.CreateSnapshotRequest{
			Name: "s", SourceVolumeId: id}, &csi.CreateSnapshotResponse{}),
		"get snapshot": unary(csi.Controller_GetSnapshot_FullMethodName, &csi.GetSnapshotRequest{
			SnapshotId: id}, &csi.GetSnapshotResponse{}),
		"delete snapshot": unary(csi.Controller_DeleteSnapshot_FullMethodName, &csi.DeleteSnapshotRequest{
			SnapshotId: id}, &csi.DeleteSnapshotResponse{}),
		"expand": unary(csi.Controller_ControllerExpandVolume_FullMethodName, &csi.ControllerExpandVolumeRequest{
			VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 1}}, &csi.ControllerExpandVolumeResponse{}),
		"expand on the node": unary(csi.Node_NodeExpandVolume_FullMethodName, &csi.NodeExpandVolumeRequest{
			VolumeId: id, VolumePath: path}, &csi.NodeExpandVolumeResponse{}),
		"stats": unary(csi.Node_NodeGetVolumeStats_FullMethodName, &csi.NodeGetVolumeStatsRequest{
			VolumeId: id, VolumePath: path}, &csi.NodeGetVolumeStatsResponse{}),
		"inline publish": unary(csi.Node_NodePublishVolume_FullMethodName, &csi.NodePublishVolumeRequest{
			VolumeId: id, TargetPath: path + "-t", VolumeCapability: writer,
			VolumeContext: map[string]string{ephemeralKey: "true"},
		}, &csi.NodePublishVolumeResponse{}),
		"stage": unary(csi.Node_NodeStageVolume_FullMethodName, &csi.NodeStageVolumeRequest{
			VolumeId: id, StagingTargetPath: path, VolumeCapability: writer}, &csi.NodeStageVolumeResponse{}),
		"unstage": unary(csi.Node_NodeUnstageVolume_FullMethodName, &csi.NodeUnstageVolumeRequest{
			VolumeId: id, StagingTargetPath: path}, &csi.NodeUnstageVolumeResponse{}),
		"publish": unary(csi.Node_NodePublishVolume_FullMethodName, &csi.NodePublishVolumeRequest{
			VolumeId: id, StagingTargetPath: path, TargetPath: path + "-t", VolumeCapability: writer},
			&csi.NodePublishVolumeResponse{}),
		"unpublish": unary(csi.Node_NodeUnpublishVolume_FullMethodName, &csi.NodeUnpublishVolumeRequest{
			VolumeId: id, TargetPath: path}, &csi.NodeUnpublishVolumeResponse{}),
	}
}

// tree lists every file below the test's directory, lock files aside.
func (m *machine) tree() []string {
	m.t.Helper()
	var found []string
	err := filepath.WalkDir(m.base, func(path string, d fs.DirEntry, err error) error {
		if err == nil && filepath.Base(filepath.Dir(path)) != "locks" {
			found = append(found, path)
		}
		return err
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return found
}

func TestHostileCapabilities(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	id, s := p.create("a", writer).VolumeId, m.staging("s")
	mode := writer.AccessMode
	mounted := func(v *csi.VolumeCapability_MountVolume) *csi.VolumeCapability {
		return &csi.VolumeCapability{AccessMode: mode, AccessType: &csi.VolumeCapability_Mount{Mount: v}}
	}
	for what, c := range map[string]*csi.VolumeCapability{
		"none":        nil,
		"empty":       {},
		"no type":     {AccessMode: mode},
		"no mode":     {AccessType: writer.AccessType},
		"many nodes":  capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER),
		"other mode":  capability(99),
		"btrfs":       mounted(&csi.VolumeCapability_MountVolume{FsType: "btrfs"}),
		"group name":  mounted(&csi.VolumeCapability_MountVolume{VolumeMountGroup: "wheel"}),
		"group -1":    mounted(&csi.VolumeCapability_MountVolume{VolumeMountGroup: "-1"}),
		"group 2^32":  mounted(&csi.VolumeCapability_MountVolume{VolumeMountGroup: "4294967296"}),
		"other path":  capability(mode.Mode, "journal_path=/etc/passwd"),
		"panic":       capability(mode.Mode, "errors=panic"),
		"remount":     capability(mode.Mode, "remount"),
		"over-long":   capability(mode.Mode, strings.Repeat("ro,", 2000)),
		"ext4 itself": capability(mode.Mode, "commit=nonsense"),
	} {
		step(t, what, p.stage(id, s, c), codes.InvalidArgument)
		if what == "ext4 itself" {
			continue
		}
		_, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "b",
			VolumeCapabilities: []*csi.VolumeCapability{c}})
		step(t, "create with "+what, err, codes.InvalidArgument)
	}
	_, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "b"})
	step(t, "create without capabilities", err, codes.InvalidArgument)
	step(t, "delete: nothing of it was staged", p.delete(id), codes.OK)
}

func TestSymbolicLinks(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		id, victim, s := p.create("a", multi).VolumeId, m.staging("victim"), m.staging("s")
		link, parent := m.target("link"), m.target("parent")
		for _, err := range []error{os.Symlink(victim, link), os.Symlink(m.work, parent)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		step(t, "stage on a link", p.stage(id, link, multi), codes.InvalidArgument)
		step(t, "stage below a link", p.stage(id, filepath.Join(parent, "s"), multi), codes.OK)
		step(t, "stage by the real path", p.stage(id, s, multi), codes.OK)
		step(t, "publish on a link", p.publish(id, s, link, multi, false), codes.InvalidArgument)
		step(t, "publish below a link", p.publish(id, s, filepath.Join(parent, "t"), multi, false), codes.OK)
		if got := m.mounted(); !slices.Equal(got, []string{s, m.target("t")}) {
			t.Errorf("mounted are %q", got)
		}
		if _, err := os.Readlink(link); err != nil {
			t.Errorf("the link: %v", err)
		}
		step(t, "unpublish", p.unpublish(id, m.target("t")), codes.OK)
		step(t, "unstage", p.unstage(id, filepath.Join(parent, "s")), codes.OK)
	})
}
