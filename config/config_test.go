package config

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/registry"
)

var update = flag.Bool("update", false, "write the golden files")

// parse reads a file by its name: a name that contains "volume" is a volume file.
func parse(name string, text []byte) (any, registry.Diagnostics) {
	return parseWith(testOptions(), name, text)
}

func parseWith(opts Options, name string, text []byte) (any, registry.Diagnostics) {
	src := Source{Name: filepath.Base(name), Text: text}
	if strings.Contains(name, "volume") {
		spec, ds := ParseVolume(src, opts)
		if spec == nil {
			return nil, ds
		}
		return spec, ds
	}
	job, ds := ParseJob(src, opts)
	if job == nil {
		return nil, ds
	}
	opened := struct {
		Job    any            `json:"job"`
		Opened map[string]any `json:"opened,omitempty"`
	}{job, map[string]any{}}
	for _, g := range job.Groups {
		if len(g.Sealed) > 0 {
			opened.Opened[g.Name], _ = OpenGroup(g.Sealed)
		}
		for _, t := range g.Tasks {
			if len(t.Sealed) > 0 {
				opened.Opened[g.Name+"/"+string(t.Name)], _ = OpenTask(t.Sealed)
			}
		}
	}
	return opened, ds
}

func testOptions() Options {
	return Options{ReadFile: func(path string) ([]byte, error) {
		if path == "motd.txt" {
			return []byte("hello\n"), nil
		}
		return nil, errors.New("there is no such file")
	}}
}

func matches(t *testing.T, pattern string, atLeast int) []string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) < atLeast {
		t.Fatalf("%s matches %d files, want at least %d: %v", pattern, len(names), atLeast, err)
	}
	return names
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// golden compares got with a file, or writes the file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want := string(read(t, name)); got != want {
		t.Errorf("%s differs (go test ./config -update writes it)\ngot:\n%s\nwant:\n%s", name, got, want)
	}
}

// formatted formats the diagnostics.
func formatted(ds registry.Diagnostics) string {
	text := ""
	for _, d := range ds {
		text += d.String() + "\n"
		if d.Snippet != "" {
			text += "    " + d.Snippet + "\n"
		}
	}
	return text
}

// TestGood checks that the good files parse. A file without warnings has no .want file.
func TestGood(t *testing.T) {
	for _, name := range append(matches(t, "testdata/good/*.hcl", 8), nextFiles...) {
		got, ds := parse(name, read(t, name))
		if ds.Err() != nil {
			t.Errorf("%v", ds.Err())
			continue
		}
		want := strings.TrimSuffix(name, ".hcl") + ".want"
		if _, err := os.Stat(want); err == nil || len(ds) > 0 {
			golden(t, want, formatted(ds))
		}
		text, err := json.MarshalIndent(got, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		golden(t, strings.TrimSuffix(name, ".hcl")+".json", string(text)+"\n")
	}
}

func TestBad(t *testing.T) {
	for _, name := range matches(t, "testdata/bad/*.hcl", 20) {
		got, ds := parse(name, read(t, name))
		if got != nil || ds.Err() == nil {
			t.Errorf("%s was accepted", name)
		}
		if !errors.Is(ds.Err(), registry.ErrInvalid) {
			t.Errorf("%s: %v is not an ErrInvalid", name, ds.Err())
		}
		text := formatted(ds)
		if strings.Contains(text, "hunter2") {
			t.Errorf("%s: a secret is shown: %s", name, text)
		}
		golden(t, strings.TrimSuffix(name, ".hcl")+".want", text)
	}
}

// TestExamples checks that every example parses unchanged, without values of variables.
func TestExamples(t *testing.T) {
	opts := testOptions()
	for _, name := range matches(t, "../examples/hcl/*/*.hcl", 34) {
		if got, ds := parseWith(opts, name, read(t, name)); got == nil || len(ds) > 0 {
			t.Errorf("%s: %v", name, ds.Err())
		}
	}
}

// TestUnsetVariableIsNoMistake: holdfast validate reads files without the values of their variables. It reports no
// mistake that some value would mend.
func TestUnsetVariableIsNoMistake(t *testing.T) {
	for _, name := range matches(t, "testdata/unset/*.hcl", 4) {
		if got, ds := parseWith(Options{UnsetUnknown: true}, name, read(t, name)); got == nil || len(ds) > 0 {
			t.Errorf("%v", ds)
		}
		if got, _ := parse(name, read(t, name)); got != nil {
			t.Errorf("%s was accepted without a value", name)
		}
	}
}
