package csifake

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/internal/csifake/journal"
)

// publishNew creates, attaches, stages and publishes a volume as a correct client does.
func (c *client) publishNew(name string, at places) (id string) {
	c.t.Helper()
	ctx := c.t.Context()
	made := c.create(name)
	id, vc := made.GetVolumeId(), made.GetVolumeContext()
	attached, err := c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "node-1",
		VolumeCapability: writer(), VolumeContext: vc})
	must(c.t, err)
	_, err = c.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: at.staging,
		VolumeCapability: writer(),
		VolumeContext:    vc, PublishContext: attached.GetPublishContext()})
	must(c.t, err)
	_, err = c.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: at.staging,
		TargetPath:       at.target,
		VolumeCapability: writer(), VolumeContext: vc, PublishContext: attached.GetPublishContext()})
	must(c.t, err)
	return id
}

func (c *client) deletePublished(id string, at places) {
	c.t.Helper()
	ctx := c.t.Context()
	must(c.t, c.unpublish(ctx, id, at), c.unstage(ctx, id, at))
	_, err := c.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "node-1"})
	must(c.t, err)
	_, err = c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	must(c.t, err)
}

// sizes returns the sizes in the answer to NodeGetVolumeStats.
func (c *client) sizes(id string, at places) [3]int64 {
	c.t.Helper()
	stats, err := c.NodeGetVolumeStats(c.t.Context(),
		&csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: at.target,
			StagingTargetPath: at.staging})
	must(c.t, err)
	u := stats.GetUsage()[0]
	return [3]int64{u.GetTotal(), u.GetUsed(), u.GetAvailable()}
}

// The node reports the size that it knows. The volume grows first at the controller and then on the node. Check finds
// no violation.
func TestVolumeGrowsOnControllerThenNode(t *testing.T) {
	fake, c := start(t, Config{Caps: AllCaps})
	at, ctx, gib := newPaths(t), t.Context(), int64(1<<30)
	id := c.publishNew("one", at)
	must(t, fake.Backend().SetUsed(id, 100))
	if got, want := c.sizes(id, at), [3]int64{gib, 100, gib - 100}; got != want {
		t.Errorf("stats tell %v, want %v", got, want)
	}
	grown, err := c.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id,
		CapacityRange: &csi.CapacityRange{RequiredBytes: 3 * gib}})
	must(t, err)
	if !grown.GetNodeExpansionRequired() || grown.GetCapacityBytes() != 3*gib || c.sizes(id, at)[0] != gib {
		t.Errorf("expanded: %v, and the node has %v already", grown, c.sizes(id, at))
	}
	expand := &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: at.target, StagingTargetPath: at.staging,
		CapacityRange: &csi.CapacityRange{RequiredBytes: 4 * gib}}
	_, err = c.NodeExpandVolume(ctx, expand)
	wantCode(t, err, "OUT_OF_RANGE") // the controller has made a smaller size
	expand.CapacityRange = nil
	_, err = c.NodeExpandVolume(ctx, expand)
	must(t, err)
	if c.sizes(id, at)[0] != 3*gib {
		t.Errorf("the node has %v", c.sizes(id, at))
	}
	_, err = c.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: "/elsewhere",
		StagingTargetPath: at.staging})
	wantCode(t, err, "NOT_FOUND")
	c.deletePublished(id, at)
	// R30 for a size larger than the controller's, R12 for stats of another path
	wantRules(t, fake, journal.Options{Settled: true, Strict: true}, "R30", "R12")
}

// Lists and single volumes have the nodes to which a volume is attached, if the plugin announces that.
func TestListsNamePublishedNodes(t *testing.T) {
	for _, tells := range []bool{true, false} {
		caps := append(everyCap(), "expansion/ONLINE")
		if !tells {
			caps = slices.DeleteFunc(caps, func(s string) bool {
				return s == "controller/LIST_VOLUMES_PUBLISHED_NODES"
			})
		}
		_, c := start(t, Config{Caps: caps})
		id := c.publishNew("one", newPaths(t))
		list, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		must(t, err)
		one, err := c.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
		must(t, err)
		var want []string
		if tells {
			want = []string{"node-1"}
		}
		if got := list.GetEntries()[0].GetStatus().GetPublishedNodeIds(); !slices.Equal(got, want) {
			t.Errorf("ListVolumes tells %v, want %v", got, want)
		}
		if got := one.GetStatus().GetPublishedNodeIds(); !slices.Equal(got, want) {
			t.Errorf("ControllerGetVolume tells %v, want %v", got, want)
		}
	}
}

