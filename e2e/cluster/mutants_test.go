package cluster

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// edit replaces a text in a source file of the shim.
type edit struct{ file, from, to string }

// overlay returns the flags with which go build applies the edits.
func overlay(t *testing.T, edits []edit) []string {
	t.Helper()
	dir := t.TempDir()
	replace := map[string]string{}
	for i, e := range edits {
		file, err := filepath.Abs(filepath.Join("../..", e.file))
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Count(string(text), e.from) != 1 {
			t.Fatalf("%s does not have this text once: %s", e.file, e.from)
		}
		replace[file] = filepath.Join(dir, string(rune('a'+i))+".go")
		if err := os.WriteFile(replace[file], []byte(strings.Replace(string(text), e.from, e.to, 1)),
			0o600); err != nil {
			t.Fatal(err)
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	path := filepath.Join(dir, "overlay.json")
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return []string{"-overlay", path}
}

// TestChecksFindDefects runs nodes with a defective shim until a check finds the defect.
func TestChecksFindDefects(t *testing.T) {
	for name, c := range map[string]struct {
		edits []edit
		want  []string // an error must have one of these texts
	}{
		"claims without compare-and-swap": {[]edit{{"shim/internal/cluster/state.go",
			"If(append(d.guards.conditions(), s.alive(d)...)...)", "If(s.alive(d)...)"}},
			[]string{"not linearizable"}},
		"release before unpublish": {[]edit{
			{"shim/internal/node/release.go", "\treq.step = registry.StepUnpublish\n",
				"\tif _, err := req.controller.Unclaim(ctx, req.key, true); err != nil {\n\t\treturn err\n\t}\n" +
					"\treq.step = registry.StepUnpublish\n"},
			{"shim/internal/controller/claims.go",
				"if err := checkDetached(view, claims, claims[at], last); err != nil {",
				"if err := error(nil); err != nil {"}},
			[]string{"is used at once by", "refused to attach"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSystem(t, options{shim: overlay(t, c.edits), workers: 10, volumes: 4, seed: 1})
			var found string
			waitFor(t, "a check finds the defect", func() bool {
				lines, _, err := readHistory(s.path("history"), 0)
				if err != nil {
					t.Fatal(err)
				}
				for _, err := range slices.Concat(linearizable(lines), judgeJournal(s.path("journal"), false)) {
					if slices.ContainsFunc(c.want, func(want string) bool { return strings.Contains(err, want) }) {
						found = err
					}
				}
				return found != ""
			})
			t.Logf("found: %s", found)
		})
	}
}
