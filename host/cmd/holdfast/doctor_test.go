package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/registry"
)

// findings returns a finding for each action of repair, and some without an action.
func findings() host.Diagnosis {
	name, key := registry.VolumeName{Namespace: "default", ID: "data"}, registry.VolumeKey{Plugin: "loopfs",
		External: "vol-1"}
	return host.Diagnosis{Digest: "d1", Findings: []host.Finding{
		{Kind: registry.FoundDead, Volume: key, Name: name, Alloc: host.AllocID(alloc.ID), Request: "data",
			Path:   "/s/mnt/p/publish/x/v",
			Detail: "volume data is published here: its server is gone", Advice: "restart the alloc"},
		{Kind: registry.FoundLost, Action: registry.ActMark, Volume: key, Name: name, Path: "/s/mnt/p/stage/x",
			Detail: "nothing is mounted",
			Advice: "nothing"},
		{Kind: registry.FoundUnowned, Action: registry.ActUndo, Volume: key, Name: name, Detail: "nothing claims it",
			Advice: "see that its plugin runs"},
		{Kind: registry.FoundUsed, Path: "/s/mnt/p/stage/y", Detail: "in use: process 7 (a\nb) works in it",
			Advice: "stop its users"},
		{Kind: registry.FoundOrphan, Action: registry.ActAdopt, Volume: key, Name: name, Path: "/s/mnt/p/stage/z",
			Detail: "staged",
			Advice: "have it recorded"},
		{Kind: registry.FoundOrphan, Action: registry.ActUnmount, Path: "/s/mnt/p/stage/w",
			Detail: "ext4 of /dev/loop1 is mounted here",
			Advice: "have it unmounted"},
		{Kind: registry.FoundAttached, Volume: registry.VolumeKey{Plugin: "loopfs", External: "vol-9"},
			Detail: "no record says so",
			Advice: "detach it"},
		{Kind: registry.FoundEmpty, Action: registry.ActRemove, Path: "/s/mnt/p/stage/e", Detail: "it is empty",
			Advice: "have it removed"},
		{Kind: "later", Action: "heal", Path: "/s", Detail: "of a newer shim"},
	}}
}

// repaired returns the findings after a repair. Failed is the result of one step; empty: it succeeded too.
func repaired(failed string) host.Diagnosis {
	d := findings()
	d.Repaired = true
	for i := range d.Findings {
		if d.Findings[i].Action != registry.ActNothing {
			d.Findings[i].Result = registry.RepairDone
		}
	}
	if failed != "" {
		d.Findings[5].Result = failed
		return d
	}
	return host.Diagnosis{Digest: "d1", Repaired: true, Findings: d.Findings[7:8]}
}

func TestDoctorOutput(t *testing.T) {
	golden(t, "doctor", func(w io.Writer) error { writeDiagnosis(w, "the agent at /s", findings()); return nil })
	golden(t, "doctor_well", func(w io.Writer) error {
		writeDiagnosis(w, "/bin/holdfast-shim",
			host.Diagnosis{})
		return nil
	})
	golden(t, "doctor_advice", func(w io.Writer) error {
		writeDiagnosis(w, "the agent at /s", host.Diagnosis{Findings: findings().Findings[:1]})
		return nil
	})
	golden(t, "doctor_repaired",
		func(w io.Writer) error { writeRepair(w, repaired("not done: it is in use: process 7")); return nil })
	golden(t, "doctor_healed", func(w io.Writer) error { writeRepair(w, repaired("")); return nil })
}

// fakeShim writes a script that stands in for a shim binary and records its arguments.
func fakeShim(t *testing.T, dir string, found host.Diagnosis, code int) (path string) {
	t.Helper()
	text, err := json.Marshal(found)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(dir, fmt.Sprint("shim-", code))
	script := fmt.Sprintf("#!/bin/sh\necho \"$@\" >> %s\ncat <<'E'\n%s\nE\necho 'holdfast-shim: the state is damaged' >&2\nexit %d\n",
		filepath.Join(dir, "asked"), text, code)
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func asked(t *testing.T, dir string) (lines []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "asked"))
	if err != nil {
		t.Fatal(err)
	}
	_ = os.Remove(filepath.Join(dir, "asked"))
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