// A volume that is filled from another one or from a snapshot is at least as large as its source. The plugin needs the
// capability for that.
func TestVolumesAreFilledFromSources(t *testing.T) {
	fake, c := start(t, Config{Caps: AllCaps})
	ctx := t.Context()
	create := func(c *client, name string, limit int64, from *csi.VolumeContentSource) (*csi.Volume, error) {
		made, err := c.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: name, VolumeContentSource: from,
			VolumeCapabilities: []*csi.VolumeCapability{writer()},
			CapacityRange:      &csi.CapacityRange{LimitBytes: limit}})
		return made.GetVolume(), err
	}
	first, err := c.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: "first",
		VolumeCapabilities: []*csi.VolumeCapability{writer()},
		CapacityRange:      &csi.CapacityRange{RequiredBytes: 5 << 30}})
	must(t, err)
	id := first.GetVolume().GetVolumeId()
	snap, err := c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
	must(t, err)
	volume := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
	snapshot := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snap.GetSnapshot().GetSnapshotId()}}}
	for name, from := range map[string]*csi.VolumeContentSource{"clone": volume, "restored": snapshot} {
		v, err := create(c, name, 0, from)
		must(t, err)
		if v.GetCapacityBytes() != 5<<30 || v.GetContentSource() == nil {
			t.Errorf("the %s volume is %v", name, v)
		}
		_, err = create(c, "small "+name, 1<<20, from)
		wantCode(t, err, "OUT_OF_RANGE")
		plain, plainClient := start(t, Config{Caps: []string{"CREATE_DELETE"}, Backend: fake.Backend()})
		_, err = create(plainClient, "plain "+name, 0, from)
		wantCode(t, err, "INVALID_ARGUMENT")
		wantRules(t, plain, journal.Options{}, "R1")
	}
	wantLegal(t, fake)
}

// A volume has the requested topology, and Check reports a node that cannot reach it.
func TestVolumeOutsideTheTopologyIsAViolation(t *testing.T) {
	fake, c := start(t, Config{Caps: append(slices.Clone(AllCaps), "TOPOLOGY"),
		Topology: map[string]string{"zone": "b"}})
	ctx := t.Context()
	zone := &csi.Topology{Segments: map[string]string{"Zone": "a"}}
	made, err := c.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: "one",
		VolumeCapabilities:        []*csi.VolumeCapability{writer()},
		AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{zone}}})
	must(t, err)
	if got := made.GetVolume().GetAccessibleTopology(); len(got) != 1 || got[0].GetSegments()["Zone"] != "a" {
		t.Errorf("the volume is at %v", got)
	}
	_, err = c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: made.GetVolume().GetVolumeId(), NodeId: "node-1", VolumeCapability: writer(),
		VolumeContext: made.GetVolume().GetVolumeContext()})
	must(t, err)
	wantRules(t, fake, journal.Options{}, "R26")
}

// A volume that was never created is published only if its context says that it is an inline volume.
func TestOnlyAnInlineVolumeIsPublishedUncreated(t *testing.T) {
	fake, c := start(t, Config{Caps: AllCaps})
	_, err := c.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: "inline-1",
		TargetPath: newPaths(t).target, VolumeCapability: writer(),
		VolumeContext: map[string]string{"csi.storage.k8s.io/ephemeral": "false"}})
	wantCode(t, err, "NOT_FOUND")
	if found := fake.Check(journal.Options{}); len(found) == 0 {
		t.Error("a volume that was never staged is published, and the check reports nothing")
	}
}

// The journal has all fields of requests that Check needs, as they were sent.
func TestJournalHasTheRequestsAsSent(t *testing.T) {
	fake, c := start(t, Config{Caps: AllCaps, Endpoint: "tcp://wrong"})
	ctx := t.Context()
	long := string(make([]byte, 129))
	grouped := writer()
	grouped.GetMount().VolumeMountGroup = "100"
	grouped.GetMount().MountFlags = []string{long, string(make([]byte, 4000))}
	grouped.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	_, err := c.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: long,
		VolumeCapabilities: []*csi.VolumeCapability{grouped},
		Parameters:         map[string]string{"k": string(make([]byte, 4096))},
		Secrets:            map[string]string{"a b": "canary"}, AccessibilityRequirements: &csi.TopologyRequirement{}})
	must(t, err)
	_, err = c.ListVolumes(ctx, &csi.ListVolumesRequest{StartingToken: "nonsense"})
	wantCode(t, err, "ABORTED")
	for _, when := range []string{"1", ""} {
		_, err = c.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 1, StartingToken: when})
		must(t, err)
	}
	// R31 at the start; of the creation: the mode, name, flags and parameters, control characters, the secret's key,
	// topology; two tokens.
	wantRules(t, fake, journal.Options{}, "R31", "R1", "R18", "R18", "R18", "R21", "R23", "R26", "R29", "R29")
	calls, err := fake.Calls("CreateVolume")
	must(t, err)
	if !calls[0].MountGroup || !calls[0].Topology {
		t.Errorf("the journal has %+v", calls[0])
	}
	text, err := os.ReadFile(fake.Journal())
	must(t, err)
	if strings.Contains(string(text), "canary") {
		t.Errorf("the journal has a secret:\n%s", text)
	}
}
