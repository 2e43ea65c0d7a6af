package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/mount/mounttest"
	"holdfast/registry"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) {
	taskdriver.Main()
	os.Exit(mounttest.Run(m))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func golden(t *testing.T, name string, write func(io.Writer) error) {
	t.Helper()
	path := filepath.Join("testdata", name+".want")
	var got bytes.Buffer
	must(t, write(&got))
	if *update {
		must(t, os.WriteFile(path, got.Bytes(), 0o644))
	}
	want, err := os.ReadFile(path)
	must(t, err)
	if got.String() != string(want) {
		t.Errorf("%s:\n%s\nwant:\n%s", path, got.String(), want)
	}
}

var (
	noon   = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	code   = 3
	intent = &registry.Intent{RPC: registry.NodeStageRPC, Outcome: registry.OutcomeUncertain, Attempt: 2,
		Detail: "deadline exceeded"}
	alloc = control.Alloc{
		ID: "0a1b2c3d-0000-4000-8000-000000000001", Job: "db", Group: "pg", Index: 1, Namespace: "default",
		State: "pending", Created: noon, Reason: "volume data is held by alloc 99",
		Notices: []control.Notice{{Kind: control.NoticeWaiting, Summary: "volume data is held\nby job other",
			Facts: []control.Fact{{Name: "Held by", Text: "alloc 99"}, {Text: "its backend\x1b[31m is down"},
				{Name: "Reason", Text: " "}},
			Meaning: "The other job must end.", Next: "The alloc continues when the volume is released.",
			Commands: []control.Command{{Purpose: "stop it", Line: "holdfast job stop other"},
				{Purpose: "stop job db instead of waiting", Line: "holdfast job stop db"}}}},
		Tasks: []control.Task{
			{Name: "main", Driver: "exec", State: "waiting", Attempt: 2, Restarts: 1, ExitCode: &code,
				Reason: "exit code 3"},
			{Name: "csi", Driver: "exec", Plugin: "loopfs", State: "running", Attempt: 1, PID: 77,
				Notes: []string{"resources: memory is not limited"}},
			{Name: "gone", Driver: "raw_exec", State: "dead", Failed: true, Attempt: 1, ExitCode: &code, Signal: 9},
		},
		Volumes: []control.AllocVolume{
			{Request: "data", Volume: "pg[1]", Plugin: "loopfs", Access: "single-node-writer", Attached: "done",
				Staged: "sent", Intent: intent},
		},
		Notes: []agent.Note{{At: noon, Task: "main", Text: "has said\na second line\x1b[31m"}},
	}
	plugin = control.Plugin{
		ID: "loopfs", Provider: "loopfs.example", Version: "1.0",
		Roles: []control.Role{{Role: "csi-controller", Healthy: 1, Expected: 1},
			{Role: "csi-node", Healthy: 1, Expected: 2}, {Role: "csi-later", Expected: 1, Reason: "exit code 3"}},
		Instances: []control.Instance{{Instance: instance, Active: true}, {Instance: missed}},
		Tasks: []host.PluginTask{{TaskKey: missed.TaskKey(), Job: "loopfs", Type: "monolith", Phase: "running",
			Attempt: 4, Restart: &registry.RestartRequest{Attempt: 4, Cause: registry.CauseMissed}}},
	}
	instance = host.Instance{
		InstanceKey: registry.InstanceKey{Role: "csi-node", Alloc: host.AllocID(alloc.ID), Task: "csi"}, Attempt: 1,
		Fingerprint: registry.Fingerprint{NodeID: "n1", MaxVolumes: 8, Topology: map[string]string{"zone": "a"},
			Capabilities: []registry.Capability{"node.STAGE_UNSTAGE_VOLUME", "node.99"}},
		Health: registry.Health{State: registry.Healthy, Cause: "probed", Since: noon},
	}
	missed = host.Instance{
		InstanceKey: registry.InstanceKey{Role: "csi-node", Alloc: "ffffffff-0000", Task: "csi"}, Attempt: 4,
		Health: registry.Health{State: registry.Unhealthy, Cause: registry.CauseMissed, Detail: "no answer in 1s",
			Since: noon},
	}
	job = control.Job{
		ID: "db", Namespace: "default", Type: "service", Status: "pending", Version: 2, Submitted: noon,
		Groups: []control.Group{{Name: "pg", Count: 2, Volumes: []string{"data"},
			Allocs: map[agent.AllocState]int{"pending": 1, "running": 1}},
			{Name: "csi", Count: 1, Plugins: []host.PluginID{"loopfs"}}},
		Allocs: []control.Alloc{alloc},
	}
)

func volume() control.Volume {
	v := control.Volume{Attached: "", Staged: "done", StagedAt: "/s/mnt/x", Intent: intent, Holders: []control.Holder{
		{Alloc: host.AllocID(alloc.ID), Job: "db", Request: "data", Access: "single-node-writer", ReadOnly: true,
			Published: "done", Since: noon},
	}}
	v.VolumeSpec = registry.VolumeSpec{ID: "data", Namespace: "default", Name: "data", Plugin: "loopfs",
		External: "vol-1"}
	v.State, v.Capacity, v.Since = "ready", 1<<25, noon
	v.Capabilities = []registry.VolumeCapability{{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}}
	v.Usage = []host.VolumeUsage{
		{Unit: "bytes", Total: 1 << 25, Used: 5 << 20, Available: 27 << 20},
		{Unit: "inodes", Total: 1000, Used: 11, Available: 989},
	}
	return v
}

// uncertainVolume returns a volume whose creation has an unknown outcome.
func uncertainVolume() control.Volume {
	v := control.Volume{Volume: volume().Volume}
	v.State, v.External, v.Source.Volume = registry.VolumeUncertain, "/buckets/data", "/buckets/other"
	v.CloneID = "other"
	v.Notices = []control.Notice{{Kind: control.NoticeUncertain, Summary: "volume data cannot be used",
		Next: "nothing"}}
	return v
}

func TestTables(t *testing.T) {
	defer func() { now = time.Now }()
	now = func() time.Time { return noon.Add(3*time.Minute + 7*time.Second) }
	golden(t, "jobs", func(w io.Writer) error { return writeJobs(w, []control.Job{job}) })
	golden(t, "job", func(w io.Writer) error { return writeJob(w, job) })
	golden(t, "allocs", func(w io.Writer) error { return writeAllocs(w, []control.Alloc{alloc}) })
	golden(t, "alloc", func(w io.Writer) error { return writeAlloc(w, alloc) })
	golden(t, "plugins", func(w io.Writer) error { return writePlugins(w, []control.Plugin{plugin}) })
	golden(t, "plugin", func(w io.Writer) error { return writePlugin(w, plugin) })
	golden(t, "uses", func(w io.Writer) error {
		return writeEndpointUses(w, []host.EndpointUse{
			{Volume: volume().VolumeKey(), Call: registry.NodeStageRPC, Target: "/mnt/stage", Node: "node-1",
				Since: noon},
			{Volume: volume().VolumeKey(), Call: registry.DeleteVolumeRPC, Node: "node-1", Since: noon},
		})
	})
	golden(t, "volumes", func(w io.Writer) error { return writeVolumes(w, []control.Volume{volume()}) })
	golden(t, "volume", func(w io.Writer) error { return writeVolume(w, volume()) })
	golden(t, "volume_uncertain", func(w io.Writer) error { return writeVolume(w, uncertainVolume()) })
	golden(t, "volume_unmeasured", func(w io.Writer) error {
		v := volume()
		v.Usage, v.Unmeasured = nil, "waited 1.8s: no answer from the plugin\n(see holdfast plugin status)"
		return writeVolume(w, v)
	})
	serving := host.ShimState{Serving: true, Since: noon, PID: 5, SHA256: "ab"}
	golden(t, "shim", func(w io.Writer) error {
		return writeShim(w, control.Shim{ShimState: serving, Version: "1", Generation: 3})
	})
	golden(t, "shim_swapping", func(w io.Writer) error {
		swapping := serving
		swapping.Bakes = noon
		swapping.Swap = &host.SwapRunning{By: "user root (uid 0)", Path: "/opt/shim", Began: noon,
			Step: host.SwapPrepare, Since: noon}
		return writeShim(w, control.Shim{ShimState: swapping, Version: "1", Generation: 3})
	})
	golden(t, "shim_gone", func(w io.Writer) error {
		return writeShim(w, control.Shim{ShimState: host.ShimState{Since: noon, SHA256: "ab", Failures: 7,
			Reason: "it exited with code 3", Next: noon}})
	})
	golden(t, "nothing", func(w io.Writer) error { return writePlugins(w, nil) })
	golden(t, "json", func(w io.Writer) error { return writeJSON(w, []any{job, plugin, volume()}) })
}

func TestHelpFitsTheTerminal(t *testing.T) {
	var check func(*cobra.Command)
	check = func(c *cobra.Command) {
		listed := regexp.MustCompile(`(?s)Available Commands:.*?\n\n`).ReplaceAllString(c.UsageString(), "")
		for line := range strings.Lines(c.Long + "\n" + listed) {
			if n := len([]rune(line)) - 1; n > 80 && !strings.HasPrefix(line, `Use "`) {
				t.Errorf("%s: %d columns: %s", c.CommandPath(), n, line)
			}
		}
		for _, sub := range c.Commands() {
			check(sub)
		}
	}
	check(newRoot(&program{}))
}

// On a terminal of 80 columns, columns that do not fit are printed completely below their row.
func TestTableFitsTheTerminal(t *testing.T) {
	table := newTable("ID", "JOB", "STATE", "REASON")
	reason := strings.Repeat("volume data is held by alloc 99; ", 4) + "see holdfast alloc status"
	table.add("0a1b2c3d", "db", "pending", reason)
	table.add("ffffffff", "ünïcödé", "running", "")
	var out bytes.Buffer
	must(t, table.fit(&out, 80))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	for _, line := range lines {
		if n := len([]rune(line)); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	got := strings.Join(strings.Fields(out.String()), " ")
	want := "ID JOB STATE 0a1b2c3d db pending reason: " + reason + " ffffffff ünïcödé running"
	if got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	out.Reset()
	if err := table.fit(&out, 400); err != nil || strings.Count(out.String(), "\n") != 3 {
		t.Errorf("%v, in 400 columns:\n%s", err, &out)
	}
}

func TestAgesAreInTheirLargestUnit(t *testing.T) {
	defer func() { now = time.Now }()
	now = func() time.Time { return noon }
	for d, want := range map[time.Duration]string{0: "0s ago", 119 * time.Second: "119s ago", 2 * time.Minute: "2m ago",
		3*time.Hour + time.Minute: "3h ago", 50 * time.Hour: "2d ago", -5 * time.Minute: "in 5m"} {
		if got := age(noon.Add(-d)); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

func TestExitCodes(t *testing.T) {
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("TMPDIR", dir)
	bad := filepath.Join(dir, "bad.hcl")
	must(t, os.WriteFile(bad, []byte("job \"x\" {}"), 0o600))
	nobody := "--address=" + filepath.Join(dir, "agent.sock")
	for line, want := range map[string]int{
		"version":                            exitOK,
		"--version":                          exitOK,
		"--help":                             exitOK,
		"nope":                               exitUsage,
		"job nope":                           exitUsage,
		"job stop":                           exitUsage,
		"run":                                exitUsage,
		"run --no-such-flag x":               exitUsage,
		"--no-such-flag job status":          exitUsage,
		"events --after=1x":                  exitUsage,
		"run --var=x=1 " + bad:               exitUsage,
		"run --var=x " + bad:                 exitUsage,
		"run --driver=docker " + bad:         exitUsage,
		"run --log-level=loud " + bad:        exitUsage,
		"run --stop-timeout=-5s " + bad:      exitUsage,
		"volume list --wait=-1s " + nobody:   exitUsage,
		"--state-dir= job status " + nobody:  exitUsage,
		"--run-dir= job status " + nobody:    exitUsage,
		"--address= job status":              exitUsage,
		"doctor --shim= " + nobody:           exitUsage,
		"job logs --tail=-1 x " + nobody:     exitUsage,
		"volume expand x --size=0 " + nobody: exitUsage,
		"run /no/such/file":                  exitFailed,
		"run --shim=/no/such/shim " + bad:    exitFailed,
		"validate --shim=/no/such " + bad:    exitFailed,
		"plugin status " + nobody:            exitNoAgent,
		"job run " + nobody + " " + bad:      exitNoAgent,
		"events --follow " + nobody:          exitNoAgent,
		"alloc logs x y " + nobody:           exitNoAgent,
		"shim status --json " + nobody:       exitNoAgent,
		"volume delete x " + nobody:          exitNoAgent,
		"plugin list --run-dir=" + dir:       exitNoAgent,
		"volume list --state-dir=" + dir:     exitNoAgent,
		"alloc status a b --run-dir=" + dir:  exitUsage,
		"snapshot create v s\xff " + nobody:  exitUsage,
		"alloc exec a -- rm \xff":            exitUsage,
		"job run --var=x=\xff " + bad:        exitUsage,
	} {
		var out, errs bytes.Buffer
		if got := run(strings.Fields(line), &out, &errs); got != want {
			t.Errorf("holdfast %s: exit code %d, want %d\n%s%s", line, got, want, out.String(), errs.String())
		}
		if want != exitOK && !strings.HasPrefix(errs.String(), "holdfast: ") &&
			!strings.Contains(line, "--json") {
			t.Errorf("holdfast %s: says %q", line, errs.String())
		}
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "holdfast-*", "agent")); len(left) > 0 {
		t.Errorf("a run that failed left %v", left)
	}
}

// The environment of a build is in no manual page.
func TestManualPagesHaveTheDefaultsOfTheProgram(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOLDFAST_STATE_DIR", "/builder")
	t.Setenv("HOLDFAST_ADDR", "/builder/agent.sock")
	if code := run([]string{"docs", dir}, io.Discard, io.Discard); code != exitOK {
		t.Fatalf("exit code %d", code)
	}
	text, err := os.ReadFile(filepath.Join(dir, "man1", "holdfast-job-run.1"))
	if err != nil || strings.Contains(string(text), "/builder") || !strings.Contains(string(text), "/holdfast/DIGEST") {
		t.Errorf("%s, %v", text, err)
	}
}

// An error is a JSON object if --json is given, even after the error. --json of a command in a task does not count.
func TestErrorsAreJSONIfAsked(t *testing.T) {
	address := "--address=" + filepath.Join(t.TempDir(), "agent.sock")
	for line, want := range map[string]bool{
		"shim status --nope --json": true, "alloc exec a --json -- ps": true, "alloc exec a -- ps --json": false,
	} {
		var out, errs bytes.Buffer
		run(append([]string{address}, strings.Fields(line)...), &out, &errs)
		if got := json.Valid(errs.Bytes()); got != want {
			t.Errorf("holdfast %s prints JSON: %v, want %v\n%s", line, got, want, errs.String())
		}
	}
}

// Each command prints JSON. It completes its arguments, except for files, which the shell completes.
func TestCommandsPrintJSONAndCompleteIDs(t *testing.T) {
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			check(sub)
		}
		_, args, _ := strings.Cut(c.Use, " ")
		files := strings.Contains(args, "FILE") || strings.Contains(args, "PATH") || strings.Contains(args, "DIR")
		switch {
		case c.HasSubCommands():
		case args != "" && !files && c.ValidArgsFunction == nil && len(c.ValidArgs) == 0:
			t.Errorf("%s does not complete %s", c.CommandPath(), args)
		case c.InheritedFlags().Lookup("json") == nil && c.Flags().Lookup("json") == nil:
			t.Errorf("%s has no --json", c.CommandPath())
		}
	}
	check(newRoot(&program{}))
}

// The version is printed as JSON, and so is the warning about a bad variable of tracing.
func TestVersionAndWarningsAsJSON(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "localhost")
	var out, errs bytes.Buffer
	var v version
	var line struct{ Warning string }
	code := run([]string{"version", "--json"}, &out, &errs)
	err := errors.Join(json.Unmarshal(out.Bytes(), &v), json.Unmarshal(errs.Bytes(), &line))
	if code != exitOK || err != nil || v.Version != host.Version || len(v.Protocols) == 0 ||
		!strings.Contains(line.Warning, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=localhost is no URL") {
		t.Errorf("%d, %v: %s%s", code, err, &out, &errs)
	}
}

