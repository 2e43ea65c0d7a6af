package doctor

import (
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/mount"
	"holdfast/registry"

	"golang.org/x/sys/unix"
)

func partAt(path string) string { return layout.Part(claimed, path) }

// strayPart returns the path of a part that no record names.
func strayPart(name string) string { return filepath.Join(layout.MountRoot(), "parts", name, "v") }

// parted is a sound node of whose volume a part is mounted.
func parted() Facts {
	f := sound()
	f.Records.Refs[0].Parts = []registry.Part{{Path: "a/b", At: partAt("a/b"), Mark: registry.MarkDone}}
	mounted(&f, partAt("a/b"))
	f.Dirs = append([]mount.DirInfo{{Path: filepath.Dir(partAt("a/b")), Entries: 1}}, f.Dirs...)
	return f
}

func TestExamineParts(t *testing.T) {
	for _, c := range []struct {
		name  string
		but   func(*Facts)
		found []string
		says  string
	}{
		{"a sound node", func(*Facts) {}, nil, ""},
		{"a part without its mount", func(f *Facts) { unmounted(f, partAt("a/b")) }, []string{"lost " + partAt("a/b")},
			`"a/b" of volume data`},
		{"one that came or went meanwhile", func(f *Facts) {
			unmounted(f,
				partAt("a/b"))
			f.Changing = []string{partAt("a/b")}
		}, nil, ""},
		{"one that is not certain anyway", func(f *Facts) {
			unmounted(f, partAt("a/b"))
			f.Records.Refs[0].Parts[0].Mark = registry.MarkSent
		}, nil, ""},
		{"all is gone", func(f *Facts) { f.Mounts = nil }, []string{"lost mark " + publishedAt(),
			"lost mark " + stagedAt()}, ""},
		{"another boot", func(f *Facts) { f.Boot, f.Mounts = "boot-2", nil },
			[]string{"rebooted mark " + publishedAt(), "rebooted mark " + stagedAt()}, ""},
		{"a dead volume", func(f *Facts) { f.Inspected = map[string]mount.Info{publishedAt(): {Errno: unix.ENOTCONN}} },
			[]string{"dead " + publishedAt()}, ""},
		{"its directory alone, between two steps", func(f *Facts) {
			unmounted(f, partAt("a/b"))
			f.Records.Refs[0].Parts[0].Mark = registry.MarkSent
			f.Dirs = append([]mount.DirInfo{{Path: partAt("a/b"), Entries: 0}}, f.Dirs...)
		}, nil, ""},
		{"what its task has mounted in it", func(f *Facts) { mounted(f, partAt("a/b")+"/inner") }, nil, ""},
		{"an unknown part", func(f *Facts) { mounted(f, strayPart("x")) },
			[]string{"orphan unmount " + strayPart("x")}, "is not in any record"},
		{"a used one", func(f *Facts) {
			mounted(f, strayPart("x"))
			f.Users = map[string][]mount.User{strayPart("x"): {{Text: "process 7"}}}
		}, []string{"used " + strayPart("x")}, "process 7"},
		{"an empty directory of nobody", func(f *Facts) {
			f.Dirs = append([]mount.DirInfo{{Path: strayPart("x"), Entries: 0},
				{Path: filepath.Dir(strayPart("x")), Entries: 1}}, f.Dirs...)
		}, []string{"empty remove " + filepath.Dir(strayPart("x")), "empty remove " + strayPart("x")}, ""},
		{"one with something in it", func(f *Facts) {
			f.Dirs = append([]mount.DirInfo{{Path: strayPart("x"), Entries: 3},
				{Path: filepath.Dir(strayPart("x")), Entries: 1}}, f.Dirs...)
		}, []string{"left " + strayPart("x")}, "3 entries"},
	} {
		f := parted()
		c.but(&f)
		found := Examine(f)
		same(t, c.name, brief(found), c.found)
		text := ""
		for _, one := range found {
			text += one.Detail + one.Advice
		}
		if !strings.Contains(text, c.says) {
			t.Errorf("%s: does not say %q: %s", c.name, c.says, text)
		}
	}
}

func TestPathShapesOfPartsAreRecognized(t *testing.T) {
	shape := shapesOf(layout)
	dir := filepath.Dir(partAt("a"))
	for path, want := range map[string]pathKind{
		partAt("a"): partPath, dir: targetParent, partAt("a") + "/v": otherPath, dir + "/w": otherPath,
		filepath.Dir(dir):                     otherPath,
		layout.MountRoot() + "/parts/stage/x": otherPath, layout.MountRoot() + "/parts/publish/x": otherPath,
		layout.MountRoot() + "/parts/publish/x/v": otherPath, layout.MountRoot() + "/other/x/v": otherPath,
	} {
		if got := shape.kind(path); got != want {
			t.Errorf("%s is %d, want %d", path, got, want)
		}
	}
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

// A part that vanishes is trouble of its alloc, as the whole would be.
func TestPartsThatVanishAreTold(t *testing.T) {
	r := ref()
	r.Parts = []registry.Part{{Path: "a/b", At: partAt("a/b"), Mark: registry.MarkDone}}
	watching(t, append(placed(), data, claim(), r), func(w *env, watch *Watch) {
		if r := w.ref(); !strings.Contains(r.Trouble, `"a/b" of it is not mounted any more`) {
			t.Errorf("%+v", r)
		}
		w.mu.Lock()
		w.mount(partAt("a/b"))
		w.mu.Unlock()
		time.Sleep(watchEvery)
		synctest.Wait()
		if r := w.ref(); r.Trouble != "" || len(r.Parts) != 1 {
			t.Errorf("%+v", r)
		}
	})
}
