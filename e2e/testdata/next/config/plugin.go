package config

import (
	"time"

	"github.com/hashicorp/hcl/v2/hclsyntax"

	"holdfast/hooks"
	"holdfast/registry"
)

var pluginStanza = &stanza{
	name: "csi_plugin",
	fields: []field{
		{name: "id", kind: isText, required: true,
			doc: "The ID of the plugin, which volumes name. Several tasks may serve one plugin."},
		{name: "type", kind: isChoice, required: true,
			words: words(hooks.TypeNode, hooks.TypeController, hooks.TypeMonolith),
			doc:   "Which CSI services the task serves; `monolith`: both."},
		{name: "mount_dir", kind: isText, fallback: hooks.DefaultMountDir,
			doc: "Where the task sees the directory in which it makes its socket, csi.sock."},
		{name: "stage_publish_base_dir", kind: isText, fallback: hooks.DefaultStagePublishBaseDir,
			doc: "Where the task sees the directory in which it mounts volumes."},
		{name: "health_timeout", kind: isDuration, low: minTimeout, high: maxHealth,
			fallback: hooks.DefaultHealthTimeout,
			doc:      "How long the plugin may take to become healthy, before a restart of its task is requested."},
		{name: "list_volumes", kind: isBool, fallback: true,
			doc: "Whether Holdfast may call ListVolumes for `holdfast doctor` and for the health of volumes."},
		{name: "controller_scope", kind: isChoice, words: []string{scopeCluster, registry.ScopeNode},
			fallback: scopeCluster,
			doc: "Which node of a cluster makes the plugin's controller calls. With cluster, one node makes all of " +
				"them. With node, each node makes those for the volumes that the plugin stores on it."},
		{name: "roll", kind: isChoice, words: words(hooks.RollBeside, hooks.RollStopFirst),
			fallback: string(hooks.RollBeside),
			doc: "How a new instance replaces a running one: it starts beside the old one, " +
				"or after its end for a plugin that cannot run twice on a node."},
		{name: "heartbeat", kind: isBlock, block: heartbeatStanza, doc: "How the plugin is supervised."},
		{name: "scratch_dir", kind: isText, doc: "A directory for what the plugin does not keep."},
	},
}

var heartbeatStanza = &stanza{
	name: "heartbeat",
	fields: []field{
		{name: "interval", kind: isDuration, low: minInterval, high: maxInterval,
			fallback: hooks.DefaultHeartbeatInterval,
			doc:      "The time between two probes."},
		{name: "timeout", kind: isDuration, low: minTimeout, high: maxTimeout, fallback: hooks.DefaultHeartbeatTimeout,
			doc: "How long the plugin may take to answer a probe."},
		{name: "failures", kind: isNumber, low: 1, high: maxFailures, fallback: int64(hooks.DefaultHeartbeatFailures),
			doc: "How many failed probes in a row make the plugin unhealthy."},
		{name: "restart_after", kind: isDuration, low: minTimeout, high: maxHealth,
			doc: "How long the plugin may be unhealthy before a restart of its task is requested. Without it, " +
				"none is requested. A task that serves FUSE mounts is not restarted while they exist."},
	},
}

// Limits of a csi_plugin block.
const (
	minTimeout  = int64(100 * time.Millisecond)
	minInterval = int64(100 * time.Millisecond)
	maxHealth   = int64(24 * time.Hour)
	maxInterval = int64(time.Hour)
	maxTimeout  = int64(10 * time.Minute)
	maxFailures = 1000
)

// scopeCluster is the default of controller_scope.
const scopeCluster = "cluster"

// plugin reads a csi_plugin block.
func (f *file) plugin(b block) hooks.PluginSpec {
	in := f.open(b, pluginStanza)
	p := hooks.PluginSpec{
		ID: parsed(in, "id", registry.ParsePluginID), Type: oneOf[hooks.PluginType](in, "type"),
		HealthTimeout: in.duration("health_timeout"), NoListVolumes: !in.isTrue("list_volumes"),
		LocalController: oneOf[string](in, "controller_scope") == registry.ScopeNode,
	}
	p.MountDir, _ = in.path("mount_dir")
	p.StagePublishBaseDir, _ = in.path("stage_publish_base_dir")
	f.scratchDir(in, &p)
	if roll := oneOf[hooks.RollMode](in, "roll"); roll != hooks.RollBeside {
		p.Roll = roll
	}
	f.checkDirs(in, p)
	beat, ok := in.one("heartbeat")
	if !ok {
		beat = block{kind: "heartbeat", body: &hclsyntax.Body{}, ctx: b.ctx, head: b.head}
	}
	p.Heartbeat = f.heartbeat(beat)
	f.needs(b.head, hooks.OpBind, hooks.OpEnv)
	return p
}

func (f *file) heartbeat(b block) hooks.Heartbeat {
	in := f.open(b, heartbeatStanza)
	return hooks.Heartbeat{
		Interval: in.duration("interval"), Timeout: in.duration("timeout"), Failures: int(in.integer("failures")),
		RestartAfter: in.duration("restart_after"),
	}
}

// checkDirs checks that the two directories are disjoint and short. Mounts in one would hide the other, and CSI strings
// carry paths below them.
func (f *file) checkDirs(in *fields, p hooks.PluginSpec) {
	for name, dir := range map[string]string{"mount_dir": p.MountDir, "stage_publish_base_dir": p.StagePublishBaseDir} {
		if len(dir) > maxPath {
			f.errorf(in.rangeOf(name), "use a shorter one: CSI allows 128 bytes for paths below it",
				"%s has %d bytes; at most %d are allowed", name, len(dir), maxPath)
		}
		if within(dir, "/dev") {
			f.errorf(in.rangeOf(name), `use a directory of its own, as in "/csi"`, "%s must not lie in /dev", name)
		}
	}
	overlap := within(p.MountDir, p.StagePublishBaseDir) || within(p.StagePublishBaseDir, p.MountDir)
	if overlap && !f.unsure(in.block) {
		name := "stage_publish_base_dir"
		if !in.has(name) {
			name = "mount_dir"
		}
		f.errorf(in.rangeOf(name), "use directories that do not contain each other",
			"mount_dir (%s) and stage_publish_base_dir (%s) overlap", p.MountDir, p.StagePublishBaseDir)
	}
}
