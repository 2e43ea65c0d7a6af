package rules

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	patternLine = regexp.MustCompile(`(?m)^(?:LONG|DEATHS|COMPAT|ENGINES) +:= (.*)$`)
	slowFunc    = regexp.MustCompile(`(?s)\nfunc (Test\w+)\(t \*testing\.T\) \{\n(.*?)\n\}`)
)

// Each end-to-end test that -short skips is run by a target of the Makefile.
func TestSlowTestsAreRunByATarget(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	var targets []*regexp.Regexp
	for _, m := range patternLine.FindAllSubmatch(makefile, -1) {
		text := strings.NewReplacer("$(LONG)|", "", "$(DEATHS)|", "", "$(COMPAT)|", "",
			"/killed$$", "", // the only slow subtest of TestNoFailedCall
			"$$", "$").Replace(string(m[1]))
		targets = append(targets, regexp.MustCompile(text))
	}
	files, err := filepath.Glob(filepath.Join(root, "e2e", "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
	tests:
		for _, m := range slowFunc.FindAllSubmatch(text, -1) {
			if !bytes.Contains(m[2], []byte("slow(t)")) {
				continue
			}
			found++
			for _, target := range targets {
				if target.Match(m[1]) {
					continue tests
				}
			}
			t.Errorf("no pattern of the Makefile (LONG, DEATHS, COMPAT, ENGINES) matches %s, which -short skips", m[1])
		}
	}
	if len(targets) < 3 || found < 10 {
		t.Errorf("%d patterns and %d tests found", len(targets), found)
	}
}
