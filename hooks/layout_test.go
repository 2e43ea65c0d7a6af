package hooks

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"holdfast/registry"
)

var update = flag.Bool("update", false, "rewrite golden files")

var example = Layout{Run: "/run/holdfast/ae7fc4f3", State: "/var/lib/holdfast"}

// golden compares got with a file, or rewrites the file.
func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs; run with -update if that is meant. Got:\n%s", file, got)
	}
}

// The drawing holds every name and hash: a change of one would lose the mounts of an older shim.
func TestLayoutIsDocumented(t *testing.T) {
	golden(t, "../docs/layout.txt", []byte(drawing(example)))
}

// drawing draws the tree on disk, with one example of each path that ids are hashed into.
func drawing(l Layout) string {
	task := registry.TaskKey{Alloc: "alloc-1", Task: "plugin"}
	volume := registry.VolumeKey{Plugin: "loopfs", External: "vol-1"}
	claim := registry.ClaimKey{Volume: volume, Alloc: "alloc-1", Request: "data"}
	root := registry.Tree{Host: l.PluginRoot(volume.Plugin)}
	part := l.Part(claim, "a/b")
	notes := map[string]string{
		l.State:                          "state directory, 0700",
		l.HostLock():                     "locked by the host: one host per state directory",
		l.Database():                     "everything durable; locked by the shim that serves",
		l.Binaries():                     "shim binaries by their SHA-256",
		l.Suspensions():                  "calls that are not made again, as a plugin died during them",
		l.MountRoot():                    "a shared mount: what plugins mount below appears on the host",
		root.Host:                        "plugin \"loopfs\"; in its tasks: stage_publish_base_dir",
		l.Run:                            "run directory, 0700: gone after a boot",
		l.SocketDir(task):                "task \"plugin\" of alloc \"alloc-1\"; in the task: mount_dir",
		l.Socket(task):                   "the plugin listens here",
		l.Staging(volume, root).Host:     "volume \"vol-1\", staged once; made by the shim",
		l.TargetParent(claim, root).Host: "volume \"vol-1\" for alloc \"alloc-1\" as \"data\"; made by the shim",
		l.Target(claim, root).Host:       "the published volume; made and removed by the plugin",
		filepath.Dir(part):               "sub_path \"a/b\" of that; made by the shim",
		part:                             "a mount of that directory or file; made and removed by the shim",
	}
	return drawTree(l.State, notes) + drawTree(l.Run, notes)
}

// drawTree draws top and all paths below it, parents first, indented by depth.
func drawTree(top string, notes map[string]string) (text string) {
	paths := map[string]bool{top: true}
	for path := range notes {
		for ; inside(path, top); path = path[:strings.LastIndexByte(path, '/')] {
			paths[path] = true
		}
	}
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		name, indent := path, ""
		if path != top {
			name = path[strings.LastIndexByte(path, '/')+1:]
			indent = strings.Repeat("  ", strings.Count(path[len(top):], "/"))
		}
		text += strings.TrimRight(fmt.Sprintf("%-42s %s", indent+name, notes[path]), " ") + "\n"
	}
	return text
}

func TestDefaultRun(t *testing.T) {
	for _, c := range []struct {
		state string
		uid   int
		xdg   string
		want  string
	}{
		// printf %s /var/lib/holdfast | sha256sum
		{"/var/lib/holdfast", 0, "/run/user/0", "/run/holdfast/ae7fc4f3"},
		{"/var/lib/holdfast/", 0, "", "/run/holdfast/ae7fc4f3"},
		{"/var/lib/holdfast", 1000, "/run/user/1000", "/run/user/1000/holdfast/ae7fc4f3"},
		{"/home/a/state", 1000, "", "/home/a/state/run"},
	} {
		if got := DefaultRun(c.state, c.uid, c.xdg); got != c.want {
			t.Errorf("DefaultRun(%q, %d, %q) = %q, want %q", c.state, c.uid, c.xdg, got, c.want)
		}
	}
}

