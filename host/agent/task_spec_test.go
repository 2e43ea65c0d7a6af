package agent

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/hooks"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// specOf decodes the attributes of a task, which must be right.
func specOf(t *testing.T, jobType string, g hooks.Group, one hooks.Task) taskSpec {
	t.Helper()
	var wrong Problems
	s := newTaskSpec(jobType, g, one, &wrong)
	if err := wrong.err(); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestTaskEnvironmentAndArguments(t *testing.T) {
	j := job("notes", "service")
	j.Rest = json.RawMessage(`{"name":"Notes","meta":[{"owner":"me","level":"job"}]}`)
	g := tasks("web", task("main", `{"meta":[{"level":"task","port":80}],"user":"nobody","kill_timeout":"30s"}`))
	g.Tasks[0].Config = json.RawMessage(`{"command":"${NOMAD_TASK_DIR}/run","args":["--node=${node.unique.name}",` +
		`"${env[\"GREETING\"]}",5,true,"${CSI_ENDPOINT}","${unknown}"]}`)
	g.Tasks[0].Env = map[string]string{"GREETING": "hello ${NOMAD_ALLOC_INDEX}", "NOMAD_REGION": "mine"}
	r := newAllocRecord(&JobRecord{Job: *j, Version: 1}, g, 3)
	r.ID = "11111111-aaaa"
	s := specOf(t, "service", g, g.Tasks[0])
	plan := hooks.Plan{Env: []hooks.Env{{Name: "CSI_ENDPOINT", Value: "unix:///csi/csi.sock", Default: true}}}
	d, err := Node{ID: "n-1", Name: "node1"}.driverTask(t.Context(), r, s, 2, plan, dirs{"/state/a"},
		taskdriver.NewExec())
	if err != nil || d.ID != "11111111-aaaa-main-2" || d.Command != "/local/run" || d.User != "nobody" ||
		d.KillGrace.Seconds() != 30 {
		t.Errorf("%+v", d)
	}
	args := []string{"--node=node1", "hello 3", "5", "true", "unix:///csi/csi.sock", "${unknown}"}
	if !slices.Equal(d.Args, args) {
		t.Errorf("args %q, want %q", d.Args, args)
	}
	const nomadEnv = `
		NOMAD_ALLOC_DIR=/alloc NOMAD_ALLOC_ID=11111111-aaaa NOMAD_ALLOC_INDEX=3 NOMAD_ALLOC_NAME=Notes.web[3]
		NOMAD_DC=dc1 NOMAD_GROUP_NAME=web NOMAD_JOB_ID=notes NOMAD_JOB_NAME=Notes NOMAD_META_LEVEL=task
		NOMAD_META_OWNER=me NOMAD_META_PORT=80 NOMAD_META_level=task NOMAD_META_owner=me NOMAD_META_port=80
		NOMAD_NAMESPACE=default NOMAD_REGION=mine NOMAD_SECRETS_DIR=/secrets NOMAD_SHORT_ALLOC_ID=11111111
		NOMAD_TASK_DIR=/local NOMAD_TASK_NAME=main`
	want := append([]string{"GREETING=hello 3"}, strings.Fields(nomadEnv)...)
	if !slices.Equal(d.Env, want) {
		t.Errorf("environment:\n%s\nwant:\n%s", strings.Join(d.Env, "\n"), strings.Join(want, "\n"))
	}
	raw, err := Node{}.driverTask(t.Context(), r, s, 1, hooks.Plan{}, dirs{"/state/a"}, taskdriver.NewRawExec())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"NOMAD_TASK_DIR=/state/a/tasks/main/local", "NOMAD_ALLOC_DIR=/state/a/shared",
		"NOMAD_SECRETS_DIR=/state/a/tasks/main/secrets",
	} {
		if !slices.Contains(raw.Env, want) {
			t.Errorf("not isolated: no %s in %q", want, raw.Env)
		}
	}
}

