package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
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
		"NOMAD_NAMESPACE": string(r.Namespace), "NOMAD_DC": "dc1", "NOMAD_REGION": "global",
		"NOMAD_TASK_DIR": d.local(t.Name), "NOMAD_ALLOC_DIR": d.shared(),
		"NOMAD_SECRETS_DIR": filepath.Join(d.task(t.Name), "secrets"),
	}
	if isolated {
		env["NOMAD_TASK_DIR"], env["NOMAD_ALLOC_DIR"], env["NOMAD_SECRETS_DIR"] = "/local", "/alloc", "/secrets"
	}
	for _, meta := range []map[string]string{r.JobMeta, t.groupMeta, t.meta} {
		maps.Copy(env, metaEnv(meta))
	}
	return env
}

// metaEnv returns the variables for the values of a meta block.
func metaEnv(meta map[string]string) map[string]string {
	env := map[string]string{}
	for name, v := range meta {
		env["NOMAD_META_"+name] = v
		env["NOMAD_META_"+strings.ToUpper(name)] = v
	}
	return env
}

// checkVariables returns an error if no process can get the variables. The error has no value.
func checkVariables(env map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(env)) {
		switch {
		case name == "" || strings.ContainsAny(name, "=\x00"):
			return registry.Invalid("variable %q: a name is not empty, and has no \"=\" and no NUL byte", name)
		case strings.Contains(env[name], "\x00"):
			return registry.Invalid("variable %s: its value has a NUL byte, which no variable can have", name)
		}
	}
	return nil
}

// driverTask returns one attempt of a task as an argument for a driver. It renders the task's templates, which may read
// files.
func (n Node) driverTask(ctx context.Context, r *AllocRecord, t taskSpec, attempt uint64, plan hooks.Plan, d dirs,
	driver taskdriver.Driver) (taskdriver.Task, error) {
	env := nomadEnv(r, t, d, driver.Isolated())
	references := n.attributes() // the values of references such as ${NAME}
	maps.Copy(references, env)
	for _, e := range plan.Env {
		references[e.Name] = e.Value
	}
	for name, v := range t.Env {
		env[name] = hooks.Expand(v, references)
	}
	maps.Copy(references, env)
	files, err := renderTemplates(ctx, t.templates, env, references)
	if err == nil {
		err = checkVariables(env)
	}
	if err != nil {
		return taskdriver.Task{}, err
	}
	out := taskdriver.Task{
		ID: attemptID(r.ID, t.Name, attempt), Dir: d.task(t.Name), Alloc: d.shared(),
		User: hooks.Expand(t.user, references), Plan: plan, KillGrace: t.grace,
		LogFiles: t.logFiles, LogSize: t.logSize, Resources: t.resources, Files: files,
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		out.Env = append(out.Env, name+"="+env[name])
	}
	config, err := expandConfig(t.Config, references)
	if err == nil {
		_, err = driver.Configure(&out, config)
	}
	return out, err
}

// expandConfig replaces the references in each string of a config block.
func expandConfig(config json.RawMessage, known map[string]string) (json.RawMessage, error) {
	if len(config) == 0 {
		return nil, nil
	}
	decoder := json.NewDecoder(bytes.NewReader(config))
	decoder.UseNumber()
	var v any
	if err := decoder.Decode(&v); err != nil {
		return nil, err
	}
	return json.Marshal(expandValue(v, known))
}

func expandValue(v any, known map[string]string) any {
	switch v := v.(type) {
	case string:
		return hooks.Expand(v, known)
	case []any:
		for i := range v {
			v[i] = expandValue(v[i], known)
		}
	case map[string]any:
		for name := range v {
			v[name] = expandValue(v[name], known)
		}
	}
	return v
}

func attemptID(id host.AllocID, task host.TaskName, attempt uint64) string {
	return fmt.Sprint(attemptPrefix(id, task), attempt)
}

// attemptPrefix returns the beginning of the IDs of all attempts of a task.
func attemptPrefix(id host.AllocID, task host.TaskName) string {
	return fmt.Sprintf("%s-%s-", id, task)
}

// shortID is the number of characters in a short alloc ID.
const shortID = 8

func short(id host.AllocID) string { return string(id[:min(shortID, len(id))]) }
