package config

import (
	"slices"
	"strings"

	"github.com/hashicorp/hcl/v2/hclsyntax"

	"holdfast/hooks"
	"holdfast/registry"
)

// maxCount bounds a group's count.
const maxCount = 50_000

// job reads a file that contains a job or a bare task.
func (f *file) job() *hooks.Job {
	var subject block
	for _, b := range f.body.Blocks {
		switch {
		case b.Type == "job" || b.Type == "task":
			if subject.body != nil {
				f.errorf(b.DefRange(), "put it into a file of its own", "a file holds one job or one task")
			}
			subject = block{b.Type, b.Labels, b.Body, f.ctx, b.DefRange(), b}
		case !slices.Contains(topLevel, b.Type):
			f.errorf(b.TypeRange, didYouMean(b.Type, append([]string{"job", "task"}, topLevel...)),
				"a job file has no block %q", b.Type)
		}
	}
	for _, attr := range f.body.Attributes {
		f.errorf(attr.NameRange, "is this a volume file, or a job file without its job block?",
			"a job file has no attribute %q", attr.Name)
	}
	if subject.body == nil && len(f.diags) > 0 {
		return nil
	}
	if subject.body == nil {
		f.errorf(f.head, `write job "name" { ... }`, "the file holds no job")
		return nil
	}
	name, ok := f.label(subject)
	if !ok {
		return nil
	}
	if subject.kind == "task" {
		return f.bareTask(subject, name)
	}
	return f.jobBlock(subject, name)
}

// labelNames maps a block type to the name of its label in errors.
var labelNames = map[string]string{"job": "job ID", "group": "group name", "task": "task name", "volume": "volume name"}

// label returns a block's only label.
func (d *decoder) label(b block) (string, bool) {
	if len(b.labels) != 1 {
		d.errorf(b.head, "write "+b.kind+` "name" { ... }`, "%s has one name", b.kind)
		return "", false
	}
	at := b.head
	if b.syntax != nil && len(b.syntax.LabelRanges) == 1 {
		at = b.syntax.LabelRanges[0]
	}
	name := b.labels[0]
	if strings.Contains(name, "${") {
		d.errorf(at, "write it out, or use dynamic with labels", "a name cannot hold a reference")
		return "", false
	}
	t, err := registry.ParseLabel(labelNames[b.kind], name)
	if err != nil {
		d.errorf(at, "", "%v", err)
	}
	return t, err == nil
}

// bareTask wraps a task in a job and a group, as Nomad wraps a task directly in a job.
func (f *file) bareTask(b block, name string) *hooks.Job {
	job := &hooks.Job{ID: name, Namespace: registry.DefaultNamespace, Type: jobTypes[0]}
	if g, ok := f.groupOfTask(b); ok {
		job.Groups = []hooks.Group{g}
	}
	return job
}

// jobFacts holds the job settings that its groups depend on.
type jobFacts struct {
	kind   string // type
	canary bool
}

func (f *file) jobBlock(b block, id string) *hooks.Job {
	in := f.open(b, jobStanza)
	job := &hooks.Job{
		ID: id, Namespace: parsed(in, "namespace", registry.ParseNamespace), Type: oneOf[string](in, "type"),
	}
	if in.has("id") {
		job.ID = parsed(in, "id", func(s string) (string, error) { return registry.ParseLabel(labelNames["job"], s) })
	}
	facts := jobFacts{kind: job.Type, canary: f.canary(in)}
	seen := map[string]bool{}
	for _, inner := range in.blocks {
		var g hooks.Group
		var ok bool
		switch inner.kind {
		case "group":
			g, ok = f.group(inner, facts)
		case "task":
			g, ok = f.groupOfTask(inner)
		}
		if !ok {
			continue
		}
		if seen[g.Name] {
			f.errorf(inner.head, "give each group a name of its own", "the job has two groups named %q", g.Name)
		}
		seen[g.Name] = true
		job.Groups = append(job.Groups, g)
	}
	if in.lacks("group") && in.lacks("task") {
		f.errorf(b.head, `add group "name" { task "name" { ... } }`, "the job has no group")
	}
	rest := f.carry(b, "namespace", "type", "id", "group", "task")
	asBlock(rest, "meta")
	job.Rest = rawJSON(rest)
	return job
}

// groupOfTask returns the group of a task directly in a job.
func (f *file) groupOfTask(b block) (hooks.Group, bool) {
	task, _, ok := f.task(b, &requests{})
	return hooks.Group{Name: string(task.Name), Count: 1, Tasks: []hooks.Task{task}}, ok
}

// updateStanza declares the fields that Holdfast reads in an update block. The block itself is carried.
var updateStanza = &stanza{name: "update", fields: []field{{name: "canary", kind: isNumber, high: maxCount}}}

// canary reports whether an update block requests canaries.
func (f *file) canary(in *fields) bool {
	for _, b := range in.all("update") { // without its blocks: carry expands them
		update := f.fields(block{kind: "update", body: &hclsyntax.Body{Attributes: b.body.Attributes}, ctx: b.ctx,
			head: b.head}, updateStanza)
		if update.integer("canary") > 0 {
			return true
		}
	}
	return false
}
