package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"holdfast/internal/fault"
)

// bin is the directory with the binaries that all tests use.
var bin string

// faulty is the program of the shims that fail on purpose: see package fault.
var faulty string

// programs are built once, as this test is built.
var programs = map[string]string{
	"holdfast": "../host/cmd/holdfast", "holdfast-shim": "../shim", "loopfs": "../examples/loopfs", "csifake": "../internal/csifake/cmd/csifake",
}

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "h-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	bin = dir
	for name, pkg := range programs {
		cmd := exec.Command("go", append(append([]string{"build"}, raceFlag...), "-o", filepath.Join(dir, name), pkg)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build %s: %v\n%s", pkg, err, out)
			return 1
		}
	}
	if faulty, err = fault.Build(dir, raceFlag...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}
