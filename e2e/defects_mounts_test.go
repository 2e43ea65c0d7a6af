package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// That something is mounted where a volume belongs proves nothing: what nobody has recorded is neither used nor touched, and what is
// recorded and was taken away is made again.
func TestDefectV7NoMountIsTrustedForBeingThere(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	layout := hooks.Layout{Run: w.config.RunDir, State: w.config.StateDir}
	root := registry.Tree{Host: layout.PluginRoot("fake")}
	key := registry.VolumeKey{Plugin: "fake", External: registry.ExternalID(csifake.VolumeID("vol"))}
	staging := layout.Staging(key, root).Host
	target := layout.Target(registry.ClaimKey{Volume: key, Alloc: "alloc-1", Request: "data"}, root).Host
	g := w.asking("alloc-1", ask{source: "vol"})
	for _, path := range []string{staging, target} {
		before := len(w.sent("NodeStageVolume", "NodePublishVolume"))
		w.plants(path)
		w.conflicts(second(w.prepared(w.ctx(), g)), path)
		for _, c := range w.sent("NodeStageVolume", "NodePublishVolume")[before:] {
			if c.RPC == "NodePublishVolume" || path == staging {
				t.Errorf("%s was sent onto what is mounted at %s", c.RPC, path)
			}
		}
		w.must(w.release("alloc-1"))
		w.reads(path, "whose", "somebody's")
		w.uproots(path)
	}
	at, err := w.prepared(w.ctx(), g)
	w.must(err)
	if at["DATA"] != target {
		t.Fatalf("the volume is at %s, not %s: the test proves nothing", at["DATA"], target)
	}
	w.write(target, "f", "x")
	w.must(errors.Join(unix.Unmount(target, 0), unix.Unmount(staging, 0)))
	before := len(w.sent())
	w.must(second(w.prepared(w.ctx(), g)))
	w.mustHaveSent(before, stageOK, publishOK)
	w.reads(target, "f", "x")
	w.must(w.release("alloc-1"))
	w.must(w.delete("vol"))
	w.exit(p)
}

// plants mounts something at a path; uproots takes it away.
func (w *world) plants(path string) {
	w.t.Helper()
	w.must(errors.Join(os.MkdirAll(path, 0o700), unix.Mount("somebody", path, "tmpfs", 0, "size=64k")))
	w.write(path, "whose", "somebody's")
}

func (w *world) uproots(path string) {
	w.t.Helper()
	w.must(errors.Join(unix.Unmount(path, unix.UMOUNT_NOFOLLOW), os.Remove(path)))
	_ = os.Remove(filepath.Dir(path)) // of a target; the parent of staging paths holds others, or stays
}

// Volumes of one id in two namespaces have nothing in common; and what is one volume at its plugin has one name.
func TestDefectV11NamespacesDoNotCollide(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	paths := map[string]string{}
	for _, ns := range []string{"red", "blue"} {
		w.must(w.createIn(ns, "vol"))
		g := w.asking("alloc-"+ns, ask{source: "vol"})
		g.Namespace = registry.Namespace(ns)
		at, err := w.prepared(w.ctx(), g)
		w.must(err)
		paths[ns] = at["DATA"]
		w.write(paths[ns], "whose", ns)
	}
	w.reads(paths["red"], "whose", "red")
	if err := w.register("alias", "red-vol"); !errors.Is(err, host.ErrExists) || !strings.Contains(err.Error(), "red/vol") {
		t.Errorf("one volume got a second name: %v", err)
	}
	w.must(w.release("alloc-red"))
	w.reads(paths["blue"], "whose", "blue")
	staged := w.sent("NodeStageVolume")
	if len(staged) != 2 || staged[0].Staging == staged[1].Staging || staged[0].Volume == staged[1].Volume {
		t.Errorf("staged: %+v", staged)
	}
	w.must(w.release("alloc-blue"))
	for _, ns := range []string{"red", "blue"} {
		w.must(w.host.DeleteVolume(w.ctx(), host.VolumeName{Namespace: registry.Namespace(ns), ID: "vol"}))
	}
	w.exit(p)
}

// register asks for one more name for a volume that the plugin has made.
func (w *world) register(id, made string) error {
	text := fmt.Sprintf(`
id = %q
type = "csi"
plugin_id = "fake"
external_id = %q
context = { "csifake/name" = %q, pool = "p" }
capability {
  access_mode = "single-node-writer"
  attachment_mode = "file-system"
}
`, id, csifake.VolumeID(made), made)
	spec, _, err := w.host.ParseVolume(w.ctx(), host.Source{Name: "v.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return err
	}
	return second(w.host.RegisterVolume(w.ctx(), spec))
}

// createIn makes a volume in a namespace.
func (w *world) createIn(ns, id string) error {
	text := fmt.Sprintf(`
id = %q
namespace = %q
name = "%s-%s"
type = "csi"
plugin_id = "fake"
capability {
  access_mode = "single-node-writer"
  attachment_mode = "file-system"
}
`, id, ns, ns, id)
	spec, _, err := w.host.ParseVolume(w.ctx(), host.Source{Name: "v.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return err
	}
	return second(w.host.CreateVolume(w.ctx(), spec))
}