// With --json each line on standard error is JSON.
func TestRemarksAsJSON(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var errs bytes.Buffer
		p := &program{json: true, errs: &errs}
		p.warnStale("etcd has not answered")
		listSecrets(p.remark, []secretUse{{Of: "volume \"a\"", Plugin: "disk", Key: "password"}})
		d := doctor{call: func(context.Context, control.DoctorRequest) (host.Diagnosis, error) {
			time.Sleep(2*reportInterval + 1)
			return host.Diagnosis{}, nil
		}}
		_, err := d.await(t.Context(), p, control.DoctorRequest{})
		must(t, err)
		lines := strings.Split(strings.TrimSpace(errs.String()), "\n")
		for _, line := range lines {
			if !json.Valid([]byte(line)) {
				t.Errorf("%q is no JSON", line)
			}
		}
		if len(lines) != 5 {
			t.Errorf("%d lines: %s", len(lines), &errs)
		}
	})
}

func TestFileKindIsRecognized(t *testing.T) {
	for path, want := range map[string]bool{
		"../../../examples/hcl/demo/notes.volume.hcl": true, "../../../examples/hcl/volumes/notes.hcl": true,
		"../../../examples/hcl/volumes/nfs-share.hcl": true,
		"../../../examples/hcl/demo/loopfs.hcl":       false, "../../../examples/hcl/jobs/bare-task.hcl": false,
		"../../../examples/hcl/jobs/database.hcl": false,
	} {
		f, err := readFile(path)
		if err != nil || f.volume != want {
			t.Errorf("%s: volume %v, %v", path, f.volume, err)
		}
	}
	for text, want := range map[string]bool{`{"job": {"x": {}}}`: false,
		`{"id": "a", ` + "\n" + `"plugin_id": "x"}`: true, "": false, "\tjob \"x\" {\n plugin_id = 1\n}": false} {
		if got := isVolume("x", []byte(text)); got != want {
			t.Errorf("%q: volume %v", text, got)
		}
	}
}