func TestUnsupportedAttributes(t *testing.T) {
	withAgent(t, func(e *env) {
		config := func(text string) hooks.Task {
			out := task("t", "")
			out.Config = json.RawMessage(text)
			return out
		}
		env := func(name, value string) hooks.Task {
			out := task("t", "")
			out.Env = map[string]string{name: value}
			return out
		}
		docker := task("t", "")
		docker.Driver = "docker"
		for want, task := range map[string]hooks.Task{
			"vault":                 task("t", `{"vault":[{}]}`),
			"template: local/x:1: ": task("t", `{"template":[{"data":"{{ key }}","destination":"local/x"}]}`),
			"artifact":              task("t", `{"artifact":[{"source":"http://x/y"}]}`),
			"poststop":              task("t", `{"lifecycle":[{"hook":"poststop"}]}`),
			"mode":                  task("t", `{"restart":[{"mode":"never"}]}`),
			`restart: delay = "soon": write a duration`:           task("t", `{"restart":[{"delay":"soon"}]}`),
			"restart: attempts = -1: use a whole number from 0":   task("t", `{"restart":[{"attempts":-1}]}`),
			"logs: max_files = 0: use a whole number from 1":      task("t", `{"logs":[{"max_files":0}]}`),
			"logs: max_file_size = -1: use a whole number from 1": task("t", `{"logs":[{"max_file_size":-1}]}`),
			`kill_timeout = "-5s": write a duration as in "30s", from "0s" to "2562047h"`: task("t",
				`{"kill_timeout":"-5s"}`),
			`kill_timeout = "9999999h": write a duration`: task("t", `{"kill_timeout":"9999999h"}`),
			`meta: variable "NOMAD_META_A=B": a name`:     task("t", `{"meta":[{"a=b":"x"}]}`),
			`env: variable "": a name is not empty`:       env("", "x"),
			`env: variable "A=B": a name is not empty`:    env("A=B", "x"),
			"env: variable A: its value has a NUL byte":   env("A", "x\x00y"),
			"use cpu or cores, not both":                  task("t", `{"resources":[{"cpu":5,"cores":1}]}`),
			"command":                                     config(""),
			"args cannot be a JSON string; write a list":  config(`{"command":"x","args":"y"}`),
			"only exec": docker,
		} {
			err := e.trySubmit(job("j", "service", tasks("g", task)), SubmitOptions{})
			if !errors.Is(err, registry.ErrUnsupported) && !errors.Is(err, registry.ErrInvalid) {
				e.Errorf("%s: %v", want, err)
			}
			e.hasError(err, nil, want)
		}
		j := job("j", "service", tasks("g", task("t", "")))
		for want, rest := range map[string]string{
			`"NOMAD_META_A=B"`: `{"meta":[{"a=b":"x"}]}`, "job j: meta": `{"meta":[{"a":["x"]}]}`,
		} {
			j.Rest = json.RawMessage(rest)
			e.hasError(e.trySubmit(j, SubmitOptions{}), registry.ErrInvalid, want)
		}
		j.Rest = json.RawMessage(`{"constraint":[{}],"datacenters":["dc1"]}`)
		j.Groups[0].Rest = json.RawMessage(`{"restart":[{"atempts":3}]}`)
		j.Groups[0].Tasks[0].Rest = json.RawMessage(`{"resources":[{"memory":10,"network":[{"mbits":1}]}]}`)
		e.submit(j)
		want := []string{"constraint", "resources.network", "restart.atempts"}
		for i, name := range want {
			want[i] = "unsupported attribute " + name + " is ignored"
		}
		if w := e.agent.job("j").Warnings; !slices.Equal(w, want) {
			e.Errorf("warnings: %q, want %q", w, want)
		}
	})
}

