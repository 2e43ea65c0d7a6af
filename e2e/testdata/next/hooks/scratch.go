package hooks

import (
	"path/filepath"

	"holdfast/registry"
)

// ScratchEnv is the variable that tells a plugin its scratch directory.
const ScratchEnv = "HOLDFAST_SCRATCH_DIR"

// scratchDir lies in the directory of the task's socket, and goes with it.
const scratchDir = "scratch"

// checkScratch refuses a scratch directory that overlaps another directory of the plugin.
func (p PluginSpec) checkScratch() error {
	at := filepath.Clean(p.ScratchDir)
	switch {
	case p.ScratchDir == "":
		return nil
	case !filepath.IsAbs(at) || at == "/":
		return registry.Invalid("plugin %q: scratch_dir %q must be an absolute path other than \"/\"", p.ID,
			p.ScratchDir)
	}
	for name, dir := range map[string]string{"mount_dir": p.MountDir, "stage_publish_base_dir": p.StagePublishBaseDir} {
		if at == dir || inside(at, dir) || inside(dir, at) {
			return registry.Invalid("plugin %q: scratch_dir %q and %s %q must not lie in one another", p.ID, at, name,
				dir)
		}
	}
	return nil
}

// prepareScratch adds the scratch directory to the preparation.
func (p PluginSpec) prepareScratch(l Layout, t AllocTask, prep *Preparation) {
	if p.ScratchDir == "" {
		return
	}
	dir := filepath.Join(l.SocketDir(registry.TaskKey{Alloc: t.Alloc, Task: t.Task}), scratchDir)
	at := dir
	prep.Dirs = append(prep.Dirs, HostDir{dir, 0o700})
	if t.Isolated {
		at = filepath.Clean(p.ScratchDir)
		prep.Plan.Binds = append(prep.Plan.Binds, Bind{Source: dir, Target: at, Propagation: Private})
	}
	prep.Plan.Env = append(prep.Plan.Env, Env{Name: ScratchEnv, Value: at})
}