func TestFilesGetTheVariablesTheyDeclare(t *testing.T) {
	dir := t.TempDir()
	texts := []string{"variable \"one\" {}\nvariable both {\n}", "variable \"both\" {}",
		"variables {\n  list = [{ x = 1 }]\n  both = 1\n}\njob \"j\" {\n  one = 1\n}"}
	var paths []string
	for i, text := range texts {
		paths = append(paths, filepath.Join(dir, fmt.Sprint(i, ".hcl")))
		must(t, os.WriteFile(paths[i], []byte(text), 0o600))
	}
	v := &variables{values: []string{"one=1", "both=a=b"}}
	files, err := v.readFiles(paths)
	must(t, err)
	for i, want := range []map[string]string{{"one": "1", "both": "a=b"}, {"both": "a=b"}, {"both": "a=b"}} {
		if got := files[i].Variables; !maps.Equal(got, want) {
			t.Errorf("file %d: %v, want %v", i, got, want)
		}
	}
}

// Each command in a notice exists and accepts its arguments. Notices are in the transcripts of package e2e.
func TestAdvisedCommandsAreValid(t *testing.T) {
	paths, err := filepath.Glob("../../../e2e/testdata/tells/*.want")
	if err != nil || len(paths) < 10 {
		t.Fatalf("%v, %v", paths, err)
	}
	advised := map[string]bool{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		must(t, err)
		for _, m := range regexp.MustCompile(`(?m)^  .*  (holdfast .*)$`).FindAllStringSubmatch(string(text), -1) {
			advised[m[1]] = true
		}
	}
	if len(advised) < 10 {
		t.Errorf("only %d commands are advised: %v", len(advised), advised)
	}
	for line := range advised {
		c, args, err := newRoot(&program{out: io.Discard, errs: io.Discard}).Find(strings.Fields(line)[1:])
		if err == nil {
			err = c.ParseFlags(args)
		}
		if err == nil && c.HasSubCommands() {
			err = errors.New("it is a group of commands")
		}
		if err == nil {
			err = c.ValidateArgs(c.Flags().Args())
		}
		if err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
}
