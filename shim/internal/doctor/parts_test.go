package doctor

import (
	"path/filepath"
	"testing"

	"holdfast/internal/mount"
	"holdfast/registry"
)

func partAt(path string) string { return layout.Part(claimed, path) }

// strayPart returns the path of a part that no record names.
func strayPart(name string) string { return filepath.Join(layout.MountRoot(), "parts", name, "v") }

// parted returns the facts of a sound node on which a part of the volume is mounted.
func parted() Facts {
	f := sound()
	f.Records.Refs[0].Parts = []registry.Part{{Path: "a/b", At: partAt("a/b"), Mark: registry.MarkDone}}
	mounted(&f, partAt("a/b"))
	f.Dirs = append([]mount.DirInfo{{Path: filepath.Dir(partAt("a/b")), Entries: 1}}, f.Dirs...)
	return f
}

// Unknown parts are unmounted before the volumes below them, with their directories.
func TestRepairUnmountsPartsFirst(t *testing.T) {
	w := newEnv(t)
	w.mount(stray("stage", "x"), stray("publish", "x"), strayPart("y"))
	w.machine.users[stray("stage", "x")] = []mount.User{{Mount: stray("publish", "x")}}
	w.machine.users[stray("publish", "x")] = []mount.User{{Mount: strayPart("y")}}
	w.repair()
	same(t, "acts", w.acts, []string{
		"unmount " + strayPart("y"), "rmdir " + strayPart("y"), "rmdir " + filepath.Dir(strayPart("y")),
		"unmount " + stray("publish", "x"), "rmdir " + stray("publish", "x"),
		"rmdir " + filepath.Dir(stray("publish", "x")),
		"unmount " + stray("stage", "x"), "rmdir " + stray("stage", "x"),
	})
	w.dir(strayPart("z"))
	w.machine.acts = nil
	w.repair()
	same(t, "acts", w.acts, []string{"rmdir " + strayPart("z"), "rmdir " + filepath.Dir(strayPart("z"))})
}
