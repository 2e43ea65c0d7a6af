package rules

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

var update = flag.Bool("update", false, "rewrite golden files")

// rpcUse says how Holdfast uses an RPC of CSI.
type rpcUse struct {
	sdk     string // method of host.Host; empty: Holdfast makes the call by itself, or not at all
	command string // of holdfast
	test    string
	not     string // reason why Holdfast does not make the call
}

var rpcUses = map[string]rpcUse{
	"GetPluginInfo":         {"Plugins", "plugin status", "TestDescribeReturnsAFingerprintPerRole", ""},
	"GetPluginCapabilities": {"Plugins", "plugin status", "TestDescribeReturnsAFingerprintPerRole", ""},
	"Probe":                 {"", "", "TestProbeWithoutReadyMeansReady", ""},

	"CreateVolume":               {"CreateVolume", "volume create", "TestHistories", ""},
	"DeleteVolume":               {"DeleteVolume", "volume delete", "TestHistories", ""},
	"ControllerPublishVolume":    {"PrepareAlloc", "job run", "TestHistories", ""},
	"ControllerUnpublishVolume":  {"ReleaseAlloc", "job stop", "TestHistories", ""},
	"ValidateVolumeCapabilities": {"RegisterVolume", "volume register", "TestOnlyKnownCapabilitiesAreConfirmed", ""},
	"ListVolumes": {"VolumesAtPlugin", "volume list --external",
		"TestVolumesOfAPluginAreListedToTheirEnd", ""},
	"GetCapacity": {"PluginCapacity", "plugin capacity",
		"TestCapacityIsAskedOfAControllerThatReportsIt", ""},
	"ControllerGetCapabilities": {"Plugins", "plugin status", "TestDescribeReturnsAFingerprintPerRole", ""},
	"CreateSnapshot":            {"CreateSnapshot", "snapshot create", "TestSnapshotIsCreatedOnceItIsReady", ""},
	"DeleteSnapshot": {"DeleteSnapshot", "snapshot delete",
		"TestSnapshotIsDeletedOnceItsCreationIsCertain", ""},
	"ListSnapshots": {"SnapshotsAtPlugin", "snapshot list --external",
		"TestSnapshotsOfAPluginAreListedToTheirEnd", ""},
	"GetSnapshot":                {"CreateSnapshot", "snapshot create", "TestSnapshotIsCreatedOnceItIsReady", ""},
	"ControllerExpandVolume":     {"ExpandVolume", "volume expand", "TestHistories", ""},
	"ControllerGetVolume":        {"Volumes", "volume status", "TestHealthChangesAreRecordedAtIntervals", ""},
	"ControllerModifyVolume":     {"ModifyVolume", "volume modify", "TestModificationOfEachOutcome", ""},
	"ControllerGetVolumeHealth":  {"Volumes", "volume status", "TestListOfUnhealthyVolumesIsReadToItsEnd", ""},
	"ControllerListVolumeHealth": {"Volumes", "volume status", "TestListOfUnhealthyVolumesIsReadToItsEnd", ""},

	"GroupControllerGetCapabilities": {"Plugins", "plugin status", "TestDescribeReturnsAFingerprintPerRole", ""},
	"CreateVolumeGroupSnapshot": {"CreateGroupSnapshot", "group-snapshot create",
		"TestGroupSnapshotIsCreatedOnceItIsReady", ""},
	"DeleteVolumeGroupSnapshot": {"DeleteGroupSnapshot", "group-snapshot delete",
		"TestMembersGoWithTheirGroup", ""},
	"GetVolumeGroupSnapshot": {"CreateGroupSnapshot", "group-snapshot create",
		"TestGroupSnapshotIsCreatedOnceItIsReady", ""},

	"GetMetadataAllocated": {"SnapshotBlocks", "snapshot diff", "TestBlocksComeOnceAndInOrder", ""},
	"GetMetadataDelta":     {"SnapshotBlocks", "snapshot diff", "TestListOfBlocksIsContinued", ""},

	"NodeStageVolume":      {"PrepareAlloc", "job run", "TestHistories", ""},
	"NodeUnstageVolume":    {"ReleaseAlloc", "job stop", "TestHistories", ""},
	"NodePublishVolume":    {"PrepareAlloc", "job run", "TestHistories", ""},
	"NodeUnpublishVolume":  {"ReleaseAlloc", "job stop", "TestHistories", ""},
	"NodeGetVolumeStats":   {"VolumeStats", "volume status", "TestStatsOfEveryAnswer", ""},
	"NodeExpandVolume":     {"ExpandVolume", "volume expand", "TestExpandedWhileUnused", ""},
	"NodeGetCapabilities":  {"Plugins", "plugin status", "TestDescribeReturnsAFingerprintPerRole", ""},
	"NodeGetInfo":          {"Plugins", "plugin status", "TestDescribeReturnsAFingerprintPerRole", ""},
	"NodeGetVolumeHealth":  {"Volumes", "volume status", "TestHealthChangesAreRecordedAtIntervals", ""},
	"NodeGetStorageHealth": {"Plugins", "plugin status", "TestHealthChangesAreRecordedAtIntervals", ""},
}

// docs/csi.md has each RPC, capability and field of the specification, with methods and tests that exist.
func TestTablesOfCSIAreComplete(t *testing.T) {
	names, tests := declared(t)
	var b bytes.Buffer
	b.WriteString(`# CSI

How Holdfast uses each RPC, capability and field of CSI 1.13, printed by a test of ` + "`internal/rules`" + `. Every RPC
passes through the [CSI endpoint](csi-endpoint.md), also those that Holdfast does not call itself.
`)
	used, seen := 0, 0
	services := csi.File_csi_proto.Services()
	for i := range services.Len() {
		fmt.Fprintf(&b, "\n## %s\n\n| RPC | method of host.Host | command | test |\n|---|---|---|---|\n",
			services.Get(i).Name())
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			name := string(methods.Get(j).Name())
			u, known := rpcUses[name]
			if !known {
				t.Errorf("%s is missing in the table", name)
				continue
			}
			seen++
			if u.not != "" {
				fmt.Fprintf(&b, "| %s | | | *%s* |\n", name, u.not)
				continue
			}
			used++
			if u.sdk != "" && !names["host.(*Host)."+u.sdk] || !tests[u.test] {
				t.Errorf("%s: no method %q of host.Host, or no test %q", name, u.sdk, u.test)
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", name, code(u.sdk), code(u.command), code(u.test))
		}
	}
	if seen != len(rpcUses) {
		t.Errorf("the table has %d RPCs, and %d are of the specification", len(rpcUses), seen)
	}
	fmt.Fprintf(&b, "\n%d of %d RPCs are used.\n", used, seen)
	b.WriteString(capabilityTable(t, tests))
	b.WriteString(fieldTable(t))
	path := filepath.Join(root, "docs", "csi.md")
	if *update {
		if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != b.String() {
		t.Errorf("docs/csi.md differs from the table (%v): go test ./internal/rules -update", err)
	}
}

// code returns the text as code of Markdown.
func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}
