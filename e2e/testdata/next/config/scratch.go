package config

import "holdfast/hooks"

// scratchVersion is the version of sealed specs with a scratch_dir: a plugin must not be started without it.
const scratchVersion = 4

// scratchDir reads the attribute that the release before does not know.
func (f *file) scratchDir(in *fields, p *hooks.PluginSpec) {
	dir, ok := in.path("scratch_dir")
	if !ok {
		return
	}
	p.ScratchDir = dir
	for name, other := range map[string]string{"mount_dir": p.MountDir,
		"stage_publish_base_dir": p.StagePublishBaseDir} {
		if within(dir, other) || within(other, dir) {
			f.errorf(in.rangeOf("scratch_dir"), "use directories that do not contain each other",
				"scratch_dir (%s) and %s (%s) overlap", dir, name, other)
		}
	}
}
