package config

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
)

func mustParse(t *testing.T, text string, opts Options) *hooks.Job {
	t.Helper()
	job, ds := ParseJob(Source{"job.hcl", []byte(text)}, opts)
	if job == nil || len(ds) > 0 {
		t.Fatalf("%v", ds.Err())
	}
	return job
}

// refusal returns the diagnostics of a job that must be refused, as text.
func refusal(t *testing.T, text string, opts Options) string {
	t.Helper()
	job, ds := ParseJob(Source{"job.hcl", []byte(text)}, opts)
	if job != nil || ds.Err() == nil {
		t.Fatalf("accepted: %s", text)
	}
	return ds.Err().Error()
}

const variableJob = `
variable "name" {
  type    = string
  default = "a"
}
variable "list" { type = list(number) }
variable "flag" { default = false }
job "x" {
  group "g" {
    count = var.list[0]
    task "t" {
      driver = "exec"
      config {
        name = var.name
        list = var.list
        flag = var.flag
      }
    }
  }
}`

func TestVariablesWinInOrder(t *testing.T) {
	opts := Options{
		VariableFiles: []Source{{"a.vars", []byte("name = \"from a\"\nlist = [3]\n")},
			{"b.vars", []byte("name = \"from b\"")}},
		Variables: map[string]string{"flag": "true"},
	}
	job := mustParse(t, variableJob, opts)
	const want = `{"flag":true,"list":[3],"name":"from b"}`
	if got := string(job.Groups[0].Tasks[0].Config); got != want || job.Groups[0].Count != 3 {
		t.Errorf("count %d, config %s, want 3, %s", job.Groups[0].Count, got, want)
	}
	opts.Variables = map[string]string{"name": "[not an expression", "list": "[1, 2]"}
	if got := string(mustParse(t, variableJob, opts).Groups[0].Tasks[0].Config); !strings.Contains(got,
		`"[not an expression"`) || !strings.Contains(got, `[1,2]`) {
		t.Errorf("config is %s", got)
	}
}

func TestWrongVariables(t *testing.T) {
	for want, opts := range map[string]Options{
		`job.hcl:6:1: error: the variable "list" has no value; give it a default, or --var list=...`: {},
		`--var nmae: error: unknown variable "nmae"; did you mean "name"?`: {
			Variables: map[string]string{"nmae": "x", "list": "[1]"}},
		`a.vars:1:1: error: unknown variable "lst"; did you mean "list"?`: {
			VariableFiles: []Source{{"a.vars", []byte("lst = 1")}}},
		`a.vars:2:9: error: this string is not closed on its line`: {
			VariableFiles: []Source{{"a.vars", []byte("list = [1]\nname = \"x")}}},
		`--var list: error: the variable "list" cannot have this value`: {
			Variables: map[string]string{"list": `"x"`}},
		`a.vars:1:1: error: a variable file holds no blocks`: {
			VariableFiles: []Source{{"a.vars", []byte("x {}")}}},
	} {
		got := refusal(t, variableJob, opts)
		if want = strings.Replace(want, "a.vars:2:9", "a.vars:2:8", 1); !strings.Contains(got, want) {
			t.Errorf("got %s\nwant %s", got, want)
		}
	}
}

func TestUnsetVariablesAreUnknown(t *testing.T) {
	const text = `
variable "id" {}
variable "count" { type = number }
job "x" {
  group "g" {
    count = var.count
    task "t" {
      driver = "exec"
      csi_plugin {
        id   = var.id
        type = %q
      }
    }
    dynamic "network" {
      for_each = var.id
      content {}
    }
  }
}`
	mustParse(t, fmt.Sprintf(text, "node"), Options{UnsetUnknown: true})
	if got := refusal(t, fmt.Sprintf(text, "nod"), Options{UnsetUnknown: true}); strings.Count(got, "\n") != 0 {
		t.Errorf("more than the one mistake: %s", got)
	}
}

func TestHostSaysWhatItCarries(t *testing.T) {
	const text = `job "x" {
  group "g" {
    gadget "a" { size = 1 }
    task "t" {
      driver = "exec"
      gadget = "b"
    }
  }
}`
	if got := refusal(t, text, Options{}); strings.Count(got, "gadget") != 2 {
		t.Errorf("got %s", got)
	}
	g := mustParse(t, text, Options{Blocks: []string{"gadget"}}).Groups[0]
	if got, want := string(g.Rest), `{"gadget":[{"labels":["a"],"size":1}]}`; got != want {
		t.Errorf("rest of the group is %s, want %s", got, want)
	}
	if got, want := string(g.Tasks[0].Rest), `{"gadget":"b"}`; got != want {
		t.Errorf("rest of the task is %s, want %s", got, want)
	}
}

