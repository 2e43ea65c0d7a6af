package hooks

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"encoding/hex"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"holdfast/registry"
)

// Limits of paths, in bytes.
const (
	MaxSocketPath = 107 // sockaddr_un.sun_path less its closing zero (unix(7))
	MaxPluginPath = 128 // a path in a CSI request (CSI "Size Limits")
)

// Lengths of a hashed id in a path. Base32 carries 5 bits per character.
const (
	hashLength       = 26
	socketHashLength = 13
)

// Names of directories and files. A newer shim finds the mounts of an older one by these names and the hashes, so they
// never change. TestLayoutIsDocumented holds them.
const (
	tasksDir   = "t"
	mountsDir  = "mnt"
	stageDir   = "stage"
	publishDir = "publish"
	partsDir   = "parts" // beside the directories of plugins, whose names have another length
	volumeName = "v"
	socketName = "csi.sock"
)

// Layout computes paths on the host and does not access the disk. Both directories are absolute and free of symbolic
// links, so its paths equal those in the kernel's mount table.
type Layout struct {
	Run   string // sockets: gone after a boot
	State string // data that survives a boot
}

// DefaultRun returns the run directory of a state directory. It lies below /run for root and below xdg
// (XDG_RUNTIME_DIR) for others. Without xdg it is in the state directory.
func DefaultRun(stateDir string, uid int, xdg string) string {
	sum := sha256.Sum256([]byte(filepath.Clean(stateDir)))
	name := hex.EncodeToString(sum[:4])
	switch {
	case uid == 0:
		return filepath.Join("/run/holdfast", name)
	case xdg != "":
		return filepath.Join(xdg, "holdfast", name)
	}
	return filepath.Join(stateDir, "run")
}

// SocketDir returns the directory of a task's socket. No two tasks share one, and a task keeps it over restarts.
func (l Layout) SocketDir(t registry.TaskKey) string {
	return filepath.Join(l.Run, tasksDir, hash("task", string(t.Alloc), string(t.Task))[:socketHashLength])
}

// Socket returns the path of a task's socket.
func (l Layout) Socket(t registry.TaskKey) string { return filepath.Join(l.SocketDir(t), socketName) }

// SocketDirs returns the parent of every SocketDir.
func (l Layout) SocketDirs() string { return filepath.Join(l.Run, tasksDir) }

// MountRoot returns the directory above all mounts of plugins. It must be a shared mount.
func (l Layout) MountRoot() string { return filepath.Join(l.State, mountsDir) }

// PluginRoot returns the directory below which all volumes of a plugin are staged and published. All instances of the
// plugin share it, so that a new instance finds what an old one mounted.
func (l Layout) PluginRoot(id registry.PluginID) string {
	return filepath.Join(l.MountRoot(), hash("plugin", string(id)))
}

// Staging returns the only staging path of a volume below root, which is Instance.Volumes. The shim makes the
// directory.
func (l Layout) Staging(v registry.VolumeKey, root registry.Tree) registry.Tree {
	return below(root, stageDir, hash("volume", string(v.Plugin), string(v.External)))
}

// Target returns the publish path of a volume for one request of an alloc. The root is Instance.Volumes. The plugin
// creates and removes the path.
func (l Layout) Target(c registry.ClaimKey, root registry.Tree) registry.Tree {
	return below(l.TargetParent(c, root), volumeName)
}

// TargetParent returns the parent directory of one Target. The shim creates and removes it.
func (l Layout) TargetParent(c registry.ClaimKey, root registry.Tree) registry.Tree {
	id := hash("claim", string(c.Volume.Plugin), string(c.Volume.External), string(c.Alloc), string(c.Request))
	return below(root, publishDir, id)
}

// Part returns the path at which the shim mounts a part of a volume that is published for a request of an alloc. It
// lies outside the directories of plugins, which have nothing to do with it. The shim makes and removes it.
func (l Layout) Part(c registry.ClaimKey, path string) string {
	id := hash("part", string(c.Volume.Plugin), string(c.Volume.External), string(c.Alloc), string(c.Request), path)
	return filepath.Join(l.MountRoot(), partsDir, id, volumeName)
}

// EphemeralID returns the volume_id of an inline volume. Each request of each alloc has another one.
func EphemeralID(alloc registry.AllocID, request registry.RequestName) registry.ExternalID {
	return registry.ExternalID("csi-" + hash("ephemeral", string(alloc), string(request)))
}

// Suspensions is the directory that records the calls during which plugins died, one file per plugin and call.
func (l Layout) Suspensions() string { return filepath.Join(l.State, "suspended") }

// Secrets is the directory of the literal secrets of volumes, one file per secret.
func (l Layout) Secrets() string { return filepath.Join(l.State, "secrets") }

// Database is the shim's store, HostLock the file that its host locks, Binaries the directory of the shim binaries that
// ran.
func (l Layout) Database() string { return filepath.Join(l.State, "shim.db") }
func (l Layout) HostLock() string { return filepath.Join(l.State, "host.lock") }
func (l Layout) Binaries() string { return filepath.Join(l.State, "shims") }

// Check returns nil if every path fits its limit. Ids do not matter, because all hashes have the same length.
func (l Layout) Check() error {
	for _, dir := range []string{l.Run, l.State} {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || dir == "/" {
			return registry.Invalid("directory %q must be an absolute path without \"..\" and double slashes", dir)
		}
		if !utf8.ValidString(dir) {
			return registry.Invalid("directory %q is not valid UTF-8, as paths of CSI must be; choose another", dir)
		}
	}
	if n := len(l.Socket(registry.TaskKey{})); n > MaxSocketPath {
		return registry.Invalid("run directory %s is %d bytes too long: the kernel allows %d bytes for the path of a "+
			"socket; choose a shorter one", l.Run, n-MaxSocketPath, MaxSocketPath)
	}
	if n := longestPath(l.PluginRoot("")); n > MaxPluginPath {
		return registry.Invalid("state directory %s is %d bytes too long: CSI allows %d bytes for the path of a "+
			"volume; choose a shorter one", l.State, n-MaxPluginPath, MaxPluginPath)
	}
	return nil
}

// Ours reports whether a clean absolute path lies below the mount root or the socket directories. Holdfast never
// unmounts or removes other paths.
func (l Layout) Ours(path string) bool {
	return filepath.Clean(path) == path && (inside(path, l.MountRoot()) || inside(path, filepath.Join(l.Run, tasksDir)))
}

// longestPath returns the length of the longest path below root in a CSI request.
func longestPath(root string) int {
	at := Layout{}.Target(registry.ClaimKey{}, registry.Tree{Host: root})
	return len(at.Host)
}

// inside reports whether path lies strictly below dir; both are clean.
func inside(path, dir string) bool { return strings.HasPrefix(path, dir+"/") }

func below(root registry.Tree, names ...string) registry.Tree {
	name := filepath.Join(names...)
	return registry.Tree{Host: filepath.Join(root.Host, name), Task: filepath.Join(root.Task, name)}
}

var lowerBase32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// hash returns a file name for ids. A length precedes each id, so two different lists never have the same input.
func hash(ids ...string) string {
	h := sha256.New()
	for _, id := range ids {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(id))))
		h.Write([]byte(id))
	}
	return lowerBase32.EncodeToString(h.Sum(nil))[:hashLength]
}
