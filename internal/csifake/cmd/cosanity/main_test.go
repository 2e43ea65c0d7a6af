package main

import (
	"bytes"
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

var update = flag.Bool("update", false, "write the table of docs/cosanity.md")

func TestRulesAreInTheDocs(t *testing.T) {
	const path = "../../../../docs/cosanity.md"
	text, err := os.ReadFile(path)
	must(t, err)
	before, table, _ := strings.Cut(string(text), "## Rules\n\n")
	var printed bytes.Buffer
	writeRules(&printed)
	switch {
	case *update:
		must(t, os.WriteFile(path, []byte(before+"## Rules\n\n"+printed.String()), 0o644))
	case table != printed.String():
		t.Errorf("%s is out of date; run: go test ./internal/csifake/cmd/cosanity -update", path)
	}
}

// bad is an orchestrator that breaks all rules.
type bad struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.GroupControllerClient
	csi.NodeClient
	csi.SnapshotMetadataClient
	dir string
	ctx context.Context
}

func dial(t *testing.T, p *csifake.Plugin, dir string) bad {
	conn, err := grpc.NewClient("unix:"+p.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return bad{csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewGroupControllerClient(conn),
		csi.NewNodeClient(conn), csi.NewSnapshotMetadataClient(conn), dir, t.Context()}
}

func usageOf(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
}

var writer = usageOf(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)

func (b bad) learn() {
	_, _ = b.GetPluginInfo(b.ctx, &csi.GetPluginInfoRequest{})
	_, _ = b.GetPluginCapabilities(b.ctx, &csi.GetPluginCapabilitiesRequest{})
	_, _ = b.ControllerGetCapabilities(b.ctx, &csi.ControllerGetCapabilitiesRequest{})
	_, _ = b.NodeGetCapabilities(b.ctx, &csi.NodeGetCapabilitiesRequest{})
	_, _ = b.NodeGetInfo(b.ctx, &csi.NodeGetInfoRequest{})
}

func (b bad) create(name string) string {
	made, _ := b.CreateVolume(b.ctx, &csi.CreateVolumeRequest{Name: name,
		VolumeCapabilities:        []*csi.VolumeCapability{writer},
		AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{{}}}, // R26
		Secrets:                   map[string]string{"a b": "x"}})                           // R23
	return made.GetVolume().GetVolumeId()
}

func (b bad) attach(volume, node string) {
	_, _ = b.ControllerPublishVolume(b.ctx, &csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: node,
		Readonly:         true,
		VolumeCapability: writer, Secrets: map[string]string{"key": "x"}})
}

func (b bad) stage(volume, path string) {
	_, _ = b.NodeStageVolume(b.ctx, &csi.NodeStageVolumeRequest{VolumeId: volume, StagingTargetPath: path,
		VolumeCapability: writer, VolumeContext: map[string]string{"not": "the volume's"}})
}

func (b bad) publish(volume, target string) {
	_, _ = b.NodePublishVolume(b.ctx, &csi.NodePublishVolumeRequest{VolumeId: volume, TargetPath: target,
		VolumeCapability: writer})
}

