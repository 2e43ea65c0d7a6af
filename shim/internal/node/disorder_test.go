package node_test

import (
	"path/filepath"
	"strings"
	"testing"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// The plugin of the tests notices each kind of disorder: without that, the model would prove nothing.
func TestThePluginOfTheTestsNoticesDisorder(t *testing.T) {
	ctx, at := t.Context(), registry.InstanceKey{}
	for what, story := range map[string]func(*plugin){
		"stage before attach": func(p *plugin) {
			_ = p.Stage(ctx, at, csi.StageRequest{VolumeID: "v", StagingPath: "/csi/stage/v"})
		},
		"publish before stage": func(p *plugin) {
			_, _ = p.Attach(ctx, at, csi.AttachRequest{VolumeID: "v", Node: "i-1"})
			_ = p.Publish(ctx, at, csi.PublishRequest{VolumeID: "v", TargetPath: "/csi/publish/x/v"})
		},
		"unstage before unpublish": func(p *plugin) {
			p.disk("v").targets["/t"] = true
			_ = p.Unstage(ctx, at, csi.UnstageRequest{VolumeID: "v", StagingPath: "/csi/stage/v"})
		},
		"unstage while an unpublish is in doubt": func(p *plugin) {
			p.disk("v").doubt["/t"] = true
			_ = p.Unstage(ctx, at, csi.UnstageRequest{VolumeID: "v", StagingPath: "/csi/stage/v"})
		},
		"detach before unstage": func(p *plugin) {
			p.disk("v").staged = "/s"
			_ = p.Detach(ctx, at, csi.DetachRequest{VolumeID: "v", Node: "i-1"})
		},
		"another call while one is uncertain": func(p *plugin) {
			p.fault = func(registry.RPC) fault { return lost }
			_, _ = p.Attach(ctx, at, csi.AttachRequest{VolumeID: "v", Node: "i-1"})
			_ = p.Unpublish(ctx, at, csi.UnpublishRequest{VolumeID: "v", TargetPath: "/csi/publish/x/v"})
		},
		"detach from all nodes": func(p *plugin) { _ = p.Detach(ctx, at, csi.DetachRequest{VolumeID: "v"}) },
		"a second staging path": func(p *plugin) {
			p.attaches = false
			p.disk("v").staged = "/s"
			_ = p.Stage(ctx, at, csi.StageRequest{VolumeID: "v", StagingPath: "/csi/stage/v"})
		},
		"a directory in a mount": func(p *plugin) {
			p.mounts["/m"] = true
			_ = p.MakeDir(filepath.Join("/m", "d"))
		},
	} {
		noticed := false
		p := newPlugin(newMachine(func(string, ...any) { noticed = true }), "/var/lib/h/mnt/p")
		p.attaches, p.stages = true, true
		p.dirs["/var/lib/h/mnt/p/stage/v"] = true
		story(p)
		if !noticed {
			t.Errorf("%s goes unnoticed; %s", what, strings.Join(p.journal, ", "))
		}
	}
}