func TestDoctorWithoutAnAgent(t *testing.T) {
	partly := host.Finding{Kind: registry.FoundUnseen, Detail: "the volumes of plugin p: no", Advice: "see its log"}
	skipped := host.Finding{Kind: registry.FoundSkipped, Detail: "the volumes of plugin p: list_volumes = false",
		Advice: "none"}
	dir := t.TempDir()
	t.Setenv("HOLDFAST_ADDR", filepath.Join(dir, "nobody.sock")) // an agent with another state directory is ignored
	state, sockets := filepath.Join(dir, "s"), filepath.Join(dir, "r")
	call := "-doctor -json -state " + state + " -run " + sockets
	for what, c := range map[string]struct {
		found host.Diagnosis
		ends  int // the shim's exit code
		args  string
		code  int
		asked []string
		says  string
	}{
		"well": {host.Diagnosis{}, 0, "", exitOK, []string{call}, "no inconsistencies found"},
		"ill":  {findings(), 1, "", exitFailed, []string{call}, "its server is gone"},
		"repaired": {repaired(""), 0, "--repair", exitOK, []string{call, call + " -repair -digest d1"},
			"all inconsistencies repaired"},
		"not all repaired": {repaired("not done"), 1, "--repair", exitFailed,
			[]string{call, call + " -repair -digest d1"}, "some inconsistencies remain"},
		"nothing to repair": {host.Diagnosis{Findings: findings().Findings[:1]}, 1, "--repair", exitFailed, []string{call},
			"no automatic repair available"},
		"JSON":           {findings(), 1, "--json", exitFailed, []string{call}, `"kind": "dead"`},
		"JSON when well": {host.Diagnosis{}, 0, "--json", exitOK, []string{call}, `"findings": []`},
		"it could look at a part only": {host.Diagnosis{Findings: []host.Finding{partly}}, 1, "", exitIncomplete,
			[]string{call},
			"inspection incomplete: no inconsistencies in the inspected parts"},
		"the same as JSON": {host.Diagnosis{Findings: []host.Finding{partly}}, 1, "--json", exitIncomplete,
			[]string{call},
			"\"unexamined\": [\n    \"the volumes of plugin p: no\"\n  ]"},
		"the configuration leaves a part out": {host.Diagnosis{Findings: []host.Finding{skipped}}, 0, "", exitOK,
			[]string{call},
			"skipped\n  found   the volumes of plugin p: list_volumes = false\n  repair  none\n  advice  none\n\nno inconsistencies found"},
		"a part left out, and a part not examined": {host.Diagnosis{Findings: []host.Finding{partly, skipped}}, 1,
			"--json", exitIncomplete,
			[]string{call}, "\"unexamined\": [\n    \"the volumes of plugin p: no\"\n  ]"},
		"a part only, and it is ill": {host.Diagnosis{Findings: append([]host.Finding{partly},
			findings().Findings[:1]...)}, 1, "", exitFailed,
			[]string{call}, "the volumes of plugin p: no"},
		"it could not look": {host.Diagnosis{}, 2, "", exitInspect, []string{call},
			"holdfast: the state is damaged\n"},
		"it was no such shim": {host.Diagnosis{}, 127, "", exitInspect, []string{call}, "the state is damaged"},
	} {
		var out, errs bytes.Buffer
		args := append([]string{"doctor", "--state-dir", state, "--run-dir", sockets, "--shim",
			fakeShim(t, dir, c.found, c.ends)},
			strings.Fields(c.args)...)
		if got := run(args, &out, &errs); got != c.code {
			t.Errorf("%s: exit code %d, want %d", what, got, c.code)
		}
		if got := asked(t, dir); strings.Join(got, "\n") != strings.Join(c.asked, "\n") {
			t.Errorf("%s: asked %q", what, got)
		}
		if said := out.String() + errs.String(); !strings.Contains(said, c.says) {
			t.Errorf("%s: says\n%s", what, said)
		}
	}
	if names, _ := os.ReadDir(dir); len(names) != 4 {
		t.Errorf("something was made: %v", names)
	}
}

// With --address alone, doctor does not inspect the default state directory.
func TestDoctorInspectsOnlyTheNamedState(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOLDFAST_STATE_DIR", "")
	var errs bytes.Buffer
	args := []string{"doctor", "--address", filepath.Join(dir, "nobody.sock"), "--shim", fakeShim(t, dir, findings(), 1)}
	if got := run(args, io.Discard, &errs); got != exitNoAgent || !strings.Contains(errs.String(),
		"no agent is running") {
		t.Errorf("%d: %s", got, errs.String())
	}
	if got := run([]string{"doctor", "--state-dir", dir, "--run-dir", dir, "--shim", "/no/such/shim"}, io.Discard,
		&errs); got != exitInspect {
		t.Errorf("without a shim: %d: %s", got, errs.String())
	}
}
