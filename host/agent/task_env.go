package agent

import (
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
)

// Node is the node on which jobs run.
type Node struct {
	ID   string `json:"id"` // constant for a state directory
	Name string `json:"name"`
}

// attributes are the values of references such as ${node.unique.id}.
func (n Node) attributes() map[string]string {
	return map[string]string{
		"node.unique.id": n.ID, "node.unique.name": n.Name, "node.datacenter": "dc1", "node.region": "global",
		"node.pool": "default", "node.class": "", "attr.unique.hostname": n.Name, "attr.kernel.name": runtime.GOOS,
		"attr.cpu.arch": runtime.GOARCH, "attr.os.name": runtime.GOOS,
	}
}

// dirs are the directories of an alloc and its tasks.
type dirs struct{ root string }

func (d dirs) copy() string                 { return filepath.Join(d.root, "alloc.json") }
func (d dirs) shared() string               { return filepath.Join(d.root, "shared") }
func (d dirs) tasks() string                { return filepath.Join(d.root, "tasks") }
func (d dirs) task(n host.TaskName) string  { return filepath.Join(d.tasks(), string(n)) }
func (d dirs) local(n host.TaskName) string { return filepath.Join(d.task(n), "local") }

// nomadEnv returns the NOMAD_* variables of a task.
func nomadEnv(r *AllocRecord, t taskSpec, d dirs, isolated bool) map[string]string {
	env := map[string]string{
		"NOMAD_ALLOC_ID": string(r.ID), "NOMAD_SHORT_ALLOC_ID": short(r.ID), "NOMAD_ALLOC_INDEX": fmt.Sprint(r.Index),
		"NOMAD_ALLOC_NAME": fmt.Sprintf("%s.%s[%d]", r.JobName, r.Group.Name, r.Index),
		"NOMAD_TASK_NAME":  string(t.Name),
		"NOMAD_GROUP_NAME": r.Group.Name, "NOMAD_JOB_ID": r.Job, "NOMAD_JOB_NAME": r.JobName,
		"NOMAD_NAMESPACE": r.Namespace, "NOMAD_DC": "dc1", "NOMAD_REGION": "global",
		"NOMAD_TASK_DIR": d.local(t.Name), "NOMAD_ALLOC_DIR": d.shared(),
		"NOMAD_SECRETS_DIR": filepath.Join(d.task(t.Name), "secrets"),
	}
	if isolated {
		env["NOMAD_TASK_DIR"], env["NOMAD_ALLOC_DIR"], env["NOMAD_SECRETS_DIR"] = "/local", "/alloc", "/secrets"
	}
	for _, meta := range []map[string]string{r.JobMeta, t.groupMeta, t.meta} {
		for name, v := range meta {
			env["NOMAD_META_"+name] = v
			env["NOMAD_META_"+strings.ToUpper(name)] = v
		}
	}
	return env
}

// attempt returns one attempt of a task in the form that a driver takes.
func (n Node) attempt(r *AllocRecord, t taskSpec, number uint64, plan hooks.Plan, root string,
	isolated bool) taskdriver.Task {
	d := dirs{root}
	env := nomadEnv(r, t, d, isolated)
	known := n.attributes()
	maps.Copy(known, env)
	for _, e := range plan.Env {
		if _, set := t.Env[e.Name]; !set || !e.Default {
			known[e.Name] = e.Value
		}
	}
	for name, v := range t.Env {
		env[name] = hooks.Expand(v, known)
	}
	maps.Copy(known, env)
	out := taskdriver.Task{
		ID: attemptID(r.ID, t.Name, number), Dir: d.task(t.Name), Alloc: d.shared(),
		Command: hooks.Expand(t.config.Command, known), WorkDir: hooks.Expand(t.config.WorkDir, known),
		User: hooks.Expand(t.user, known), Plan: plan, KillGrace: t.grace,
		LogFiles: t.logFiles, LogSize: t.logSize,
	}
	for _, arg := range t.config.Args {
		out.Args = append(out.Args, hooks.Expand(string(arg), known))
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		out.Env = append(out.Env, name+"="+env[name])
	}
	return out
}

func attemptID(id host.AllocID, task host.TaskName, attempt uint64) string {
	return fmt.Sprintf("%s-%s-%d", id, task, attempt)
}

func short(id host.AllocID) string { return string(id[:min(8, len(id))]) }
