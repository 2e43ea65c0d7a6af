package hooks

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"holdfast/registry"
)

// Draw draws the tree on disk, with one example of each path that ids are hashed into.
func (l Layout) Draw(w io.Writer) error {
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
	for _, top := range []string{l.State, l.Run} {
		if err := drawTree(w, top, notes); err != nil {
			return err
		}
	}
	return nil
}

// drawTree writes top and all paths below it, parents first, indented by depth.
func drawTree(w io.Writer, top string, notes map[string]string) error {
	paths := map[string]bool{top: true}
	for path := range notes {
		for ; inside(path, top); path = path[:strings.LastIndexByte(path, '/')] {
			paths[path] = true
		}
	}
	for _, path := range sorted(paths) {
		name, indent := path, ""
		if path != top {
			name = path[strings.LastIndexByte(path, '/')+1:]
			indent = strings.Repeat("  ", strings.Count(path[len(top):], "/"))
		}
		line := strings.TrimRight(fmt.Sprintf("%-42s %s", indent+name, notes[path]), " ")
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	return nil
}

func sorted[K ~string, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
