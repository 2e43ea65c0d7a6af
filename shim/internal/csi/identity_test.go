package csi

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

var bothRoles = []registry.Role{registry.RoleController, registry.RoleNode}

func TestDescribeReturnsAFingerprintPerRole(t *testing.T) {
	_, f := start(t, csifake.Config{
		Name: "disk.example.org", Version: "1.2.3", NodeID: "i-0123", MaxVolumes: 25,
		Topology: map[string]string{"zone": "a"},
		Caps: []string{"TOPOLOGY", "expansion/ONLINE", "PUBLISH_UNPUBLISH", "STAGE_UNSTAGE", "controller/99",
			"node/98", "GROUP_CONTROLLER_SERVICE", "CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT"},
	})
	got, err := open(t, f).Describe(patient(t), bothRoles)
	must(t, err)
	want := map[registry.Role]registry.Fingerprint{
		registry.RoleController: {Provider: "disk.example.org", Version: "1.2.3", Capabilities: []registry.Capability{
			"controller.99", registry.AttachDetach, "expansion.ONLINE", registry.GroupSnapshots,
			registry.PluginController, registry.PluginGroups, registry.PluginTopology,
		}},
		registry.RoleNode: {
			Provider: "disk.example.org", Version: "1.2.3", NodeID: "i-0123", MaxVolumes: 25,
			Topology: map[string]string{"zone": "a"},
			Capabilities: []registry.Capability{"expansion.ONLINE", "node.98", registry.StageUnstage,
				registry.PluginController, registry.PluginGroups, registry.PluginTopology},
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("described as\n%+v, want\n%+v", got, want)
	}
}

// A probe without a ready field means ready.
func TestProbeWithoutReadyMeansReady(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	c := open(t, f)
	for _, p := range []struct {
		reply *csi.ProbeResponse
		err   error
		ready bool
	}{
		{&csi.ProbeResponse{}, nil, true},
		{&csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil, true},
		{&csi.ProbeResponse{Ready: wrapperspb.Bool(false)}, nil, false},
		{nil, status.Error(codes.FailedPrecondition, "no\nbackend"), false},
		{nil, status.Error(codes.Unimplemented, "no Probe"), false},
	} {
		fake.ClearScript()
		fake.On("Probe").Reply(p.reply, p.err)
		ready, err := c.Probe(patient(t))
		if ready != p.ready || (err == nil) != (p.err == nil) {
			t.Errorf("%v, %v: ready %v, %v", p.reply, p.err, ready, err)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("error has two lines: %q", err)
		}
	}
}

// Each unusual answer is either refused with a clear text or tolerated.
func TestOddDescriptionsAreRefusedOrTolerated(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	many := &csi.NodeGetCapabilitiesResponse{}
	for i := range 100_000 {
		many.Capabilities = append(many.Capabilities, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{
			Rpc: &csi.NodeServiceCapability_RPC{Type: csi.NodeServiceCapability_RPC_Type(i)},
		}})
	}
	for _, c := range []struct {
		name, rpc string
		reply     proto.Message
		err       error
		want      string // of the error; empty: tolerated
	}{
		{"empty info", "GetPluginInfo", &csi.GetPluginInfoResponse{}, nil, "invalid plugin name \"\""},
		{"name with a slash", "GetPluginInfo", &csi.GetPluginInfoResponse{Name: "../../etc"}, nil,
			"invalid plugin name"},
		{"name with a line break", "GetPluginInfo", &csi.GetPluginInfoResponse{Name: "a\nb"}, nil,
			"invalid plugin name"},
		{"name that ends in a dot", "GetPluginInfo", &csi.GetPluginInfoResponse{Name: "a.b."}, nil,
			"invalid plugin name"},
		{"name of 64", "GetPluginInfo", &csi.GetPluginInfoResponse{Name: long[:64]}, nil, "invalid plugin name"},
		{"name of 63", "GetPluginInfo", &csi.GetPluginInfoResponse{Name: long[:63]}, nil, ""},
		{"long version", "GetPluginInfo", &csi.GetPluginInfoResponse{Name: "a.b", VendorVersion: long}, nil,
			"longer than 128"},
		{"oversized info", "GetPluginInfo", &csi.GetPluginInfoResponse{Name: strings.Repeat(long, 5)}, nil,
			"UNREADABLE"},
		{"no info", "GetPluginInfo", nil, status.Error(codes.Unimplemented, "no"), "GetPluginInfo: UNIMPLEMENTED: no"},
		{"nothing", "GetPluginCapabilities", &csi.GetPluginCapabilitiesResponse{}, nil, ""},
		{"empty capabilities", "GetPluginCapabilities",
			&csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{{}, {
				Type: &csi.PluginCapability_Service_{},
			}}}, nil, ""},
		{"unknown service", "GetPluginCapabilities",
			&csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{{
				Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: 99}},
			}}}, nil, ""},
		{"no capabilities", "GetPluginCapabilities", nil, status.Error(codes.Internal, "no"),
			"GetPluginCapabilities: INTERNAL"},
		{"empty controller capability", "ControllerGetCapabilities", &csi.ControllerGetCapabilitiesResponse{
			Capabilities: []*csi.ControllerServiceCapability{{}},
		}, nil, ""},
		{"no controller", "ControllerGetCapabilities", nil, status.Error(codes.Unimplemented, "no"),
			"ControllerGetCapabilities: UNIMPLEMENTED"},
		{"empty node capability", "NodeGetCapabilities",
			&csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{{}}}, nil, ""},
		{"endless node capabilities", "NodeGetCapabilities", many, nil, ""},
		{"no node", "NodeGetCapabilities", nil, status.Error(codes.Unimplemented, "no"),
			"NodeGetCapabilities: UNIMPLEMENTED"},
		{"empty node id", "NodeGetInfo", &csi.NodeGetInfoResponse{}, nil, "node id is empty"},
		{"overlong node id", "NodeGetInfo", &csi.NodeGetInfoResponse{NodeId: long[:257]}, nil, "257 bytes long"},
		{"node id with a line break", "NodeGetInfo", &csi.NodeGetInfoResponse{NodeId: "a\nb"}, nil, ""},
		{"negative limit", "NodeGetInfo", &csi.NodeGetInfoResponse{NodeId: "n", MaxVolumesPerNode: -1}, nil,
			"max_volumes_per_node is -1"},
		{"endless topology", "NodeGetInfo", &csi.NodeGetInfoResponse{NodeId: "n", AccessibleTopology: &csi.Topology{
			Segments: map[string]string{"zone": long},
		}}, nil, "accessible_topology has"},
		{"no node info", "NodeGetInfo", nil, status.Error(codes.Unimplemented, "no"), ""},
		{"failing node info", "NodeGetInfo", nil, status.Error(codes.Internal, "no metadata"),
			"NodeGetInfo: INTERNAL: no metadata"},
	} {
		t.Run(c.name, func(t *testing.T) {
			fake, f := start(t, csifake.Config{Caps: []string{"STAGE_UNSTAGE"}})
			fake.On(c.rpc).Reply(c.reply, c.err)
			got, err := open(t, f).Describe(patient(t), bothRoles)
			if c.want == "" {
				if err != nil || len(got) != 2 || len(got[registry.RoleNode].Capabilities) > 3*maxCapabilities {
					t.Errorf("described as %+v, %v", got, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 2*maxText ||
				strings.Contains(err.Error(), "\n") {
				t.Errorf("error is %.3000v, want %q in it", err, c.want)
			}
			if _, isCall := errors.AsType[*registry.CallError](err); isCall {
				t.Errorf("a question is no call that may be uncertain: %v", err)
			}
		})
	}
}

// Only a plugin whose controller attaches volumes must implement NodeGetInfo.
func TestAttachingControllerNeedsANodeID(t *testing.T) {
	fake, f := start(t, csifake.Config{Caps: []string{"PUBLISH_UNPUBLISH"}})
	fake.On("NodeGetInfo").Code(codes.Unimplemented, "no")
	c := open(t, f)
	if got, err := c.Describe(patient(t), bothRoles); err == nil || !strings.Contains(err.Error(), "attaches") {
		t.Errorf("described as %+v, %v", got, err)
	}
	for _, role := range bothRoles {
		if got, err := c.Describe(patient(t), []registry.Role{role}); err != nil || len(got) != 1 ||
			got[role].NodeID != "" {
			t.Errorf("described as %+v, %v", got, err)
		}
	}
}

// Empty answers are read without a fault. The caller decides about missing values.
func TestEmptyAnswersAreRead(t *testing.T) {
	_, socket := server(t, func([]byte) {})
	f, ctx := assumeDescribed(t, fleetFor(t, socket)), patient(t)
	created, err := f.Create(ctx, controllerKey, CreateRequest{Name: "v"})
	if err != nil || !reflect.DeepEqual(created, Created{}) {
		t.Errorf("created %+v, %v", created, err)
	}
	if publish, err := f.Attach(ctx, controllerKey, AttachRequest{VolumeID: "v", Node: "n"}); err != nil ||
		len(publish) != 0 {
		t.Errorf("attached with %v, %v", publish, err)
	}
	if valid, err := f.Validate(ctx, controllerKey, ValidateRequest{VolumeID: "v"}); err != nil ||
		!reflect.DeepEqual(valid, Validated{}) {
		t.Errorf("validated %+v, %v", valid, err)
	}
}

// Only entries with a known mode and type are confirmed, and the message shows no secret.
func TestOnlyKnownCapabilitiesAreConfirmed(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	capability := func(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
		return &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	}
	withMount := capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
	withBlock := capability(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)
	withBlock.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	withMount.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}
	unknown := capability(99)
	unknown.AccessType = withBlock.AccessType
	fake.On("ValidateVolumeCapabilities").Reply(&csi.ValidateVolumeCapabilitiesResponse{
		Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{VolumeCapabilities: []*csi.VolumeCapability{
			{}, unknown, capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER), withMount, withBlock,
		}},
		Message: fmt.Sprint("see ", canaries),
	}, nil)
	got, err := f.Validate(patient(t), controllerKey, validateRequest)
	want := []registry.VolumeCapability{
		{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}, {Access: registry.MultiNodeReaderOnly,
			Attachment: registry.BlockDevice},
	}
	if err != nil || !reflect.DeepEqual(got.Confirmed, want) || !strings.HasPrefix(got.Message, "see ") {
		t.Errorf("validated %+v, %v", got, err)
	}
	wantNone(t, "message", got.Message, canarySecret, canaryQuoted, canaryFlag, canaryVolume, canaryParameter)
}
