package config

import (
	"fmt"
	"strings"
	"testing"

	"holdfast/registry"
)

// volumeHead is a volume file without a mistake, to which tests add.
const volumeHead = `id        = "v"
plugin_id = "p"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
`

// TestErrorIsReportedAfterManyWarnings: each literal secret is a warning. The error after them still refuses the file,
// and is reported.
func TestErrorIsReportedAfterManyWarnings(t *testing.T) {
	for _, warnings := range []int{maxDiagnostics - 1, maxDiagnostics, maxKept, maxKept + 5} {
		var text strings.Builder
		text.WriteString(volumeHead + "secrets {\n")
		for i := range warnings {
			fmt.Fprintf(&text, "  s%d = \"x\"\n", i)
		}
		text.WriteString("}\nnmae = \"v\"\n")
		spec, ds := ParseVolume(Source{"v.hcl", []byte(text.String())}, Options{})
		if spec != nil || ds.Err() == nil || !strings.Contains(ds.Err().Error(), "nmae") {
			t.Errorf("%d warnings: spec %v, error %v", warnings, spec, ds.Err())
		}
		more := fmt.Sprintf("and %d more", warnings+1-maxDiagnostics)
		if got := fmt.Sprint(ds); strings.Contains(got, "and ") != strings.Contains(got, more) ||
			len(ds) > maxDiagnostics+1 {
			t.Errorf("%d warnings: %v", warnings, ds)
		}
	}
}

// TestDiagnosticsAreTheSameEachTime: the attributes of a body are in a map, and the first that exceeds the budget is
// reported.
func TestDiagnosticsAreTheSameEachTime(t *testing.T) {
	lines := func(indent, value string) (text string) {
		for i := range 24 { // each takes a tenth of the budget
			text += fmt.Sprintf("%sa%d = %s\n", indent, i, value)
		}
		return text
	}
	const data = "[for i in range(1000) : [i]]"
	for name, text := range map[string]string{
		"carried":   "locals {\n  data = " + data + "\n}\n" + inConfig(lines("    ", "local.data")),
		"variables": "variables {\n" + lines("  ", data) + "}\n" + inConfig(""),
	} {
		_, first := ParseJob(Source{"x.hcl", []byte(text)}, Options{})
		if !strings.Contains(fmt.Sprint(first), "too much data") {
			t.Fatalf("%s: %v", name, first)
		}
		for range 3 {
			if _, ds := ParseJob(Source{"x.hcl", []byte(text)}, Options{}); fmt.Sprint(ds) != fmt.Sprint(first) {
				t.Fatalf("%s: first %v, then %v", name, first, ds)
			}
		}
	}
}

// TestPositionsCountCharacters: columns count characters from 1, without a byte order mark. Bytes are of the file.
func TestPositionsCountCharacters(t *testing.T) {
	text := "\ufefftask \"äö\" { drivr = 1 }\r\n"
	_, ds := ParseJob(Source{"x.hcl", []byte(text)}, Options{})
	at := strings.Index(text, "drivr")
	want := registry.Position{Line: 1, Column: 13, Byte: at}
	for _, d := range ds {
		if d.Snippet == "drivr" {
			if d.Start != want || d.End.Byte != at+len("drivr") {
				t.Errorf("got %+v to %+v, want %+v", d.Start, d.End, want)
			}
			return
		}
	}
	t.Errorf("not found: %v", ds)
}
