package main

import (
	"slices"
	"testing"

	"holdfast/host/hosttest"
)

// The shim is in memory, so the test needs neither root nor a CSI plugin: the task may be any program.
func TestRunReportsTheLifeOfItsTask(t *testing.T) {
	shim := hosttest.New()
	defer shim.Close()
	run(t.Context(), shim.Config(), "plugin.hcl", []string{"sleep", "60"})
	var methods []string
	for _, c := range shim.Calls() {
		methods = append(methods, c.Method)
	}
	for _, want := range []string{"Jobs/Parse", "Tasks/Starting", "Tasks/Started", "Tasks/Exited"} {
		if !slices.Contains(methods, want) {
			t.Errorf("%s is not among the calls %q", want, methods)
		}
	}
}