// breakRules breaks all rules but R0, which no call breaks, and R3, R6, R20, R31 and RU, which the test breaks.
func (b bad) breakRules() {
	b.create("before the capabilities are known") // R1
	b.learn()
	one, two := b.create("one"), b.create("two\x01"+strings.Repeat("x", 200)) // R18, R21
	b.publish(one, "relative")                                                // R2, R11, R12
	b.attach(one, "another node")                                             // R14, R15
	b.attach(one, "node-1")
	b.attach(two, "node-1")   // R28
	b.stage(one, b.dir)       // R13
	b.stage(one, "elsewhere") // R9, R10
	b.publish(one, filepath.Join("/", b.dir, "t1"))
	b.publish(one, filepath.Join("/", b.dir, "t2"))                                                       // R8, R17
	_, _ = b.NodeExpandVolume(b.ctx, &csi.NodeExpandVolumeRequest{VolumeId: one, VolumePath: "/nowhere"}) // R30
	_, _ = b.ListVolumes(b.ctx, &csi.ListVolumesRequest{StartingToken: "7"})                              // R29
	_, _ = b.ValidateVolumeCapabilities(b.ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: two,
		VolumeCapabilities: []*csi.VolumeCapability{writer}})
	b.stage(two, b.dir) // R16
	_, _ = b.ControllerUnpublishVolume(b.ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: one,
		NodeId: "node-1"}) // R25
	_, _ = b.DeleteVolume(b.ctx, &csi.DeleteVolumeRequest{VolumeId: one}) // R4
	snapshot, _ := b.CreateVolumeGroupSnapshot(b.ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: "g",
		SourceVolumeIds: []string{one, two}})
	_, _ = b.DeleteVolumeGroupSnapshot(b.ctx, &csi.DeleteVolumeGroupSnapshotRequest{
		GroupSnapshotId: snapshot.GetGroupSnapshot().GetGroupSnapshotId()}) // R32
	single, _ := b.CreateSnapshot(b.ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: two})
	id := single.GetSnapshot().GetSnapshotId()
	_, _ = b.DeleteSnapshot(b.ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
	// R33
	if blocks, err := b.GetMetadataAllocated(b.ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: id}); err == nil {
		_, _ = blocks.Recv()
	}
}

// For an orchestrator that breaks every rule, all rules are reported as broken, with the calls as evidence.
func TestBadOrchestratorIsFoundOut(t *testing.T) {
	work := t.TempDir()
	cfg := func(scenario, name string) csifake.Config {
		t.Helper()
		c, err := pluginConfig([]string{"-dir", filepath.Join(work, name), "-endpoint", "not/a.socket", scenario})
		must(t, err)
		c.Socket, c.Mounts = "", false // csifake makes a directory with a short path
		return c
	}
	first := cfg("limit", "first")
	first.Caps = append(first.Caps, "EXPAND_VOLUME", "LIST_VOLUMES", "CREATE_DELETE_SNAPSHOT",
		"service/GROUP_CONTROLLER_SERVICE",
		"CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT", "service/SNAPSHOT_METADATA_SERVICE")
	first.Script = []csifake.Rule{{RPC: "ValidateVolumeCapabilities", Unconfirmed: true}}
	plugin := csifake.Start(t, first)
	dial(t, plugin, work).breakRules()

	named := csifake.Start(t, cfg("name", "named"))
	orchestrator := dial(t, named, work)
	orchestrator.learn()
	orchestrator.create("one") // R20

	twice := csifake.Start(t, cfg("uncertain", "uncertain"))
	orchestrator = dial(t, twice, work)
	orchestrator.learn()
	orchestrator.create("one")
	_, _ = orchestrator.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "one"}) // R6
	id := csifake.VolumeID("one")
	orchestrator.attach(id, "node-1")
	orchestrator.stage(id, work) // RU: the attachment is uncertain
	gate := twice.On("NodeGetVolumeStats").Hold()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = orchestrator.NodeGetVolumeStats(t.Context(),
			&csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: work})
	}()
	<-gate.Arrived()
	orchestrator.attach(id, "node-2") // R3
	gate.Open()
	<-ended

	var out bytes.Buffer
	broken, err := run([]string{"judge", filepath.Join(work, "first"), filepath.Join(work, "named"),
		filepath.Join(work, "uncertain")}, &out)
	if err != nil || !broken {
		t.Fatalf("broken: %v, %v", broken, err)
	}
	for _, rule := range journal.Rules {
		if rule.ID != "R0" && !strings.Contains(out.String(), "BROKEN        "+rule.ID+" ") {
			t.Errorf("rule %s was broken and the report does not say so", rule.ID)
		}
	}
	if t.Failed() {
		t.Log(out.String())
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
