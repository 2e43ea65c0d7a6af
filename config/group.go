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
	in := f.open(b, groupStanza)
	g := hooks.Group{Name: name, Count: int(in.integer("count"))}
	if g.Count > 1 && perNode(job.kind) {
		f.errorf(in.rangeOf("count"), "remove it: one runs on every node", "a job of type %s has a count of 1 at most",
			job.kind)
	}
	job.canary = job.canary || f.canary(in)
	asked := f.requests(in, groupFacts{job, g.Name, g.Count})
	spec := hooks.GroupSpec{Volumes: asked.csi, Mounts: map[string][]hooks.VolumeMount{}}
	for _, inner := range in.all("task") {
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
	if in.lacks("task") {
		f.errorf(b.head, `add task "name" { ... }`, "the group has no task")
	}
	if len(asked.csi) > 0 {
		g.Sealed = seal(sealed{Group: &spec})
	}
	for _, v := range asked.csi {
		g.Volumes = append(g.Volumes, string(v.Name))
		head := asked.blocks[string(v.Name)].head
		if v.Usage.Attachment == registry.BlockDevice {
			f.needs(head, hooks.OpDevice, hooks.OpDeviceRule)
		} else {
			f.needs(head, hooks.OpBind)
		}
	}
	rest := f.carry(b, "count", "task", "volume")
	for _, name := range asked.carried {
		f.carryInto(rest, asked.blocks[name])
	}
	asBlock(rest, "meta")
	g.Rest = rawJSON(rest)
	return g, true
}

// perNode reports whether a job of the type runs once on every node.
func perNode(kind string) bool { return kind == "system" || kind == "sysbatch" }
