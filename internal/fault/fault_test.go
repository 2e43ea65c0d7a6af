package fault

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// Read finds the faults that Binary appends to a program.
func TestBinaryCarriesItsFaults(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nexit 0\n# and so on, as a program is longer than this line\n"),
		0o700); err != nil {
		t.Fatal(err)
	}
	if got, err := Read(program); err != nil || got != nil {
		t.Errorf("without faults: %v, %v", got, err)
	}
	path := Binary(t, program, dir, "bad", "start touch /x once /mark", "serving 200ms exit",
		"Activate after error fenced times 2")
	got, err := Read(path)
	want := []Fault{
		{At: "start", Do: "touch", With: "/x", Once: "/mark"},
		{At: "serving", Later: 200 * time.Millisecond, Do: "exit"},
		{At: "Activate", After: true, Do: "error", With: "fenced", Times: 2},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %+v", err, got)
	}
	if good, err := Read(Binary(t, program, dir, "good")); err != nil || len(good) != 0 {
		t.Errorf("a good one: %v, %v", good, err)
	}
}

// An unknown line is an error, because the shim would otherwise run without the fault.
func TestParseRefusesUnknownFaults(t *testing.T) {
	for _, line := range []string{
		"Activate", "Activate hang", "Activate before", "Activate before dance", "serving exit", "start touch",
		"start touch x", "Activate before error green",
		"start exit now", "Rehearse before schema x", "start exit times x",
	} {
		if got, err := Parse(line); err == nil {
			t.Errorf("%q is %+v", line, got)
		}
	}
}