func TestKillTimeout(t *testing.T) {
	for rest, want := range map[string]time.Duration{
		"": taskdriver.DefaultKillGrace, `{"kill_timeout":"1m"}`: time.Minute, `{"kill_timeout":"0s"}`: 0,
	} {
		if got := specOf(t, "service", hooks.Group{}, task("main", rest)).grace; got != want {
			t.Errorf("%s: %v, want %v", rest, got, want)
		}
	}
}

func TestLogsBlockBoundsLogs(t *testing.T) {
	s := specOf(t, "service", hooks.Group{}, task("main", `{"logs":[{"max_files":3,"max_file_size":2}]}`))
	s.Config = json.RawMessage(`{"command":"sh"}`)
	d, err := Node{}.driverTask(t.Context(), &AllocRecord{ID: "a"}, s, 1, hooks.Plan{}, dirs{"/a"},
		taskdriver.NewExec())
	if err != nil || d.LogFiles != 3 || d.LogSize != 2<<20 {
		t.Errorf("the driver gets %d files of %d bytes, %v", d.LogFiles, d.LogSize, err)
	}
}

func TestRestartPolicy(t *testing.T) {
	type failure struct {
		after time.Duration // since the last one
		again bool
		delay time.Duration
	}
	second, minute := time.Second, time.Minute
	for name, c := range map[string]struct {
		policy   restartPolicy
		failures []failure
	}{
		"fail after the attempts are used up": {restartPolicy{2, minute, second, modeFail}, []failure{
			{0, true, second}, {second, true, second}, {second, false, 0},
		}},
		"a new interval has all attempts again": {restartPolicy{1, minute, second, modeFail}, []failure{
			{0, true, second}, {minute, true, second}, {second, false, 0},
		}},
		"delay waits for the end of the interval": {restartPolicy{1, minute, second, modeDelay}, []failure{
			{0, true, second}, {10 * second, true, 50 * second}, {50 * second, true, minute},
		}},
		"never less than the delay": {restartPolicy{1, minute, second, modeDelay},
			[]failure{{0, true, second}, {minute - 1, true, second}}},
		"no attempts, mode fail":  {restartPolicy{0, minute, second, modeFail}, []failure{{0, false, 0}}},
		"no attempts, mode delay": {restartPolicy{0, minute, second, modeDelay}, []failure{{0, false, 0}}},
	} {
		t.Run(name, func(t *testing.T) {
			var restarts Restarts
			now := time.Unix(1, 0)
			for i, f := range c.failures {
				now = now.Add(f.after)
				next, delay, again, why := c.policy.next(restarts, now)
				if again != f.again || delay != f.delay || again == (why != "") {
					t.Errorf("failure %d: again %v after %v %q, want %v after %v", i, again, delay, why, f.again,
						f.delay)
				}
				restarts = next
			}
		})
	}
}

func TestRestartPolicyOfTask(t *testing.T) {
	group := `{"restart":[{"attempts":7,"delay":"2s"}]}`
	for _, c := range []struct {
		kind, group, task string
		want              restartPolicy
	}{
		{"service", "", "", restartPolicy{2, 30 * time.Minute, 15 * time.Second, modeFail}},
		{"system", "", "", restartPolicy{2, 30 * time.Minute, 15 * time.Second, modeFail}},
		{"batch", "", "", restartPolicy{3, 24 * time.Hour, 15 * time.Second, modeFail}},
		{"sysbatch", "", "", restartPolicy{3, 24 * time.Hour, 15 * time.Second, modeFail}},
		{"service", group, `{"restart":[{"attempts":"4","mode":"delay"}]}`,
			restartPolicy{4, 30 * time.Minute, 2 * time.Second, modeDelay}},
	} {
		s := specOf(t, c.kind, hooks.Group{Name: "g", Rest: json.RawMessage(c.group)}, task("t", c.task))
		if s.policy != c.want {
			t.Errorf("%s %s: %+v; want %+v", c.kind, c.task, s.policy, c.want)
		}
	}
}
