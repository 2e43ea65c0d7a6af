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
