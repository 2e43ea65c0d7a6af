//go:build next

package config

import "holdfast/hooks"

const (
	scratchVersion = 3 // a plugin that is to have a directory must not be started without it
	sealedVersion  = scratchVersion
)

// What this release knows of a csi_plugin, and the one before does not.
var nextPluginAttrs = []string{"scratch_dir"}

func (f *file) nextPlugin(at *fields, p *hooks.PluginSpec) {
	dir, ok := at.path("scratch_dir")
	if !ok {
		return
	}
	p.ScratchDir = dir
	for name, other := range map[string]string{"mount_dir": p.MountDir, "stage_publish_base_dir": p.StagePublishBaseDir} {
		if within(dir, other) || within(other, dir) {
			f.errorf(at.at("scratch_dir"), "use directories that do not contain each other",
				"scratch_dir (%s) and %s (%s) overlap", dir, name, other)
		}
	}
}

func leastNext(s sealed) int {
	if s.Task != nil && s.Task.Plugin.ScratchDir != "" {
		return scratchVersion
	}
	return firstVersion
}
