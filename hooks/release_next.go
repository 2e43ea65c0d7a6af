//go:build next

package hooks

import (
	"path/filepath"

	"holdfast/registry"
)

// ScratchEnv is the variable that tells a plugin its scratch directory.
const ScratchEnv = "HOLDFAST_SCRATCH_DIR"

// scratchDir lies in the directory of the task's socket, and goes with it.
const scratchDir = "scratch"

// NextFields are what this release knows of a csi_plugin, and the one before does not.
type NextFields struct {
	// ScratchDir is a directory of the task's own, in the task; empty: it gets none. It is kept over restarts of the task.
	ScratchDir string `json:"scratch_dir,omitempty"`
}

func (n NextFields) checkNext(p PluginSpec) error {
	at := filepath.Clean(n.ScratchDir)
	switch {
	case n.ScratchDir == "":
		return nil
	case !filepath.IsAbs(at) || at == "/":
		return registry.Invalid("plugin %q: scratch_dir %q must be an absolute path other than \"/\"", p.ID, n.ScratchDir)
	}
	for name, dir := range map[string]string{"mount_dir": p.MountDir, "stage_publish_base_dir": p.StagePublishBaseDir} {
		if at == dir || inside(at, dir) || inside(dir, at) {
			return registry.Invalid("plugin %q: scratch_dir %q and %s %q must not lie in one another", p.ID, at, name, dir)
		}
	}
	return nil
}

func (n NextFields) prepareNext(l Layout, t AllocTask, p *Preparation) {
	if n.ScratchDir == "" {
		return
	}
	dir := filepath.Join(l.SocketDir(registry.TaskKey{Alloc: t.Alloc, Task: t.Task}), scratchDir)
	at := dir
	p.Dirs = append(p.Dirs, HostDir{dir, 0o700})
	if t.Isolated {
		at = filepath.Clean(n.ScratchDir)
		p.Plan.Binds = append(p.Plan.Binds, Bind{Source: dir, Target: at, Propagation: Private})
	}
	p.Plan.Env = append(p.Plan.Env, Env{Name: ScratchEnv, Value: at})
}
