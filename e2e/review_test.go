package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"holdfast/host"
	"holdfast/internal/csifake"
)

func volumeName(id string) host.VolumeName {
	return host.VolumeName{Namespace: "default", ID: host.VolumeID(id)}
}

// states is the state of every volume.
func (w *world) states() map[string]string {
	w.t.Helper()
	list, _, err := w.host.Volumes(w.ctx(), host.VolumeQuery{})
	w.must(err)
	states := map[string]string{}
	for _, v := range list {
		states[string(v.ID)] = string(v.State)
	}
	return states
}

// Whatever a plugin says, in whichever call: no secret is told or stored, also by a shim that has just started.
func TestSecretsAreToldNowhere(t *testing.T) {
	const canary = "c4n4ry-s3cret-value"
	t.Setenv("HOLDFAST_TEST_SECRET", canary)
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	tell := func(rpcs ...string) {
		for _, rpc := range rpcs {
			p.On(rpc).Times(1).Code(codes.InvalidArgument, "bad password "+canary+" c4n4ry YzRuNHJ5LXMzY3JldC12YWx1ZQ==")
		}
	}
	var told []string
	until := func(what string, call func() error) {
		t.Helper()
		for range 10 {
			err := call()
			if err == nil {
				return
			}
			told = append(told, fmt.Sprintf("%s: %v", what, err))
		}
		t.Errorf("%s does not succeed: %q", what, told)
	}
	tell("CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume", "ControllerUnpublishVolume", "NodeUnstageVolume", "NodeUnpublishVolume")
	secrets := "secrets {\n password = { env = \"HOLDFAST_TEST_SECRET\" }\n}\n"
	until("create", func() error { return w.createWith(w.ctx(), "vol", secrets) })
	g := w.group("a1", "vol", "single-node-writer")
	until("prepare", func() error { _, err := w.prepare(g); return err })
	until("release", func() error { return w.release("a1") })
	until("prepare again", func() error { _, err := w.prepare(g); return err })
	w.killShim()
	tell("NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume")
	until("release", func() error { return w.release("a1") })
	until("delete", func() error { return w.delete("vol") })
	_ = w.host.Watch(w.ctx(), host.WatchOptions{}, func(e host.Event) error {
		told = append(told, e.String())
		if e.Kind == "volume deleted" {
			return context.Canceled
		}
		return nil
	})
	all := strings.Join(told, "\n")
	if strings.Contains(all, canary) || strings.Contains(all, "YzRuNHJ5LXMzY3JldC12YWx1ZQ") {
		t.Errorf("told: %s", all)
	}
	for _, step := range []string{"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "NodeStageVolume"} {
		if !strings.Contains(all, step+": INVALID_ARGUMENT: bad password ***") {
			t.Errorf("what the plugin said to %s is lost: %s", step, all)
		}
	}
	stored, err := os.ReadFile(filepath.Join(w.config.StateDir, "shim.db"))
	if err != nil || bytes.Contains(stored, []byte(canary)) {
		t.Errorf("stored: %v", err)
	}
	w.exit(p)
}
