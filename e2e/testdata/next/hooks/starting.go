package hooks

import (
	"errors"
	"path/filepath"
	"slices"

	"holdfast/registry"
)

// EndpointEnv is the variable that tells a plugin where to listen.
const EndpointEnv = "CSI_ENDPOINT"

// HostDir is a directory that the shim makes on the host, with its missing parents, before a plan that names it is
// applied.
type HostDir struct {
	Path string `json:"path"`
	Mode uint32 `json:"mode"` // permission bits, of missing parents as well
}

// Preparation lists the directories to make before a plugin's task starts, and the plan to start it with.
type Preparation struct {
	Dirs     []HostDir         `json:"dirs"`   // in this order
	Socket   string            `json:"socket"` // on the host: removed if nobody answers there
	Endpoint registry.Endpoint `json:"endpoint"`
	Volumes  registry.Tree     `json:"volumes"` // becomes Instance.Volumes
	Plan     Plan              `json:"plan"`
}

// Starting returns the preparation of a plugin's task. It depends on its arguments only: every start of a task gets the
// same.
func Starting(l Layout, t AllocTask, s TaskSpec) (Preparation, error) {
	spec := s.Plugin.withDefaults()
	key := registry.TaskKey{Alloc: t.Alloc, Task: t.Task}
	if err := checkStart(l, key, spec); err != nil {
		return Preparation{}, err
	}
	root := l.PluginRoot(spec.ID)
	p := Preparation{
		Dirs: []HostDir{
			{l.SocketDir(key), 0o700}, {root, 0o700},
			{filepath.Join(root, stageDir), 0o700}, {filepath.Join(root, publishDir), 0o700},
		},
		Socket:   l.Socket(key),
		Endpoint: registry.Endpoint{Host: l.Socket(key), Task: l.Socket(key)},
		Volumes:  registry.Tree{Host: root, Task: root},
	}
	if t.Isolated {
		p.Endpoint.Task = filepath.Join(spec.MountDir, socketName)
		p.Volumes.Task = spec.StagePublishBaseDir
		p.Plan.Binds = pluginBinds(l.SocketDir(key), root, spec)
	}
	if !slices.Contains(s.Env, EndpointEnv) {
		p.Plan.Env = []Env{{Name: EndpointEnv, Value: "unix://" + p.Endpoint.Task, Default: true}}
	}
	spec.prepareScratch(l, t, &p)
	return p, nil
}

// pluginBinds returns the binds of a plugin: bidirectional ones for its socket and its mounts and, for a node plugin,
// the host's /dev. /dev is private: device nodes appear in it without propagation, and a host's /dev need not be a
// shared mount.
func pluginBinds(sockets, root string, spec PluginSpec) []Bind {
	binds := []Bind{
		{Source: sockets, Target: spec.MountDir, Propagation: Bidirectional},
		{Source: root, Target: spec.StagePublishBaseDir, Propagation: Bidirectional},
	}
	if slices.Contains(spec.Type.Roles(), registry.RoleNode) {
		binds = append(binds, Bind{Source: "/dev", Target: "/dev", Propagation: Private})
	}
	return binds
}

// withDefaults returns the spec with the defaults of its two directories, for a spec that was stored without them.
func (p PluginSpec) withDefaults() PluginSpec {
	if p.MountDir == "" {
		p.MountDir = DefaultMountDir
	}
	if p.StagePublishBaseDir == "" {
		p.StagePublishBaseDir = DefaultStagePublishBaseDir
	}
	p.MountDir, p.StagePublishBaseDir = filepath.Clean(p.MountDir), filepath.Clean(p.StagePublishBaseDir)
	return p
}

func checkStart(l Layout, t registry.TaskKey, spec PluginSpec) error {
	switch {
	case t.Alloc == "" || t.Task == "" || spec.ID == "":
		return registry.Invalid("task %q of alloc %q with plugin %q: all three must be named", t.Task, t.Alloc, spec.ID)
	case spec.Type.Roles() == nil:
		return registry.Invalid("plugin %q: type %q is unknown; use \"node\", \"controller\" or \"monolith\"", spec.ID,
			spec.Type)
	}
	if err := errors.Join(spec.checkDirs(), spec.checkScratch()); err != nil {
		return err
	}
	return l.Check()
}

// checkDirs refuses directories that hide each other, and those in which a path would get too long.
func (p PluginSpec) checkDirs() error {
	sockets, volumes := p.MountDir, p.StagePublishBaseDir
	for name, dir := range map[string]string{"mount_dir": sockets, "stage_publish_base_dir": volumes} {
		if !filepath.IsAbs(dir) || dir == "/" {
			return registry.Invalid("plugin %q: %s %q must be an absolute path other than \"/\"", p.ID, name, dir)
		}
	}
	if sockets == volumes || inside(volumes, sockets) || inside(sockets, volumes) {
		return registry.Invalid("plugin %q: mount_dir %q and stage_publish_base_dir %q must not lie in one another",
			p.ID, sockets, volumes)
	}
	if len(filepath.Join(sockets, socketName)) > MaxSocketPath {
		return registry.Invalid("plugin %q: mount_dir %q is too long for a socket in it; %d bytes are allowed", p.ID,
			sockets, MaxSocketPath-len("/"+socketName))
	}
	if n := longestPath(volumes); n > MaxPluginPath {
		return registry.Invalid("plugin %q: stage_publish_base_dir %q is %d bytes too long for the volumes in it", p.ID,
			volumes, n-MaxPluginPath)
	}
	return nil
}
