package csi

import (
	"context"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

// Values that must not appear in errors: one of each field of a request that may be sensitive.
const (
	canarySecret    = "canary-secret"
	canaryQuoted    = "canary \"with\" quotes"
	canaryFlag      = "canary-flag"
	canaryPublish   = "canary-publish"
	canaryVolume    = "canary-volume"
	canaryParameter = "canary-parameter"
)

var canaries = []string{canarySecret, canaryQuoted, canaryFlag, canaryPublish, canaryVolume, canaryParameter,
	`canary \"with`}

var (
	secrets = map[string]registry.SecretValue{"token": canarySecret, "odd": canaryQuoted, "pin": "77"}
	usage   = registry.Usage{
		Access: registry.MultiNodeMultiWriter, Attachment: registry.FileSystem, ReadOnly: true, FSType: "ext4",
		MountFlags: registry.FlagsOf([]string{"noatime", "user=u,password=" + canaryFlag}),
	}
	publishContext = map[string]string{"token": canaryPublish}
	volumeContext  = map[string]string{"adminSecret": canaryVolume}
	revealed       = map[string]string{"token": canarySecret, "odd": canaryQuoted, "pin": "77"}
	mounted        = &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4",
			MountFlags: []string{"noatime", "user=u,password=" + canaryFlag}}},
	}
)

// call is a call that changes something, with the message that the plugin must get.
type call struct {
	rpc  registry.RPC
	hide []string // canaries that are part of the request
	do   func(context.Context, *Fleet) error
	want proto.Message
}

var mutating = []call{
	{registry.CreateVolumeRPC, []string{canarySecret, canaryQuoted, canaryFlag, canaryParameter},
		func(ctx context.Context, f *Fleet) error {
			_, err := f.Create(ctx, controllerKey, CreateRequest{
				Name: "vol", CapacityMin: 1, CapacityMax: 2, FSType: usage.FSType, MountFlags: usage.MountFlags,
				Capabilities: []registry.VolumeCapability{
					{Access: usage.Access, Attachment: registry.FileSystem}, {Access: registry.SingleNodeWriter,
						Attachment: registry.BlockDevice},
				},
				Parameters: map[string]string{"api-key": canaryParameter}, Required: []registry.Topology{{"zone": "a"}},
				Preferred: []registry.Topology{{"zone": "b"}}, Source: registry.Source{Volume: "other"},
				Secrets: secrets,
			})
			return err
		}, &csi.CreateVolumeRequest{
			Name: "vol", CapacityRange: &csi.CapacityRange{RequiredBytes: 1, LimitBytes: 2},
			VolumeCapabilities: []*csi.VolumeCapability{mounted, {
				AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
				AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
			}},
			Parameters: map[string]string{"api-key": canaryParameter}, Secrets: revealed,
			VolumeContentSource: &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
				Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: "other"},
			}},
			AccessibilityRequirements: &csi.TopologyRequirement{
				Requisite: []*csi.Topology{{Segments: map[string]string{"zone": "a"}}},
				Preferred: []*csi.Topology{{Segments: map[string]string{"zone": "b"}}},
			},
		}},
	{registry.DeleteVolumeRPC, []string{canarySecret, canaryQuoted}, func(ctx context.Context, f *Fleet) error {
		return f.Delete(ctx, controllerKey, DeleteRequest{VolumeID: "vol-1", Secrets: secrets})
	}, &csi.DeleteVolumeRequest{VolumeId: "vol-1", Secrets: revealed}},
	{registry.ControllerPublishRPC, []string{canarySecret, canaryQuoted, canaryFlag, canaryVolume},
		func(ctx context.Context, f *Fleet) error {
			_, err := f.Attach(ctx, controllerKey, AttachRequest{
				VolumeID: "vol-1", Node: "node-1", Usage: usage, VolumeContext: volumeContext, Secrets: secrets,
			})
			return err
		}, &csi.ControllerPublishVolumeRequest{
			VolumeId: "vol-1", NodeId: "node-1", VolumeCapability: mounted, Readonly: true, Secrets: revealed,
			VolumeContext: volumeContext,
		}},
	{registry.ControllerUnpublishRPC, []string{canarySecret, canaryQuoted}, func(ctx context.Context, f *Fleet) error {
		return f.Detach(ctx, controllerKey, DetachRequest{VolumeID: "vol-1", Node: "node-1", Secrets: secrets})
	}, &csi.ControllerUnpublishVolumeRequest{VolumeId: "vol-1", NodeId: "node-1", Secrets: revealed}},
	{registry.NodeStageRPC, []string{canarySecret, canaryQuoted, canaryFlag, canaryPublish, canaryVolume},
		func(ctx context.Context, f *Fleet) error {
			return f.Stage(ctx, nodeKey, StageRequest{
				VolumeID: "vol-1", PublishContext: publishContext, StagingPath: "/s", Usage: usage,
				VolumeContext: volumeContext, Secrets: secrets,
			})
		}, &csi.NodeStageVolumeRequest{
			VolumeId: "vol-1", PublishContext: publishContext, StagingTargetPath: "/s", VolumeCapability: mounted,
			Secrets: revealed, VolumeContext: volumeContext,
		}},
	{registry.NodeUnstageRPC, nil, func(ctx context.Context, f *Fleet) error {
		return f.Unstage(ctx, nodeKey, UnstageRequest{VolumeID: "vol-1", StagingPath: "/s"})
	}, &csi.NodeUnstageVolumeRequest{VolumeId: "vol-1", StagingTargetPath: "/s"}},
	{registry.NodePublishRPC, []string{canarySecret, canaryQuoted, canaryFlag, canaryPublish, canaryVolume},
		func(ctx context.Context, f *Fleet) error {
			return f.Publish(ctx, nodeKey, PublishRequest{
				VolumeID: "vol-1", PublishContext: publishContext, StagingPath: "/s", TargetPath: "/t", Usage: usage,
				VolumeContext: volumeContext, Secrets: secrets,
			})
		}, &csi.NodePublishVolumeRequest{
			VolumeId: "vol-1", PublishContext: publishContext, StagingTargetPath: "/s", TargetPath: "/t",
			VolumeCapability: mounted, Readonly: true,
			Secrets: revealed, VolumeContext: volumeContext,
		}},
	{registry.NodeUnpublishRPC, nil, func(ctx context.Context, f *Fleet) error {
		return f.Unpublish(ctx, nodeKey, UnpublishRequest{VolumeID: "vol-1", TargetPath: "/t"})
	}, &csi.NodeUnpublishVolumeRequest{VolumeId: "vol-1", TargetPath: "/t"}},
	{registry.ControllerExpandRPC, []string{canarySecret, canaryQuoted, canaryFlag},
		func(ctx context.Context, f *Fleet) error {
			_, err := f.Expand(ctx, controllerKey, ExpandRequest{
				VolumeID: "vol-1", Range: registry.CapacityRange{Required: 1, Limit: 2}, Usage: usage, Secrets: secrets,
				Private: Private{MountFlags: usage.MountFlags},
			})
			return err
		}, &csi.ControllerExpandVolumeRequest{
			VolumeId: "vol-1", CapacityRange: &csi.CapacityRange{RequiredBytes: 1,
				LimitBytes: 2}, Secrets: revealed, VolumeCapability: mounted,
		}},
	{registry.ControllerModifyRPC, []string{canarySecret, canaryQuoted, canaryFlag},
		func(ctx context.Context, f *Fleet) error {
			return f.Modify(ctx, controllerKey,
				ModifyRequest{VolumeID: "vol-1", Mutable: map[string]string{"tier": "gold"},
					Secrets: secrets, Private: Private{MountFlags: usage.MountFlags}})
		}, &csi.ControllerModifyVolumeRequest{VolumeId: "vol-1", MutableParameters: map[string]string{"tier": "gold"},
			Secrets: revealed}},
	{registry.NodeExpandRPC, []string{canarySecret, canaryQuoted, canaryFlag, canaryVolume},
		func(ctx context.Context, f *Fleet) error {
			_, err := f.NodeExpand(ctx, nodeKey, NodeExpandRequest{
				VolumeID: "vol-1", Path: "/t", StagingPath: "/s", Range: registry.CapacityRange{Required: 1},
				Usage: usage, Secrets: secrets,
				Private: Private{Contexts: []map[string]string{volumeContext}},
			})
			return err
		}, &csi.NodeExpandVolumeRequest{
			VolumeId: "vol-1", VolumePath: "/t", CapacityRange: &csi.CapacityRange{RequiredBytes: 1},
			StagingTargetPath: "/s", VolumeCapability: mounted,
			Secrets: revealed,
		}},
}

