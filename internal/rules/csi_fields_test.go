package rules

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const specPackage = "github.com/container-storage-interface/spec/lib/go/csi"

// usedFields returns the fields of CSI's messages that package shim/internal/csi sets or reads, as "Message.Field" in
// Go's names. An option of a oneof counts as its field.
func usedFields(t *testing.T) map[string]bool {
	t.Helper()
	dir := filepath.Join(root, "shim", "internal", "csi")
	fset := token.NewFileSet()
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	var files []*ast.File
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	info := &types.Info{
		Selections: map[*ast.SelectorExpr]*types.Selection{}, Types: map[ast.Expr]types.TypeAndValue{},
	}
	checker := types.Config{Importer: importer.ForCompiler(fset, "gc", exportData(t, dir))}
	if _, err := checker.Check("holdfast/shim/internal/csi", fset, files, info); err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	for e, s := range info.Selections {
		if m := messageName(s.Recv()); m != "" {
			used[m+"."+strings.TrimPrefix(e.Sel.Name, "Get")] = true
		}
	}
	for e, tv := range info.Types {
		lit, is := e.(*ast.CompositeLit)
		m := messageName(tv.Type)
		if !is || m == "" {
			continue
		}
		for _, x := range lit.Elts {
			if kv, is := x.(*ast.KeyValueExpr); is {
				used[m+"."+kv.Key.(*ast.Ident).Name] = true
			}
		}
	}
	return used
}

// messageName returns the name of a type of CSI's package, or of the type to which a pointer points. It returns "" for
// other types.
func messageName(t types.Type) string {
	if p, is := types.Unalias(t).(*types.Pointer); is {
		t = p.Elem()
	}
	named, is := types.Unalias(t).(*types.Named)
	if !is || named.Obj().Pkg() == nil || named.Obj().Pkg().Path() != specPackage {
		return ""
	}
	return named.Obj().Name()
}

// exportData returns a function that opens the compiled types of a dependency of the package in dir.
func exportData(t *testing.T, dir string) func(path string) (io.ReadCloser, error) {
	t.Helper()
	list := exec.Command("go", "list", "-deps", "-export", "-json=ImportPath,Export", ".")
	list.Dir = dir
	out, err := list.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	exports := map[string]string{}
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct{ ImportPath, Export string }
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[p.ImportPath] = p.Export
	}
	return func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }
}

// capabilityUse says what Holdfast does for a plugin with a capability.
type capabilityUse struct {
	effect, test string
	not          bool // effect says why Holdfast does not use it
}