func TestOperationsThatTheHostLacks(t *testing.T) {
	const text = `job "x" {
  group "g" {
    volume "v" {
      type            = "csi"
      source          = "s"
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
    }
    task "t" {
      driver = "exec"
      csi_plugin {
        id   = "p"
        type = "node"
      }
    }
  }
}`
	mustParse(t, text, Options{Operations: hooks.Operations})
	got := refusal(t, text, Options{Operations: []hooks.Operation{hooks.OpBind}})
	for _, want := range []string{
		`job.hcl:3:5: error: this needs the plan operation "device", which this host cannot apply; update the host`,
		`job.hcl:3:5: error: this needs the plan operation "device_rule"`,
		`job.hcl:11:7: error: this needs the plan operation "env"`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("got %s\nwant %s", got, want)
		}
	}
}

func TestDigestIsOfTheText(t *testing.T) {
	const text = `task "t" { driver = "exec" }`
	if got, want := mustParse(t, text, Options{}).Digest, fmt.Sprintf("%x", sha256.Sum256([]byte(text))); got != want {
		t.Errorf("digest %s, want %s", got, want)
	}
}

func TestTaskOutsideAGroup(t *testing.T) {
	for _, text := range []string{`task "t" { driver = "exec" }`, `job "t" {
  task "t" { driver = "exec" }
}`} {
		job := mustParse(t, text, Options{})
		job.Groups[0].Tasks[0].Places = nil
		want := []hooks.Group{{Name: "t", Count: 1, Tasks: []hooks.Task{{Name: "t", Driver: "exec"}}}}
		if job.ID != "t" || !reflect.DeepEqual(job.Groups, want) {
			t.Errorf("got %+v", job)
		}
	}
}

func sealedTask(t *testing.T) hooks.Sealed {
	job := mustParse(t, `task "t" {
  driver = "exec"
  env { A = 1 }
  csi_plugin {
    id   = "p"
    type = "monolith"
  }
}`, Options{})
	return job.Groups[0].Tasks[0].Sealed
}

var wantTask = hooks.TaskSpec{
	Plugin: hooks.PluginSpec{
		ID: "p", Type: hooks.TypeMonolith, MountDir: "/csi", StagePublishBaseDir: "/local/csi",
		HealthTimeout: 30 * time.Second,
		Heartbeat:     hooks.Heartbeat{Interval: 10 * time.Second, Timeout: 5 * time.Second, Failures: 3},
	},
	Env: []string{"A"},
}

// TestUnknownFieldsAreHarmless opens data that a newer shim has sealed with further fields. The host's copy keeps them.
func TestUnknownFieldsAreHarmless(t *testing.T) {
	newer := strings.Replace(string(sealedTask(t)), `"csi_plugin":{`, `"later":[1],"csi_plugin":{"colour":"red",`, 1)
	job := hooks.Job{Groups: []hooks.Group{{Tasks: []hooks.Task{{Sealed: hooks.Sealed(newer)}}}}}
	stored, err := json.Marshal(job)
	if err != nil {
		t.Fatal(err)
	}
	var loaded hooks.Job
	if err := json.Unmarshal(stored, &loaded); err != nil {
		t.Fatal(err)
	}
	s := loaded.Groups[0].Tasks[0].Sealed
	if !strings.Contains(string(s), `"colour":"red"`) {
		t.Errorf("the field is lost: %s", s)
	}
	if got, err := OpenTask(s); err != nil || !reflect.DeepEqual(got, wantTask) {
		t.Errorf("got %+v, %v", got, err)
	}
}

// TestRunningTaskOpensWhateverItsVersion: any shim version can supervise a running task.
func TestRunningTaskOpensWhateverItsVersion(t *testing.T) {
	newer := strings.Replace(string(sealedTask(t)), `"version":1`, `"version":99`, 1)
	if got, err := OpenRunning(hooks.Sealed(newer)); err != nil || !reflect.DeepEqual(got, wantTask) {
		t.Errorf("got %+v, %v", got, err)
	}
	if _, err := OpenRunning(hooks.Sealed("{}")); !errors.Is(err, registry.ErrDamaged) {
		t.Errorf("got %v", err)
	}
}

func TestSealedThatCannotBeOpened(t *testing.T) {
	for text, want := range map[string]error{
		"":         registry.ErrDamaged,
		"not json": registry.ErrDamaged,
		"{}":       registry.ErrDamaged,
		fmt.Sprintf(`{"version":%d,"task":{}}`, sealedVersion+1): registry.ErrUnsupported,
		`{"version":1,"group":{}}`:                               registry.ErrInvalid,
		`{"version":1,"task":"oops"}`:                            registry.ErrDamaged,
	} {
		if _, err := OpenTask(hooks.Sealed(text)); !errors.Is(err, want) {
			t.Errorf("%q: got %v, want %v", text, err, want)
		}
	}
	if _, err := OpenGroup(sealedTask(t)); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("a task opened as a group: %v", err)
	}
	newer := fmt.Appendf(nil, `{"version":%d,"group":{}}`, sealedVersion+1)
	if _, err := OpenGroup(newer); !errors.Is(err, registry.ErrUnsupported) {
		t.Errorf("a group of an unknown version: %v", err)
	}
}
