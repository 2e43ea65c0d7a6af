package agent

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"holdfast/hooks"
	"holdfast/host/agent/taskdriver"
)

// attemptOf returns the first attempt of a task with template blocks.
func attemptOf(t *testing.T, env map[string]string, blocks string) (taskdriver.Task, error) {
	t.Helper()
	one := task("main", `{"template":`+blocks+`}`)
	one.Env, one.Config = env, json.RawMessage(`{"command":"run","args":["${NODE_ID}"]}`)
	var wrong Problems
	s := newTaskSpec("service", hooks.Group{}, one, &wrong)
	if err := wrong.err(); err != nil {
		return taskdriver.Task{}, err
	}
	return Node{ID: "n-1", Name: "node1"}.driverTask(t.Context(), &AllocRecord{ID: "a"}, s, 1, hooks.Plan{}, dirs{"/a"},
		taskdriver.NewExec())
}

// Templates become files and variables. Published job files of CSI plugins have templates such as these.
func TestTemplatesBecomeFilesAndVariables(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("hunter${PORT}2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	blocks := []map[string]any{
		{"data": `[{"monitors": {"a": {}}}]`, "destination": "local/config.json", "change_mode": "restart"},
		{"data": "host: {{ env \"SERVER\" }}:{{if true}}{{env `PORT`}}{{end}}\n  {{- env \"NOMAD_ALLOC_ID\" -}}  \n" +
			"key: {{ file \"" + key + "\" }}",
			"destination": "${NOMAD_SECRETS_DIR}/driver.yaml", "perms": "600"},
		{"data": "<< {{ .Literal }} [[ env \"PORT\" ]]", "destination": "/local/sub/go.tpl", "perms": 755,
			"left_delimiter": "[[", "right_delimiter": "]]"},
		{"data": "# of the node\nNODE_ID={{ env \"node.unique.id\" }} # comment\n\nexport PORT = \"80 " +
			"\\\"\"\nHOME='/x y'\n",
			"destination": "${NOMAD_TASK_DIR}/env", "env": true},
		{"data": "PASSWORD={{ file \"" + key + "\" }}", "destination": "secrets/env", "env": true},
		{"data": "ELSEWHERE=1", "destination": "config/.env", "env": true},
	}
	text, _ := json.Marshal(blocks)
	got, err := attemptOf(t, map[string]string{"SERVER": "nas", "PORT": "1"}, string(text))
	if err != nil {
		t.Fatal(err)
	}
	want := []taskdriver.File{
		{Path: "local/config.json", Mode: 0o644, Data: []byte(`[{"monitors": {"a": {}}}]`)},
		{Path: "secrets/driver.yaml", Mode: 0o600, Data: []byte("host: nas:1akey: hunter${PORT}2")},
		{Path: "local/sub/go.tpl", Mode: 0o755, Data: []byte("<< {{ .Literal }} 1")},
		{Path: "local/env", Mode: 0o644,
			Data: []byte("# of the node\nNODE_ID=n-1 # comment\n\nexport PORT = \"80 \\\"\"\nHOME='/x y'\n")},
		{Path: "secrets/env", Mode: 0o644, Data: []byte("PASSWORD=hunter${PORT}2")},
	}
	if !reflect.DeepEqual(got.Files, want) {
		t.Errorf("files\n%+v, want\n%+v", got.Files, want)
	}
	for _, v := range []string{"NODE_ID=n-1", `PORT=80 "`, "HOME=/x y", "ELSEWHERE=1", "SERVER=nas",
		"PASSWORD=hunter${PORT}2"} {
		if !slices.Contains(got.Env, v) {
			t.Errorf("no %s in %q", v, got.Env)
		}
	}
	if !slices.Equal(got.Args, []string{"n-1"}) {
		t.Errorf("args %q", got.Args)
	}
}

func TestTemplateErrors(t *testing.T) {
	const ok = `"data":"x","destination":"local/x"`
	cases := map[string]string{
		`[{}]`:           "write where the file goes",
		`[{"data":"x"}]`: "write where the file goes",
		`[{"destination":"local/x","source":"local/y"}]`:                     "write the text in data",
		`[{"data":"x","destination":"../../x"}]`:                             "leads out of the task's directory",
		`[{"data":"x","destination":"config/x"}]`:                            "write it to local/ or secrets/",
		`[{"data":"x","destination":"task.json"}]`:                           "write it to local/ or secrets/",
		`[{"destination":"local/x","data":"A='hunter2","env":true}]`:         "line 1",
		`[{"destination":"local/x","data":"{{ a\nkey: hunter2"}]`:            `function "a" not defined`,
		`[{"data":"x","destination":"${NOMAD_ALLOC_DIR}/x"}]`:                "write it to local/ or secrets/",
		`[{` + ok + `,"perms":"rw"}]`:                                        "write it as in \"640\"",
		`[{` + ok + `,"perms":"4755"}]`:                                      "up to 777",
		`[{` + ok + `,"change_mode":"never"}]`:                               "use noop or restart",
		`[{"destination":"local/x","data":"{{ env \"NONE\" }}"}]`:            "no variable NONE",
		`[{"destination":"local/x","data":"{{ file \"/no/such\" }}"}]`:       "/no/such",
		`[{"destination":"local/x","data":"A=1\nB hunter2","env":true}]`:     "line 2: no NAME=value",
		`[{"destination":"local/x","data":"A=\"hunter2","env":true}]`:        "line 1",
		`[{"destination":"local/x","data":"A=\"hunter2\\x00\"","env":true}]`: "variable A: its value has a NUL byte",
		`[{"destination":"local/x","data":"{{ env \"A\" | up }}"}]`:          `local/x:1: function "up" not defined`,
		`[{"destination":"local/x","data":"a {{ env \"A\" "}]`:               "unclosed action",
		`[{"destination":"local/x","data":"{{ .Data.password }}"}]`:          `key "Data"; write the value itself`,
		`[{"destination":"local/x","data":"{{range 9999999}}x{{end}}"}]`:     "local/x: its text is longer than",
	}
	cases[`[{"destination":"local/x","data":"[[ key ]]",`+
		`"left_delimiter":"[[","right_delimiter":"]]"}]`] = `[[ env "NAME" ]]`
	for _, blocks := range slices.Sorted(maps.Keys(cases)) {
		_, err := attemptOf(t, nil, blocks)
		if err == nil || !strings.Contains(err.Error(), cases[blocks]) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v, want %q", blocks, err, cases[blocks])
		}
		if unreadable := strings.Contains(blocks, "/no/such"); isPermanent(err) == unreadable {
			t.Errorf("%s: permanent is %t: %v", blocks, !unreadable, err)
		}
	}
}