// capabilityUses has an entry for each name of a registry.Capability.
var capabilityUses = map[string]capabilityUse{
	"plugin.CONTROLLER_SERVICE": {"calls to the controller wait until one runs", "TestAttachWaitsForAnAbsentController",
		false},
	"plugin.VOLUME_ACCESSIBILITY_CONSTRAINTS": {"topologies are sent, and compared with the node's",
		"TestClaimNeedsAccessFromTheNode", false},
	"plugin.GROUP_CONTROLLER_SERVICE":  {"group snapshots are taken", "TestGroupSnapshotIsRefusedBeforeAnyCall", false},
	"plugin.SNAPSHOT_METADATA_SERVICE": {"blocks of snapshots are listed", "TestBlocksComeOnceAndInOrder", false},
	"plugin.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS": {"alpha; the plugin chooses where a snapshot is, and refuses a " +
		"volume that cannot be restored where it is requested", "", true},
	"expansion.ONLINE":  {"a volume is expanded while it is used", "TestExpandedWhileUsed", false},
	"expansion.OFFLINE": {"a volume is expanded while it is unused", "TestExpandedWhileUnused", false},
	"group.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT": {"group snapshots are taken, read and deleted",
		"TestGroupSnapshotIsRefusedBeforeAnyCall", false},
	"controller.CREATE_DELETE_VOLUME":     {"volumes are created and deleted", "TestHistories", false},
	"controller.PUBLISH_UNPUBLISH_VOLUME": {"volumes are attached and detached", "TestHistories", false},
	"controller.LIST_VOLUMES": {"doctor and volume list --external list volumes",
		"TestEndlessListIsBounded", false},
	"controller.GET_CAPACITY": {"plugin capacity asks", "TestCapacityIsAskedOfAControllerThatReportsIt",
		false},
	"controller.CREATE_DELETE_SNAPSHOT": {"snapshots are taken", "TestSnapshotIsCreatedOnceItIsReady", false},
	"controller.LIST_SNAPSHOTS": {"snapshot list --external lists them",
		"TestSnapshotsOfAPluginAreListedToTheirEnd", false},
	"controller.CLONE_VOLUME":     {"volumes are filled from volumes", "TestVolumeFromASourceIsNeverEmpty", false},
	"controller.PUBLISH_READONLY": {"volumes are attached read-only for readers", "TestAttachReadOnly", false},
	"controller.EXPAND_VOLUME":    {"volumes are expanded", "TestExpandRefused", false},
	"controller.LIST_VOLUMES_PUBLISHED_NODES": {"doctor compares the listed nodes with the recorded attachments",
		"TestListsNamePublishedNodes", false},
	"controller.GET_VOLUME": {"volume adopt asks for one volume instead of a list",
		"TestAdoptedVolumeIsAsItsPluginDescribesIt", false},
	"controller.SINGLE_NODE_MULTI_WRITER": {"the two newer access modes are sent", "TestHistories", false},
	"controller.MODIFY_VOLUME": {"mutable parameters are sent at creation and changed later",
		"TestModificationIsRefusedBeforeTheCall", false},
	"controller.GET_SNAPSHOT": {"for a snapshot that is not ready, GetSnapshot is sent instead of CreateSnapshot again",
		"TestSnapshotIsCreatedOnceItIsReady", false},
	"controller.LIST_VOLUME_HEALTH": {"unhealthy volumes are listed every five minutes",
		"TestListOfUnhealthyVolumesIsReadToItsEnd", false},
	"controller.GET_VOLUME_HEALTH": {"the health of volumes is requested one by one if the plugin has no list",
		"TestHealthChangesAreRecordedAtIntervals", false},
	"node.STAGE_UNSTAGE_VOLUME":     {"volumes are staged", "TestHistories", false},
	"node.GET_VOLUME_STATS":         {"volume status shows the usage", "TestStatsOfEveryAnswer", false},
	"node.EXPAND_VOLUME":            {"file systems are expanded on the node", "TestExpandedWhileUsed", false},
	"node.SINGLE_NODE_MULTI_WRITER": {"the two newer access modes are sent", "TestHistories", false},
	"node.VOLUME_MOUNT_GROUP": {"the plugin sets the group; without it, Holdfast does",
		"TestGroupIsSetByAPluginThatCan", false},
	"node.GET_VOLUME_HEALTH": {"the health of volumes in use is requested every minute",
		"TestHealthChangesAreRecordedAtIntervals", false},
	"node.GET_STORAGE_HEALTH": {"the health of the storage is requested every minute",
		"TestHealthChangesAreRecordedAtIntervals", false},
}

const (
	byInterface = "" // used through an interface that several messages implement
	noSecrets   = "secrets belong to volumes, and the call is not about one"
)

// unusedFields are the fields that package shim/internal/csi neither sets nor reads by name, with the reason.
var unusedFields = map[string]string{
	"GetPluginInfoResponse.manifest":                                      "for people; name and version are shown",
	"ValidateVolumeCapabilitiesResponse.Confirmed.volume_context":         "optional, so its absence says nothing",
	"ValidateVolumeCapabilitiesResponse.Confirmed.parameters":             "optional, so its absence says nothing",
	"ValidateVolumeCapabilitiesResponse.Confirmed.mutable_parameters":     "optional, so its absence says nothing",
	"ControllerListVolumeHealthRequest.secrets":                           noSecrets,
	"ListSnapshotsRequest.secrets":                                        noSecrets,
	"NodeGetStorageHealthRequest.secrets":                                 noSecrets,
	"NodeGetStorageHealthResponse.StorageBackendHealth.volume_capability": "reason and message say what is wrong",
	"GetCapacityRequest.volume_capabilities":                              "capacity is requested for any use",
	"CreateSnapshotRequest.accessibility_requirements": "alpha; see " +
		"SNAPSHOT_ACCESSIBILITY_CONSTRAINTS",
	"Snapshot.accessible_topology": "alpha; see " +
		"SNAPSHOT_ACCESSIBILITY_CONSTRAINTS",
	"ListSnapshotsRequest.snapshot_id": "the list is read as a whole; GetSnapshot " +
		"reads one",
	"ListVolumesResponse.VolumeStatus.published_node_ids":         byInterface,
	"ControllerGetVolumeResponse.VolumeStatus.published_node_ids": byInterface,
	"GetMetadataAllocatedResponse.block_metadata_type":            byInterface,
	"GetMetadataAllocatedResponse.volume_capacity_bytes":          byInterface,
	"GetMetadataAllocatedResponse.block_metadata":                 byInterface,
	"GetMetadataDeltaResponse.block_metadata_type":                byInterface,
	"GetMetadataDeltaResponse.volume_capacity_bytes":              byInterface,
	"GetMetadataDeltaResponse.block_metadata":                     byInterface,
}

