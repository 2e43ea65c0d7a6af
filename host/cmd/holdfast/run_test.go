package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/host/agent"
)

func TestOneJobInTwoFilesIsRefused(t *testing.T) {
	in := func(file, id string) parsedJob { return parsedJob{&host.Job{ID: id}, agent.Source{Name: file}} }
	if err := (&foreground{jobs: []parsedJob{in("a.hcl", "a"), in("b.hcl", "b")}}).checkDuplicates(); err != nil {
		t.Errorf("two jobs: %v", err)
	}
	err := (&foreground{jobs: []parsedJob{in("a.hcl", "a"), in("b.hcl", "a")}}).checkDuplicates()
	if exitCode(err) != exitUsage || !strings.Contains(err.Error(), "both a.hcl and b.hcl") {
		t.Errorf("one job twice: %v", err)
	}
	v := host.VolumeSpec{ID: "v"}
	if err := (&foreground{volumes: []host.VolumeSpec{v, v}}).checkDuplicates(); exitCode(err) != exitUsage {
		t.Errorf("one volume twice: %v", err)
	}
}

func TestProgressIsLinesOrJSON(t *testing.T) {
	n := agent.Note{Alloc: "0a1b2c3d-0", Job: "db", Place: "[1]", Task: "main", Text: "started"}
	var people, programs bytes.Buffer
	_ = newLines(&people, false).note(n)
	_ = newLines(&programs, true).note(n)
	if !strings.HasSuffix(people.String(), "s  task main of db[1] started\n") {
		t.Errorf("for people: %q", people.String())
	}
	var got line
	if err := json.Unmarshal(programs.Bytes(),
		&got); err != nil || got.Note == nil || got.Note.Alloc != n.Alloc || got.Text != "task main of db[1] started" {
		t.Errorf("for programs: %q, %v", programs.String(), err)
	}
}

func TestFilesThatCannotBeJobs(t *testing.T) {
	dir := t.TempDir()
	job, volume, huge := filepath.Join(dir, "j.hcl"), filepath.Join(dir, "v.hcl"), filepath.Join(dir, "huge.hcl")
	for path, text := range map[string]string{job: `job "j" {}`, volume: "id = \"v\"\nplugin_id = \"p\"\n",
		huge: strings.Repeat("#", maxFile+1)} {
		must(t, os.WriteFile(path, []byte(text), 0o600))
	}
	for _, c := range []struct {
		path   string
		volume bool
		want   string
	}{
		{job, false, ""}, {volume, true, ""}, {job, true, "holdfast job run"},
		{volume, false, "holdfast volume create"},
		{huge, false, "is larger than 512 KiB"}, {dir, false, dir + ": this is a directory; name a file"},
	} {
		_, err := (&variables{}).readOne(c.path, c.volume)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s as a volume %v: %v", c.path, c.volume, err)
		}
	}
	// An unreadable file does not hide the verdicts of the others.
	files, err := (&variables{}).readFiles([]string{dir, job})
	if err != nil || len(files) != 2 || files[0].err == nil || files[1].err != nil {
		t.Errorf("%v, %v", files, err)
	}
	_, _, ofVariables := (&variables{files: []string{dir}}).read()
	c, _ := agentCommand(t)
	_, _, ofConfig := readConfig(c, dir)
	for _, err := range []error{ofVariables, ofConfig} {
		if err == nil || !strings.HasSuffix(err.Error(), dir+": this is a directory; name a file") {
			t.Error(err)
		}
	}
}
