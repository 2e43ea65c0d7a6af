package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFenceCommandGetsTheNodeAndItsFailureIsReported(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "fence")
	script := "#!/bin/sh\necho cutting $1\ntest $1 = node-2\n"
	must(t, os.WriteFile(program, []byte(script), 0o700))
	fence, err := fenceFunc(program)
	must(t, err)
	if err := fence(t.Context(), "node-2"); err != nil {
		t.Error(err)
	}
	err = fence(t.Context(), "node-3")
	if err == nil || !strings.Contains(err.Error(),
		`fence node-3: exit status 1; its output ends with "cutting node-3"`) {
		t.Error(err)
	}
	if _, err := fenceFunc(filepath.Join(dir, "missing")); err == nil ||
		!strings.Contains(err.Error(), "fence-command=") {
		t.Error(err)
	}
}
