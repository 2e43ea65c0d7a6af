package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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

// calls is how many calls of the RPC the plugins have got.
func (w *world) calls(rpc string) int {
	w.t.Helper()
	list, err := csifake.Calls(w.journal, rpc)
	w.must(err)
	return len(list)
}

// A volume that is being created is not forgotten under its creation, nor one whose deletion waits for its next try.
func TestDeregisterWhileACallIsUnderWay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	gate := p.On("CreateVolume").Times(1).Hold()
	created := make(chan error, 1)
	go func() { created <- w.create("vol") }()
	<-gate.Arrived()
	if err := w.host.DeregisterVolume(w.ctx(), volumeName("vol")); !errors.Is(err, host.ErrConflict) || !strings.Contains(err.Error(), "CreateVolume") {
		t.Errorf("forgotten while it is being created: %v", err)
	}
	gate.Open()
	w.must(<-created)
	if s := w.states(); s["vol"] != "ready" {
		t.Errorf("volumes: %v", s)
	}
	p.On("DeleteVolume").Times(2).Code(codes.Unavailable, "busy")
	deleted := make(chan error, 1)
	go func() { deleted <- w.delete("vol") }()
	w.until(func(e host.Event) bool { return e.Kind == "step failed" && e.Cause == "DeleteVolume" })
	if err := w.host.DeregisterVolume(w.ctx(), volumeName("vol")); !errors.Is(err, host.ErrConflict) || !strings.Contains(err.Error(), "DeleteVolume") {
		t.Errorf("forgotten while it is being deleted: %v", err)
	}
	w.must(<-deleted)
	w.exit(p)
}

// A volume that its plugin refuses to delete can be used.
func TestRefusedDeletionLeavesTheVolume(t *testing.T) {
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	p.On("DeleteVolume").Times(1).Code(codes.FailedPrecondition, "has snapshots")
	if err := w.delete("vol"); err == nil || !strings.Contains(err.Error(), "has snapshots") {
		t.Errorf("%v", err)
	}
	w.until(func(e host.Event) bool { return e.Kind == "volume kept" })
	_, err := w.prepare(w.group("a1", "vol", "single-node-writer"))
	w.must(err)
	w.must(w.release("a1"))
	w.must(w.delete("vol"))
	w.exit(p)
}

// While the controller of a plugin restarts, no volume is staged unattached, also where the node plugin does not say that there is one.
func TestVolumeIsNotStagedUnattachedWhileTheControllerRestarts(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	c := w.plugin("alloc-c", csifake.Controller)
	w.caps = []string{"STAGE_UNSTAGE_VOLUME"}
	n := w.plugin("alloc-n", csifake.Node)
	w.caps = everything
	w.must(w.create("vol"))
	c.Kill()
	w.must(w.host.TaskExited(w.ctx(), c.task.Key(), 1, 0, 9, false))
	ctx, cancel := context.WithTimeout(w.ctx(), time.Second)
	defer cancel()
	g := w.group("a1", "vol", "single-node-writer")
	if _, err := w.host.PrepareAlloc(ctx, g); err == nil || w.calls("NodeStageVolume") > 0 {
		t.Errorf("%v; staged %d times", err, w.calls("NodeStageVolume"))
	}
	c = w.startPlugin("alloc-c", csifake.Controller, 2)
	_, err := w.prepare(g)
	w.must(err)
	if w.calls("ControllerPublishVolume") != 1 || w.calls("NodeStageVolume") != 1 {
		t.Errorf("attached %d times, staged %d times", w.calls("ControllerPublishVolume"), w.calls("NodeStageVolume"))
	}
	w.must(w.release("a1"))
	w.must(w.delete("vol"))
	w.exit(n)
	w.exit(c)
}

// What nobody waits for any more when the shim dies, the next shim finishes.
func TestUnfinishedVolumesAreFinishedAfterACrash(t *testing.T) {
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	impatient := func(rpc string, call func(context.Context) error) {
		t.Helper()
		gate := p.On(rpc).Times(1).Hold()
		ctx, cancel := context.WithCancel(w.ctx())
		ended := make(chan error, 1)
		go func() { ended <- call(ctx) }()
		<-gate.Arrived()
		cancel()
		if err := <-ended; err == nil {
			t.Errorf("%s: no error", rpc)
		}
		w.killShim()
		gate.Open()
	}
	impatient("CreateVolume", func(ctx context.Context) error { return w.createWith(ctx, "vol", "") })
	w.until(func(e host.Event) bool { return e.Kind == "volume created" })
	impatient("DeleteVolume", func(ctx context.Context) error { return w.host.DeleteVolume(ctx, volumeName("vol")) })
	w.until(func(e host.Event) bool { return e.Kind == "volume deleted" })
	if s := w.states(); len(s) > 0 {
		t.Errorf("volumes: %v", s)
	}
	w.exit(p)
}

// A deletion whose shim dies is answered as if it had not, also if it had to find out first whether the volume was ever made.
func TestDeletionIsAnsweredAfterACrash(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	p.On("CreateVolume").Times(3).Code(codes.Unknown, "panic")
	if err := w.create("vol"); !errors.Is(err, host.ErrUncertain) {
		t.Errorf("%v", err)
	}
	gate := p.On("DeleteVolume").Times(1).Hold()
	deleted := make(chan error, 1)
	go func() { deleted <- w.delete("vol") }()
	<-gate.Arrived()
	w.killShim()
	gate.Open()
	if err := <-deleted; err != nil {
		t.Errorf("%v", err)
	}
	w.exit(p)
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
