package agent

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/registry"
)

func TestATaskIsToldWhatItIs(t *testing.T) {
	j := job("notes", "service")
	j.Rest = json.RawMessage(`{"name":"Notes","meta":[{"owner":"me","level":"job"}]}`)
	g := tasks("web", task("main", `{"meta":[{"level":"task","port":80}],"user":"nobody","kill_timeout":"30s"}`))
	g.Tasks[0].Config = json.RawMessage(`{"command":"${NOMAD_TASK_DIR}/run","args":["--node=${node.unique.name}","${env[\"GREETING\"]}",5,true,"${CSI_ENDPOINT}","${unknown}"]}`)
	g.Tasks[0].Env = map[string]string{"GREETING": "hello ${NOMAD_ALLOC_INDEX}", "NOMAD_REGION": "mine"}
	r := newAllocRecord(&JobRecord{Job: *j, Version: 1}, g, 3)
	r.ID = "11111111-aaaa"
	s, err := newTaskSpec("service", g, g.Tasks[0])
	if err != nil {
		t.Fatal(err)
	}
	plan := hooks.Plan{Env: []hooks.Env{{Name: "CSI_ENDPOINT", Value: "unix:///csi/csi.sock", Default: true}}}
	d := Node{ID: "n-1", Name: "node1"}.attempt(r, s, 2, plan, "/state/a", true)
	if d.ID != "11111111-aaaa-main-2" || d.Command != "/local/run" || d.User != "nobody" || d.KillGrace.Seconds() != 30 {
		t.Errorf("%+v", d)
	}
	if want := []string{"--node=node1", "hello 3", "5", "true", "unix:///csi/csi.sock", "${unknown}"}; !slices.Equal(d.Args, want) {
		t.Errorf("args %q, want %q", d.Args, want)
	}
	want := strings.Fields(`
		NOMAD_ALLOC_DIR=/alloc NOMAD_ALLOC_ID=11111111-aaaa NOMAD_ALLOC_INDEX=3 NOMAD_ALLOC_NAME=Notes.web[3] NOMAD_DC=dc1
		NOMAD_GROUP_NAME=web NOMAD_JOB_ID=notes NOMAD_JOB_NAME=Notes NOMAD_META_LEVEL=task NOMAD_META_OWNER=me NOMAD_META_PORT=80
		NOMAD_META_level=task NOMAD_META_owner=me NOMAD_META_port=80 NOMAD_NAMESPACE=default NOMAD_REGION=mine NOMAD_SECRETS_DIR=/secrets
		NOMAD_SHORT_ALLOC_ID=11111111 NOMAD_TASK_DIR=/local NOMAD_TASK_NAME=main`)
	want = append([]string{"GREETING=hello 3"}, want...)
	if !slices.Equal(d.Env, want) {
		t.Errorf("environment:\n%s\nwant:\n%s", strings.Join(d.Env, "\n"), strings.Join(want, "\n"))
	}
	raw := Node{}.attempt(r, s, 1, hooks.Plan{}, "/state/a", false)
	for _, e := range []string{"NOMAD_TASK_DIR=/state/a/tasks/main/local", "NOMAD_ALLOC_DIR=/state/a/shared", "NOMAD_SECRETS_DIR=/state/a/tasks/main/secrets"} {
		if !slices.Contains(raw.Env, e) {
			t.Errorf("without a file system of its own: no %s in %q", e, raw.Env)
		}
	}
}

func TestWhatAJobCannotDoWithoutIsRefused(t *testing.T) {
	a := &Agent{drivers: nil}
	for rest, names := range map[string]string{
		`{"template":[{}]}`:                      "template",
		`{"lifecycle":[{"hook":"poststop"}]}`:    "poststop",
		`{"restart":[{"mode":"sometimes"}]}`:     "sometimes",
		`{"artifact":[{"source":"http://x/y"}]}`: "artifact",
	} {
		_, err := a.Check(job("j", "service", tasks("g", task("t", rest))))
		if err == nil {
			_, err = newTaskSpec("service", tasks("g"), task("t", rest))
		}
		if !errors.Is(err, registry.ErrUnsupported) && !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("%s: %v", names, err)
		}
	}
	bare := task("t", "")
	bare.Config = nil
	if _, err := newTaskSpec("service", tasks("g"), bare); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("a task without a command: %v", err)
	}
	wrong := task("t", "")
	wrong.Config = json.RawMessage(`{"command":"x","args":"y"}`)
	if _, err := newTaskSpec("service", tasks("g"), wrong); !errors.Is(err, registry.ErrInvalid) || !strings.Contains(err.Error(), "args cannot be a JSON string; write a list") {
		t.Errorf("arguments that are no list: %v", err)
	}
}

func TestWhatIsNotActedOnIsSaid(t *testing.T) {
	inWorld(t, func(w *world) {
		docker := task("t", "")
		docker.Driver = "docker"
		if _, err := w.agent.Submit(w.Context(), job("j", "service", tasks("g", docker)), Source{}, w.shim, SubmitOptions{}); !errors.Is(err, registry.ErrUnsupported) || !strings.Contains(err.Error(), "only exec") {
			w.Errorf("a driver that there is not: %v", err)
		}
		j := job("j", "service", tasks("g", task("t", `{"resources":[{"cpu":5}]}`)))
		j.Rest = json.RawMessage(`{"constraint":[{}]}`)
		rec, err := w.agent.Submit(w.Context(), j, Source{}, w.shim, SubmitOptions{})
		if err != nil || len(rec.Warnings) != 2 || !strings.Contains(rec.Warnings[0], "constraint") {
			w.Errorf("%v, %v", rec, err)
		}
	})
}

func TestAllocsAreFoundByTheBeginOfTheirIDs(t *testing.T) {
	a := &Agent{allocs: map[host.AllocID]*alloc{}}
	for _, id := range []host.AllocID{"aa1", "aa2", "bb"} {
		a.publish([]*AllocRecord{{ID: id}}, nil)
	}
	for prefix, want := range map[string]error{"aa1": nil, "b": nil, "aa": registry.ErrInvalid, "c": registry.ErrNotFound, "": registry.ErrNotFound} {
		if _, err := a.Find(prefix); !errors.Is(err, want) || (err == nil) != (want == nil) {
			t.Errorf("%q: %v, want %v", prefix, err, want)
		}
	}
}

func TestIDsAreNeverTheSame(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		id := newID()
		if _, err := registry.ParseAllocID(id); err != nil || len(id) != 36 || seen[id] {
			t.Fatalf("%q: %v", id, err)
		}
		seen[id] = true
	}
}