// capabilityTable returns the table of all capabilities of the specification.
func capabilityTable(t *testing.T, tests map[string]bool) string {
	var b strings.Builder
	b.WriteString("\n## Capabilities\n\n| capability | with it | test |\n|---|---|---|\n")
	seen := 0
	for _, service := range []struct {
		name   string
		values protoreflect.EnumDescriptor
	}{
		{"plugin", csi.PluginCapability_Service_UNKNOWN.Descriptor()},
		{"expansion", csi.PluginCapability_VolumeExpansion_UNKNOWN.Descriptor()},
		{"controller", csi.ControllerServiceCapability_RPC_UNKNOWN.Descriptor()},
		{"group", csi.GroupControllerServiceCapability_RPC_UNKNOWN.Descriptor()},
		{"node", csi.NodeServiceCapability_RPC_UNKNOWN.Descriptor()},
	} {
		for i := 1; i < service.values.Values().Len(); i++ { // 0 is UNKNOWN
			name := service.name + "." + string(service.values.Values().Get(i).Name())
			u, known := capabilityUses[name]
			switch {
			case !known || !u.not && !tests[u.test]:
				t.Errorf("capability %s: it is missing in the table, or there is no test %q", name, u.test)
			case u.not:
				fmt.Fprintf(&b, "| `%s` | *not used: %s* | |\n", name, u.effect)
			default:
				fmt.Fprintf(&b, "| `%s` | %s | `%s` |\n", name, u.effect, u.test)
			}
			seen++
		}
	}
	if seen != len(capabilityUses) {
		t.Errorf("the table has %d capabilities, and %d are of the specification", len(capabilityUses), seen)
	}
	return b.String()
}

// fieldTable returns the table of the messages of the specification, with the fields that Holdfast uses.
func fieldTable(t *testing.T) string {
	var b strings.Builder
	b.WriteString("\n## Fields\n\nThe fields that package `shim/internal/csi` sets or reads.\n\n" +
		"| message | used | not used, because |\n|---|---|---|\n")
	used, exceptions := usedFields(t), 0
	eachMessage(csi.File_csi_proto.Messages(), func(m protoreflect.MessageDescriptor) {
		name := strings.TrimPrefix(string(m.FullName()), "csi.v1.")
		var is, not []string
		for i := range m.Fields().Len() {
			field := string(m.Fields().Get(i).Name())
			why, exception := unusedFields[name+"."+field]
			if exception {
				exceptions++
			}
			if used[strings.ReplaceAll(name, ".", "_")+"."+goName(field)] == exception {
				t.Errorf("%s.%s: it is used: %v; the reason why it is not: %q", name, field, !exception, why)
			}
			if why == byInterface {
				is = append(is, code(field))
			} else {
				not = append(not, code(field)+": "+why)
			}
		}
		if is != nil || not != nil {
			fmt.Fprintf(&b, "| %s | %s | %s |\n", name, strings.Join(is, ", "), strings.Join(not, "; "))
		}
	})
	if exceptions != len(unusedFields) {
		t.Errorf("%d of %d exceptions are fields of the specification", exceptions, len(unusedFields))
	}
	return b.String()
}

// eachMessage calls do for the messages, and for those declared in them.
func eachMessage(messages protoreflect.MessageDescriptors, do func(protoreflect.MessageDescriptor)) {
	for i := range messages.Len() {
		if m := messages.Get(i); !m.IsMapEntry() {
			do(m)
			eachMessage(m.Messages(), do)
		}
	}
}

// goName returns the name of a field in generated code.
func goName(field string) string {
	words := strings.Split(field, "_")
	for i, w := range words {
		words[i] = strings.ToUpper(w[:1]) + w[1:]
	}
	return strings.Join(words, "")
}