// reading are calls that change nothing. Their errors are classified like those of mutating calls.
var reading = []call{
	{registry.NodeStatsRPC, canaries[:6], func(ctx context.Context, f *Fleet) error {
		_, err := askStats(ctx, f)
		return err
	}, &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: "/t", StagingTargetPath: "/s"}},
	{validateRPC, []string{canarySecret, canaryQuoted, canaryFlag, canaryVolume, canaryParameter},
		func(ctx context.Context, f *Fleet) error {
			_, err := f.Validate(ctx, controllerKey, validateRequest)
			return err
		}, &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: "vol-1", VolumeContext: volumeContext, VolumeCapabilities: []*csi.VolumeCapability{mounted},
			Parameters: map[string]string{"api-key": canaryParameter}, Secrets: revealed,
		}},
}

var validateRequest = ValidateRequest{
	VolumeID: "vol-1", VolumeContext: volumeContext, FSType: "ext4", MountFlags: usage.MountFlags, Secrets: secrets,
	Capabilities: []registry.VolumeCapability{{Access: usage.Access, Attachment: registry.FileSystem}},
	Parameters:   map[string]string{"api-key": canaryParameter},
}

// known holds every canary.
var known = Private{Secrets: secrets, MountFlags: usage.MountFlags,
	Contexts: []map[string]string{publishContext, volumeContext, {"api-key": canaryParameter}}}

// The IDs of a volume and of its source are returned as the plugin sent them.
func TestCreatedIsWhatThePluginSays(t *testing.T) {
	for _, ids := range csifake.IDForms {
		source := ids.VolumeID("source")
		storage := csifake.NewBackend("")
		must(t, storage.AddVolume(source, 1<<20, nil))
		fake, f := start(t, csifake.Config{Backend: storage, IDs: ids})
		create := func(name string) Created {
			t.Helper()
			out, err := f.Create(patient(t), controllerKey, CreateRequest{
				Name: name, Capabilities: []registry.VolumeCapability{{Access: registry.SingleNodeWriter,
					Attachment: registry.FileSystem}},
				Source: registry.Source{Volume: registry.ExternalID(source)},
			})
			must(t, err)
			return out
		}
		if got := create("copy"); got.VolumeID != ids.VolumeID("copy") || string(got.Source.Volume) != source {
			t.Errorf("ids %q: %.80q from %s", ids, got.VolumeID, got.Source)
		}
		fake.On("CreateVolume").IgnoreSource()
		if got := create("empty"); got.Source != (registry.Source{}) {
			t.Errorf("ids %q: a plugin that ignores sources is said to have filled it from %s", ids, got.Source)
		}
		if broken := fake.Check(journal.Options{}); len(broken) > 0 {
			t.Errorf("ids %q: %v", ids, broken)
		}
	}
}
