package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/internal/csifake"
)

var everything = []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE_VOLUME"}

// larger is everything, of a plugin that expands volumes too, and mutating what it is asked for in a story, call by call.
var (
	larger   = append([]string{"EXPAND_VOLUME", "expansion/ONLINE"}, everything...)
	mutating = []string{
		"CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume", "ControllerExpandVolume", "NodeExpandVolume",
		"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume",
	}
)

// A volume is made, mounted, written, read by a second alloc, and taken down.
func TestMainJob(t *testing.T) {
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	first, err := w.prepare(w.group("alloc-1", "vol", "multi-node-multi-writer"))
	w.must(err)
	w.must(os.WriteFile(filepath.Join(first, "greeting"), []byte("hello"), 0o600))
	second, err := w.prepare(w.group("alloc-2", "vol", "multi-node-multi-writer"))
	w.must(err)
	if text, err := os.ReadFile(filepath.Join(second, "greeting")); err != nil || string(text) != "hello" {
		t.Errorf("the second alloc reads %q, %v", text, err)
	}
	w.must(w.release("alloc-1"))
	if _, err := os.ReadFile(filepath.Join(second, "greeting")); err != nil {
		t.Errorf("the second alloc has lost its volume with the first: %v", err)
	}
	w.must(w.release("alloc-2"))
	w.must(w.delete("vol"))
	w.exit(p)
}

// Who asks for what another holds is told who holds it.
func TestConflictNamesTheHolder(t *testing.T) {
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	_, err := w.prepare(w.group("alloc-1", "vol", "single-node-writer"))
	w.must(err)
	_, err = w.prepare(w.group("alloc-2", "vol", "single-node-writer"))
	if !errors.Is(err, host.ErrConflict) || !strings.Contains(err.Error(), "alloc-1") {
		t.Errorf("a second writer: %v", err)
	}
	if err := w.delete("vol"); !errors.Is(err, host.ErrConflict) || !strings.Contains(err.Error(), "alloc-1") {
		t.Errorf("delete of a volume in use: %v", err)
	}
	w.must(w.release("alloc-2"))
	w.must(w.release("alloc-1"))
	w.must(w.delete("vol"))
	w.exit(p)
}

// Separate tasks for controller and node serve one plugin.
func TestSeparateNodeAndController(t *testing.T) {
	w := newWorld(t, everything...)
	c, n := w.plugin("alloc-c", csifake.Controller), w.plugin("alloc-n", csifake.Node)
	w.must(w.create("vol"))
	path, err := w.prepare(w.group("alloc-1", "vol", "single-node-writer"))
	w.must(err)
	w.must(os.WriteFile(filepath.Join(path, "f"), nil, 0o600))
	w.must(w.release("alloc-1"))
	w.must(w.delete("vol"))
	w.exit(n)
	w.exit(c)
}

// The shim is killed in the middle of each call, before and after it has taken effect. The call goes on; nothing is lost or left.
func TestShimKilledInTheMiddle(t *testing.T) {
	for _, rpc := range mutating {
		for _, when := range []string{"before", "after"} {
			t.Run(rpc+"/"+when, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, larger...)
				p := w.plugin("alloc-p", csifake.Monolith)
				at := p.On(rpc).Times(1)
				if when == "after" {
					at = at.After()
				}
				gate := at.Hold()
				done := make(chan error, 1)
				go func() { done <- w.story() }()
				select {
				case <-gate.Arrived():
				case err := <-done:
					t.Fatalf("%s was never called: %v", rpc, err)
				}
				w.killShim()
				gate.Open()
				w.must(<-done)
				w.exit(p)
			})
		}
	}
}

// story is a volume's whole life. If its plugin can, it is expanded while it is used.
func (w *world) story() error {
	if err := w.create("vol"); err != nil {
		return err
	}
	path, err := w.prepare(w.group("alloc-1", "vol", "single-node-writer"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(path, "f"), []byte("x"), 0o600); err != nil {
		return err
	}
	if slices.Contains(w.caps, "EXPAND_VOLUME") {
		v, err := w.host.ExpandVolume(w.ctx(), volumeName("vol"), host.CapacityRange{Required: 2 << 20})
		if err == nil && (v.Capacity != 2<<20 || v.Expansion.Pending()) {
			err = fmt.Errorf("expanded to %d bytes: %+v", v.Capacity, v.Expansion)
		}
		if err != nil {
			return err
		}
	}
	if err := w.release("alloc-1"); err != nil {
		return err
	}
	return w.delete("vol")
}
