package config

import (
	"slices"

	"holdfast/hooks"
	"holdfast/registry"
)

// group reads a group block.
func (f *file) group(b block, job jobFacts) (hooks.Group, bool) {
	name, ok := f.label(b)
	if !ok {
		return hooks.Group{}, false
	}
	at := f.open(b, groupStanza)
	g := hooks.Group{Name: name, Count: int(at.integer("count"))}
	if g.Count > 1 && perNode(job.kind) {
		f.errorf(at.at("count"), "remove it: one runs on every node", "a job of type %s has a count of 1 at most",
			job.kind)
	}
	job.canary = job.canary || f.canary(at)
	asked := f.requests(at, groupFacts{job, g.Name, g.Count})
	spec := hooks.GroupSpec{Volumes: asked.ours, Mounts: map[string][]hooks.VolumeMount{}}
	for _, inner := range at.all("task") {
		task, mounts, ok := f.task(inner, asked)
		if !ok {
			continue
		}
		if slices.ContainsFunc(g.Tasks, func(o hooks.Task) bool { return o.Name == task.Name }) {
			f.errorf(inner.head, "give each task a name of its own", "the group has two tasks named %q", task.Name)
			continue
		}
		g.Tasks = append(g.Tasks, task)
		if len(mounts) > 0 {
			spec.Mounts[string(task.Name)] = mounts
		}
	}
	if len(at.all("task")) == 0 {
		f.errorf(b.head, `add task "name" { ... }`, "the group has no task")
	}
	f.sealGroup(&g, spec, asked)
	rest := f.carry(b, "count", "task", "volume")
	f.carryVolumes(rest, asked)
	asBlock(rest, "meta")
	g.Rest = raw(rest)
	return g, true
}

// perNode reports whether a job of the type runs once on every node.
func perNode(kind string) bool { return kind == "system" || kind == "sysbatch" }

func (f *file) sealGroup(g *hooks.Group, spec hooks.GroupSpec, asked *requests) {
	if len(asked.ours) == 0 {
		return
	}
	for _, v := range asked.ours {
		g.Volumes = append(g.Volumes, string(v.Name))
		f.needs(asked.at[string(v.Name)], needsOfVolume(v.Usage.Attachment)...)
	}
	g.Sealed = seal(sealed{Group: &spec})
}

func needsOfVolume(mode registry.AttachmentMode) []hooks.Operation {
	if mode == registry.BlockDevice {
		return []hooks.Operation{hooks.OpDevice, hooks.OpDeviceRule}
	}
	return []hooks.Operation{hooks.OpBind}
}

func (f *file) carryVolumes(rest map[string]any, asked *requests) {
	for _, b := range asked.carried {
		f.carryInto(rest, b)
	}
}
