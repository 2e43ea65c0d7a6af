package config

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/hashicorp/hcl/v2"

	"holdfast/hooks"
	"holdfast/registry"
)

// task reads a task block and its mounts of the group's volumes.
func (f *file) task(b block, asked *requests) (hooks.Task, []hooks.VolumeMount, bool) {
	name, ok := f.label(b)
	if !ok {
		return hooks.Task{}, nil, false
	}
	in := f.open(b, taskStanza)
	task := hooks.Task{Name: registry.TaskName(name), Driver: in.text("driver"), Env: in.stringMap("env")}
	task.Places = map[string]registry.Position{"": position(b.head.Start)}
	for i, t := range in.all("template") {
		task.Places[fmt.Sprintf("template.%d", i)] = position(t.head.Start)
	}
	if config, ok := in.one("config"); ok {
		task.Config, task.Places["config"] = rawJSON(f.carry(config)), position(config.head.Start)
	}
	if plugin, ok := in.one("csi_plugin"); ok {
		spec := f.plugin(plugin)
		task.Plugin, task.PluginType, task.Roll = spec.ID, spec.Type, spec.Roll
		task.Sealed = seal(sealed{Task: &hooks.TaskSpec{Plugin: spec, Env: slices.Sorted(maps.Keys(task.Env))}})
	}
	rest := f.carry(b, "driver", "env", "config", "csi_plugin", "volume_mount")
	mounts := f.mounts(rest, in, asked)
	asBlock(rest, "meta")
	task.Rest = rawJSON(rest)
	return task, mounts, true
}

// taskDirs maps references to directories in every task's file system.
var taskDirs = map[string]string{
	"${NOMAD_TASK_DIR}": "/local", "${NOMAD_ALLOC_DIR}": "/alloc", "${NOMAD_SECRETS_DIR}": "/secrets",
	`${env["NOMAD_TASK_DIR"]}`: "/local", `${env["NOMAD_ALLOC_DIR"]}`: "/alloc",
	`${env["NOMAD_SECRETS_DIR"]}`: "/secrets",
}

// maxPath bounds a path in a task. Paths derived from it must also fit into the 128 bytes of a CSI string.
const maxPath = 60

// path reads an absolute, clean path in a task's file system outside the system directories.
func (f *fields) path(name string) (string, bool) {
	if s, ok := f.pathText(name); ok && f.checkPath(name, s) {
		return s, true
	}
	return fallbackOf[string](f.declared(name, isText)), false
}

// destination reads a mount destination, under the same rules as path.
func (f *fields) destination(name string) (string, bool) {
	s, ok := f.destinationText(name)
	return s, ok && f.checkPath(name, s)
}

// destinationText returns a cleaned destination. A relative one starts at the task's root, which contains local, alloc
// and secrets.
func (f *fields) destinationText(name string) (string, bool) {
	s, ok := f.pathText(name)
	if !ok {
		return "", false
	}
	if s != "" && !strings.Contains(s, "${") && !slices.Contains(strings.Split(s, "/"), "..") {
		s = path.Join("/", s)
	}
	return s, true
}

// pathText returns a path without a trailing slash, with references to a task's directories resolved.
func (f *fields) pathText(name string) (string, bool) {
	s, ok := f.textAtRunTime(name)
	if !ok {
		return "", false
	}
	for ref, dir := range taskDirs {
		if rest, found := strings.CutPrefix(s, ref); found {
			s = dir + rest
		}
	}
	if len(s) > 1 {
		s = strings.TrimSuffix(s, "/")
	}
	return s, true
}

// textAtRunTime returns a path as it is written, with run-time references.
func (f *fields) textAtRunTime(name string) (string, bool) {
	f.declared(name, isText)
	v, ok := f.valueAtRunTime(name)
	if !ok {
		return "", false
	}
	s, ok := stringOf(v)
	if !ok {
		f.wrongType(name, "a path", v)
		return "", false
	}
	return s, true
}

func (f *fields) checkPath(name, s string) bool {
	if wrong := wrongPath(s); wrong != "" {
		f.errorf(f.rangeOf(name), "", "%s %s", name, wrong)
		return false
	}
	return true
}

// wrongPath returns why a path is invalid, or an empty string.
func wrongPath(s string) string {
	switch {
	case strings.Contains(s, "${"):
		return "may start with ${NOMAD_TASK_DIR}, ${NOMAD_ALLOC_DIR} or ${NOMAD_SECRETS_DIR}, and hold no other " +
			"reference"
	case !strings.HasPrefix(s, "/"):
		return `must be an absolute path, as in "/data"`
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "must not contain control characters"
	case len(s) > 1024:
		return "must have at most 1024 bytes"
	case path.Clean(s) != s:
		return fmt.Sprintf("must be a clean path: %q", path.Clean(s))
	}
	for _, own := range []string{"/", "/proc", "/sys", "/dev"} {
		if path.Clean(s) == own || own != "/" && own != "/dev" && within(s, own) {
			return "must not be / or /dev, and must not be or lie in /proc or /sys"
		}
	}
	return ""
}

// within reports whether the path is the directory or lies below it.
func within(s, dir string) bool {
	return s == dir || strings.HasPrefix(s, strings.TrimSuffix(dir, "/")+"/")
}

// needs reports an error for each of the operations that the host lacks.
func (d *decoder) needs(at hcl.Range, ops ...hooks.Operation) {
	for _, op := range ops {
		if d.opts.Operations != nil && !slices.Contains(d.opts.Operations, op) {
			d.errorf(at, "update the host", "this needs the plan operation %q, which this host cannot apply", op)
		}
	}
}