func TestCheckLimits(t *testing.T) {
	fits := func(l Layout) bool {
		err := l.Check()
		if err != nil && !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("%v is not ErrInvalid", err)
		}
		return err == nil
	}
	long := func(n int) string { return "/" + strings.Repeat("x", n-1) }
	socket, volume := 0, 0
	for n := 2; fits(Layout{Run: long(n), State: "/s"}); n++ {
		socket = len(Layout{Run: long(n)}.Socket(registry.TaskKey{Alloc: "a", Task: "b"}))
	}
	for n := 2; fits(Layout{Run: "/r", State: long(n)}); n++ {
		l := Layout{State: long(n)}
		volume = len(l.Target(registry.ClaimKey{Alloc: "a"}, registry.Tree{Host: l.PluginRoot("p")}).Host)
	}
	if socket != 107 || volume != 128 {
		t.Errorf("longest socket is %d bytes, longest target %d; want 107 and 128", socket, volume)
	}
	for _, bad := range []string{"", "relative", "/", "/a/../b", "/a//b", "/a/", "/a\xff"} {
		if fits(Layout{Run: bad, State: "/s"}) || fits(Layout{Run: "/r", State: bad}) {
			t.Errorf("directory %q is accepted", bad)
		}
	}
}

func TestOurs(t *testing.T) {
	l := Layout{Run: "/run/h", State: "/state"}
	root := registry.Tree{Host: l.PluginRoot("p")}
	claim := registry.ClaimKey{Volume: registry.VolumeKey{Plugin: "p", External: "v"}, Alloc: "a", Request: "r"}
	for _, path := range []string{
		root.Host, l.Staging(claim.Volume, root).Host, l.Target(claim, root).Host, l.TargetParent(claim, root).Host,
		l.SocketDir(registry.TaskKey{Alloc: "a"}), l.Socket(registry.TaskKey{Alloc: "a"}), l.Target(claim, root).Host +
			"/globalmount",
		l.Part(claim, "a/b"), filepath.Dir(l.Part(claim, "a/b")),
	} {
		if !l.Ours(path) {
			t.Errorf("%s is not ours", path)
		}
	}
	for _, path := range []string{
		"", "/", "/state", "/state/mnt", "/state/mntx/a", "/state/mnt/../../etc", "/state/shim.db", "/run/h",
		"/run/h/t", "/run/h/x", "/etc",
		"state/mnt/a", "/state/mnt//a", "/state/mnt/a/",
	} {
		if l.Ours(path) {
			t.Errorf("%q is ours", path)
		}
	}
}

func FuzzLayout(f *testing.F) {
	f.Add("a", "b", "a", "c")
	f.Add("", "ab", "a", "b")
	f.Add("../../etc", "..", "/etc/passwd", "\x00")
	f.Add("p/v", "x", "p", "v/x")
	f.Fuzz(func(t *testing.T, a1, b1, a2, b2 string) {
		same := a1 == a2 && b1 == b2
		one, two := fuzzPaths(a1, b1), fuzzPaths(a2, b2)
		for i := range one {
			checkFuzzPath(t, one[i])
			if (one[i] == two[i]) != same {
				t.Errorf("(%q, %q) and (%q, %q): %s, %s", a1, b1, a2, b2, one[i], two[i])
			}
		}
	})
}

// fuzzPaths returns each kind of path that hashes ids, with a and b as two of them. If a path hashes more than two, it
// returns one for each pair that is hashed one after the other.
func fuzzPaths(a, b string) []string {
	volume := registry.VolumeKey{Plugin: registry.PluginID(a), External: registry.ExternalID(b)}
	root := registry.Tree{Host: example.PluginRoot("p"), Task: "/local/csi"}
	task := registry.TaskKey{Alloc: registry.AllocID(a), Task: registry.TaskName(b)}
	paths := []string{
		example.SocketDir(task), example.Socket(task), example.PluginRoot(registry.PluginID(a + "\x00" + b)),
		example.Staging(volume, root).Host, example.Part(registry.ClaimKey{Request: registry.RequestName(a)}, b),
	}
	for _, claim := range []registry.ClaimKey{
		{Volume: volume},
		{Volume: registry.VolumeKey{External: registry.ExternalID(a)}, Alloc: registry.AllocID(b)},
		{Alloc: registry.AllocID(a), Request: registry.RequestName(b)},
	} {
		paths = append(paths, example.Target(claim, root).Host, example.TargetParent(claim, root).Host,
			example.Part(claim, "x"))
	}
	return paths
}

func checkFuzzPath(t *testing.T, path string) {
	t.Helper()
	inRoot := strings.HasPrefix(path, example.Run+"/t/") || strings.HasPrefix(path, example.State+"/mnt/")
	if !inRoot || filepath.Clean(path) != path || !filepath.IsLocal(path[1:]) || !example.Ours(path) {
		t.Errorf("%q leaves its root", path)
	}
	if strings.Trim(path, "abcdefghijklmnopqrstuvwxyz0123456789/.") != "" || len(path) > MaxPluginPath {
		t.Errorf("%q has unexpected characters or length", path)
	}
}
