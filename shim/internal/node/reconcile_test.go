package node_test

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/shim/internal/doctor"
)

// reconciled is what a process that starts does before everything else.
func (w *world) reconciled(ctx context.Context) ([]registry.Finding, error) {
	around, err := doctor.NewSurvey(ground{w.machine}, layout.MountRoot())
	if err != nil {
		return nil, err
	}
	return doctor.New(w.log, ground{w.machine}, doctor.Options{Layout: layout, Now: time.Now,
		Logger: hclog.NewNullLogger()}).Start(ctx, around)
}

// ground is the machine as package reconcile sees it at start: then nobody is asked, and nothing unmounted.
type ground struct{ *machine }

func (g ground) Mounts(root string) (found mount.Mounts, err error) {
	for path := range g.mounts {
		if strings.HasPrefix(path, root+"/") {
			found = append(found, mount.Mount{Point: path})
		}
	}
	return found, nil
}

func (g ground) Dirs(root string) (found []mount.DirInfo, err error) {
	for path := range g.dirs {
		if !strings.HasPrefix(path, root+"/") || g.covered(path) {
			continue
		}
		d := mount.DirInfo{Path: path}
		for other := range g.dirs {
			if filepath.Dir(other) == path {
				d.Entries++
			}
		}
		found = append(found, d)
	}
	slices.SortFunc(found, func(a, b mount.DirInfo) int { return strings.Compare(b.Path, a.Path) })
	return found, nil
}

func (g ground) Users([]string) (map[string][]mount.User, error) {
	g.errorf("users are looked for at start")
	return nil, nil
}

func (g ground) Inspect(context.Context, ...string) (map[string]mount.Info, error) {
	g.errorf("mounts are looked at at start")
	return nil, nil
}

func (g ground) Unmount(_ context.Context, path string) error {
	g.errorf("%s is unmounted at start", path)
	return nil
}

func TestReconcile(t *testing.T) {
	w := open(t)
	at := w.mustUp("a1", shared())
	root := layout.PluginRoot("ebs")
	stray, litter := filepath.Join(root, "publish/stray/v"), filepath.Join(root, "publish/full/v")
	for _, dir := range []string{stray, filepath.Join(litter, "file-like"), filepath.Join(root, "stage/empty"),
		filepath.Join(root,
			"publish/gone/v")} {
		_ = w.MakeDir(dir)
	}
	w.mounts[stray] = true
	delete(w.mounts, at.Host) // behind our back
	w.crash()
	findings, err := w.reconciled(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range findings {
		if f.Kind != registry.FoundEmpty {
			got = append(got, string(f.Kind)+" "+f.Path)
		}
	}
	if want := []string{"lost " + at.Host, "orphan " + stray, "left " + litter}; !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
	if w.dirs[filepath.Join(root, "stage/empty")] || w.dirs[filepath.Join(root, "publish/gone")] || !w.dirs[root] ||
		!w.mounts[stray] {
		t.Errorf("directories %v, mounts %v", w.dirs, w.mounts)
	}
	w.take()
	w.mustUp("a1", shared())
	w.expect(publish)
}

func TestReconcileOfASoundNodeFindsNothing(t *testing.T) {
	for _, mounts := range []bool{true, false} { // not every plugin mounts at the staging path
		w := open(t)
		w.mountsStaging = mounts
		w.mustUp("a1", shared())
		w.crash()
		if findings, err := w.reconciled(t.Context()); err != nil || len(findings) != 0 {
			t.Errorf("%v, %v", findings, err)
		}
		w.take()
		w.mustUp("a2", shared())
		w.expect(publish)
	}
}
