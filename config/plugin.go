package config

import (
	"time"

	"holdfast/hooks"
	"holdfast/registry"
)

var (
	pluginShape = shape{
		attrs:  []string{"id", "type", "mount_dir", "stage_publish_base_dir", "health_timeout", "list_volumes"},
		blocks: []string{"heartbeat"},
	}
	heartbeatShape = shape{attrs: []string{"interval", "timeout", "failures"}}
	pluginTypes    = []hooks.PluginType{hooks.TypeNode, hooks.TypeController, hooks.TypeMonolith}
)

// Limits of a csi_plugin block.
const (
	minTimeout  = 100 * time.Millisecond
	minInterval = 100 * time.Millisecond
	maxHealth   = 24 * time.Hour
	maxInterval = time.Hour
	maxTimeout  = 10 * time.Minute
	maxFailures = 1000
)

// plugin reads a csi_plugin block.
func (f *file) plugin(b block) hooks.PluginSpec {
	at := f.open(b, pluginShape)
	at.need("id", "type")
	p := hooks.PluginSpec{
		ID: parsed(at, "id", registry.ParsePluginID), Type: oneOf(at, "type", pluginTypes),
		MountDir: hooks.DefaultMountDir, StagePublishBaseDir: hooks.DefaultStagePublishBaseDir,
		HealthTimeout: at.duration("health_timeout", minTimeout, maxHealth, hooks.DefaultHealthTimeout),
		Heartbeat: hooks.Heartbeat{
			Interval: hooks.DefaultHeartbeatInterval, Timeout: hooks.DefaultHeartbeatTimeout,
			Failures: hooks.DefaultHeartbeatFailures,
		},
	}
	if dir, ok := at.path("mount_dir"); ok {
		p.MountDir = dir
	}
	if dir, ok := at.path("stage_publish_base_dir"); ok {
		p.StagePublishBaseDir = dir
	}
	if list, ok := at.truth("list_volumes"); ok {
		p.NoListVolumes = !list
	}
	f.checkDirs(at, p)
	if beat, ok := at.one("heartbeat"); ok {
		f.heartbeat(f.open(beat, heartbeatShape), &p.Heartbeat)
	}
	f.needs(b.head, hooks.OpBind, hooks.OpEnv)
	return p
}

func (f *file) heartbeat(at *fields, beat *hooks.Heartbeat) {
	beat.Interval = at.duration("interval", minInterval, maxInterval, beat.Interval)
	beat.Timeout = at.duration("timeout", minTimeout, maxTimeout, beat.Timeout)
	beat.Failures = int(at.integer("failures", 1, maxFailures, int64(beat.Failures)))
}

// checkDirs checks that the two directories are disjoint and short. Mounts in one would hide the other, and CSI strings
// carry paths below them.
func (f *file) checkDirs(at *fields, p hooks.PluginSpec) {
	for name, dir := range map[string]string{"mount_dir": p.MountDir, "stage_publish_base_dir": p.StagePublishBaseDir} {
		if len(dir) > maxPath {
			f.errorf(at.at(name), "use a shorter one: paths below it have to fit into a plugin's 128 bytes",
				"%s has %d bytes; at most %d are allowed", name, len(dir), maxPath)
		}
		if within(dir, "/dev") {
			f.errorf(at.at(name), `use a directory of its own, as in "/csi"`, "%s must not lie in /dev", name)
		}
	}
	if within(p.MountDir, p.StagePublishBaseDir) || within(p.StagePublishBaseDir, p.MountDir) {
		name := "stage_publish_base_dir"
		if !at.has(name) {
			name = "mount_dir"
		}
		f.errorf(at.at(name), "use directories that do not contain each other",
			"mount_dir (%s) and stage_publish_base_dir (%s) overlap", p.MountDir, p.StagePublishBaseDir)
	}
}
