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

	"holdfast/hooks"
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
			Detail: "ext4 /dev/loop1 is mounted here",
			Advice: "have it unmounted"},
		{Kind: registry.FoundAttached, Volume: registry.VolumeKey{Plugin: "loopfs", External: "vol-9"},
			Detail: "no record says so",
			Advice: "detach it"},
		{Kind: registry.FoundEmpty, Action: registry.ActRemove, Path: "/s/mnt/p/stage/e", Detail: "it is empty",
			Advice: "have it removed"},
		{Kind: "later", Action: "heal", Path: "/s", Detail: "of a newer shim"},
	}}
}

// repaired returns the findings after a repair. failed is the result of one step; empty: all steps succeeded.
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
	diagnosis := func(name, from string, d host.Diagnosis) {
		golden(t, name, func(w io.Writer) error { writeDiagnosis(w, from, d); return nil })
	}
	diagnosis("doctor", "the agent at /s", findings())
	diagnosis("doctor_well", "/bin/holdfast-shim", host.Diagnosis{})
	diagnosis("doctor_advice", "the agent at /s", host.Diagnosis{Findings: findings().Findings[:1]})
	golden(t, "doctor_repaired", func(w io.Writer) error {
		writeRepair(w, repaired("not done: it is in use: process 7"))
		return nil
	})
	golden(t, "doctor_healed", func(w io.Writer) error { writeRepair(w, repaired("")); return nil })
}

// fakeShim writes a script that replaces a shim binary and records its arguments in the file calls.
func fakeShim(t *testing.T, dir string, found host.Diagnosis, code int) (path string) {
	t.Helper()
	text, err := json.Marshal(found)
	must(t, err)
	path = filepath.Join(dir, fmt.Sprint("shim-", code))
	script := "#!/bin/sh\necho \"$@\" >> %s/calls\ncat <<'E'\n%s\nE\n" +
		"echo 'holdfast-shim: the state is damaged' >&2\nexit %d\n"
	must(t, os.WriteFile(path, fmt.Appendf(nil, script, dir, text, code), 0o700))
	return path
}

func TestDoctorWithoutAnAgent(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOLDFAST_ADDR", filepath.Join(dir, "none.sock")) // an agent with another state directory is ignored
	calls, state, sockets := filepath.Join(dir, "calls"), filepath.Join(dir, "s"), filepath.Join(dir, "r")
	inspection := "-doctor -json -state " + state + " -run " + sockets + "\n"
	repair := inspection + strings.TrimSpace(inspection) + " -repair -digest d1\n"
	of := func(list ...host.Finding) host.Diagnosis { return host.Diagnosis{Findings: list} }
	dead := findings().Findings[0]
	unseen := host.Finding{Kind: registry.FoundUnseen, Detail: "the volumes of plugin p: no", Advice: "see its log"}
	skipped := host.Finding{Kind: registry.FoundSkipped, Detail: "list_volumes = false", Advice: "none"}
	const unexamined = "\"unexamined\": [\n    \"the volumes of plugin p: no\"\n  ]"
	for what, c := range map[string]struct {
		found    host.Diagnosis
		shimCode int
		args     string
		code     int
		calls    string
		text     string
	}{
		"well":             {of(), 0, "", exitOK, inspection, "no inconsistencies found"},
		"well, as JSON":    {of(), 0, "--json", exitOK, inspection, `"findings": []`},
		"findings":         {findings(), 1, "", exitFailed, inspection, "its server is gone"},
		"findings as JSON": {findings(), 1, "--json", exitFailed, inspection, `"kind": "dead"`},
		"repaired":         {repaired(""), 0, "--repair", exitOK, repair, "all inconsistencies repaired"},
		"partly repaired":  {repaired("not done"), 1, "--repair", exitFailed, repair, "some inconsistencies remain"},
		"only advice":      {of(dead), 1, "--repair", exitFailed, inspection, "no automatic repair available"},
		"incomplete": {of(unseen), 1, "", exitIncomplete, inspection,
			"no inconsistencies in the inspected parts"},
		"incomplete, JSON": {of(unseen, skipped), 1, "--json", exitIncomplete, inspection, unexamined},
		"incomplete, dead": {of(unseen, dead), 1, "", exitFailed, inspection, "the volumes of plugin p: no"},
		"skipped":          {of(skipped), 0, "", exitOK, inspection, "advice  none\n\nno inconsistencies found"},
		"failed":           {of(), 2, "", exitInspect, inspection, "holdfast: the state is damaged\n"},
		"not a shim":       {of(), 127, "", exitInspect, inspection, "the state is damaged"},
	} {
		var out, errs bytes.Buffer
		args := append([]string{"doctor", "--state-dir", state, "--run-dir", sockets, "--shim",
			fakeShim(t, dir, c.found, c.shimCode)}, strings.Fields(c.args)...)
		if got := run(args, &out, &errs); got != c.code {
			t.Errorf("%s: exit code %d, want %d", what, got, c.code)
		}
		if got, err := os.ReadFile(calls); err != nil || string(got) != c.calls {
			t.Errorf("%s: calls %q, %v", what, got, err)
		}
		_ = os.Remove(calls)
		if text := out.String() + errs.String(); !strings.Contains(text, c.text) {
			t.Errorf("%s: prints\n%s", what, text)
		}
	}
	if names, _ := os.ReadDir(dir); len(names) != 4 {
		t.Errorf("doctor has created files: %v", names)
	}
}

// With --address alone, doctor does not inspect the default state directory. It does not inspect the state of an agent
// that runs at another address.
func TestDoctorInspectsOnlyTheNamedState(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOLDFAST_STATE_DIR", "")
	var errs bytes.Buffer
	args := []string{"doctor", "--address", filepath.Join(dir, "none.sock"), "--shim", fakeShim(t, dir, findings(), 1)}
	if got := run(args, io.Discard, &errs); got != exitNoAgent ||
		!strings.Contains(errs.String(), "no agent is running") {
		t.Errorf("%d: %s", got, errs.String())
	}
	lock := hooks.Layout{State: dir}.HostLock()
	must(t, os.MkdirAll(filepath.Dir(lock), 0o700))
	held, err := os.Create(lock)
	must(t, err)
	defer held.Close()
	fmt.Fprint(held, os.Getpid())
	errs.Reset()
	if got := run(append(args, "--state-dir", dir), io.Discard, &errs); got != exitNoAgent ||
		!strings.Contains(errs.String(), "none.sock") ||
		!strings.Contains(errs.String(), "an agent is running: process") {
		t.Errorf("at a wrong address: %d: %s", got, errs.String())
	}
	args = []string{"doctor", "--state-dir", dir, "--run-dir", dir, "--shim", "/no/such/shim"}
	if got := run(args, io.Discard, &errs); got != exitInspect {
		t.Errorf("without a shim: %d: %s", got, errs.String())
	}
}
